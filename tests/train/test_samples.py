# SPDX-License-Identifier: Apache-2.0
"""Samples of a model's answers during training."""

import contextlib

import numpy as np
from flax import nnx

from tests.train.evaluation.models import alphabet_model
from train.conversations import HeldOutSamples, Prompt
from train.data.text import ByteText
from train.run.metrics import read_metrics


def test_nan_logits_print_a_line_and_do_not_end_the_run(tmp_path):
  model, path = alphabet_model(), tmp_path / "samples.jsonl"
  graph, params = nnx.split(model)
  samples = HeldOutSamples(
    path,
    [Prompt([*b"ab"], [*b"cd"])],
    ByteText(),
    graph=graph,
    mesh=None,
    most=3,
    resumed_step=0,
  )
  with contextlib.closing(samples):
    assert samples.write(1, params) == ["  sample 0: ab => cde"]
    scale = params["norm"]["scale"]
    scale.set_value(scale[...] * np.nan)
    (line,) = samples.write(2, params)
  assert line.startswith("  samples: generate: logits must be finite, got NaN ")
  assert [row["step"] for row in read_metrics(path)] == [1]
