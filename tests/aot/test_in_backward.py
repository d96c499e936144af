# SPDX-License-Identifier: Apache-2.0
"""Compiles the optimizer step in the backward pass for an H200."""

import dataclasses
import re

import jax
import pytest

from benchmarks import training_step

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(
  "variant", [pytest.param("lean", marks=pytest.mark.slow), "leanest_lion"]
)
def test_stacks_are_updated_in_place(variant):
  config = training_step.configure("demo_gpu", variant, batch=1, seq=1024)
  # No other axis has 7 values, so arrays with such an axis are stacks.
  model = dataclasses.replace(config.model, num_layers=7)
  compiled, state = training_step.compile_step(
    dataclasses.replace(config, model=model)
  )
  stacks = {
    ",".join(map(str, leaf.shape))
    for leaf in jax.tree.leaves((state.params, state.optimizer))
    if leaf.ndim >= 3
  }
  assert len(stacks) >= 8  # Four weights, and their moments.
  text = compiled.as_text()
  made = re.findall(r"= \w+\[([\d,]+)\]\S* (copy|copy-start)\(", text)
  assert made and not stacks & {shape for shape, _ in made}
  assert "mosaic_gpu" in text
