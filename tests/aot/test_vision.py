# SPDX-License-Identifier: Apache-2.0
"""Compiles a vision tower's layer for an H200."""

import math
import re

import jax.numpy as jnp
import pytest

from benchmarks import layer
from coat_jax import recipes
from tests.aot.compiling import (
  compile_for_h200,
  custom_calls,
  fp8_matmul_calls,
  instructions,
  temporary_bytes,
)

pytestmark = pytest.mark.aot

# An image has 729 or 577 tokens, but FP8 matmuls need the number of tokens in
# the batch to be a multiple of 16, so we use 16 images.
IMAGES = 16
OPERATIONS = {
  *("norm_input", "norm_fwd", "norm_bwd"),
  *("activation_input", "activation_fwd", "activation_bwd_operands"),
  "join_heads_operand",
}


def compiled(tower, recipe, depth=None):
  """Compiles the gradients of one layer, or of a scan over `depth` layers."""
  config = layer.TOWERS[tower]
  built = layer.Layer(config, layer.Variant(recipe))
  shape = (IMAGES, config.num_tokens, config.d_model)
  run = built.forward if depth is None else built.scanned
  specs = layer.make_specs(built, shape, jnp.bfloat16, depth)
  return compile_for_h200(layer.with_gradients(run), *specs)


@pytest.mark.parametrize("tower", layer.TOWERS)
def test_layer_runs_on_kernels_and_fp8_matmuls(tower):
  """Covers quick GELU, non-causal attention, and heads of size 72."""
  found = compiled(tower, recipes.coat())
  assert len(fp8_matmul_calls(found)) == 4 * 3
  assert not [x for x in instructions(found) if x.opcode == "dot"]
  calls = custom_calls(found)
  assert calls["__cudnn$fmhaSoftmax"] == 1
  assert calls["__cudnn$fmhaSoftmaxBackward"] == 1
  text = found.as_text()
  # A Mosaic GPU kernel has the name of its jitted function.
  names = set(re.findall(r"jit\((\w+)\)/[^/]*/mpmd_map", text))
  assert names >= OPERATIONS, OPERATIONS - names
  assert "CAUSAL" not in text


@pytest.mark.parametrize("tower", layer.TOWERS)
def test_splitting_heads_is_the_only_large_fusion(tower):
  """Checks that matmuls add biases and the residual stream, so XLA need not."""
  config, found = layer.TOWERS[tower], compiled(tower, recipes.coat())
  biased = [x for x in fp8_matmul_calls(found) if '"epilogue":"BIAS"' in x.text]
  assert len(biased) == 4
  assert sum('"beta":1' in x.text for x in biased) == 2
  size = IMAGES * config.num_tokens * config.d_model
  fusions = [x for x in instructions(found) if x.opcode == "fusion"]
  # Skip FP8 arrays: XLA pads them if it sums a weight's gradient in parts.
  values = [x for x in fusions if "f8e" not in x.shape]
  passes = [x for x in values if largest(x.shape) >= size]
  assert [x.name for x in passes] == ["loop_slice_fusion"]


def largest(shape):
  """Returns the number of values in the largest array of a shape."""
  sizes = re.findall(r"\[([\d,]+)\]", shape)
  return max((math.prod(map(int, x.split(","))) for x in sizes), default=1)


def test_layer_stores_at_most_36_percent_of_what_bf16_stores():
  few, many = (
    {
      name: temporary_bytes(compiled("siglip_so400m", recipe, depth))
      for name, recipe in (("coat", recipes.coat()), ("bf16", recipes.bf16()))
    }
    for depth in (2, 4)
  )
  assert many["coat"] - few["coat"] <= 0.36 * (many["bf16"] - few["bf16"])
