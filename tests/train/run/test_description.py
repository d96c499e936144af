# SPDX-License-Identifier: Apache-2.0
"""Descriptions of runs: which runs may continue, and damaged descriptions."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.train.data.streams import numbered
from train.config import TrainConfig, resume_rule
from train.finetune_config import FinetuneConfig
from train.presets import demo
from train.run.description import (
  check_same,
  configuration,
  describe,
  is_described,
)
from train.vit_config import VitConfig

TOKENS = numbered(1000)


def config(**values):
  return dataclasses.replace(demo(), **values)


def described(made, **changes):
  """Returns a description after a round trip through JSON."""
  return json.loads(json.dumps(describe(made, TOKENS) | changes))


def compare(saved, now, tokens=TOKENS):
  return check_same(Path("checkpoints/100"), saved, now, tokens)


def test_same_run_may_be_resumed():
  same = config(resume=True, keep=1, compare="bf16", eval_every=7)
  assert compare(described(demo()), same) == []


def test_allowed_changes_are_reported():
  optim = dataclasses.replace(demo().optim, lr=5e-4)
  now = config(steps=300, optim=optim, eval_batches=1)
  assert compare(described(demo()), now) == [
    "optim.lr: 0.001 -> 0.0005",
    "steps: 200 -> 300",
    "eval_batches: 16 -> 1",
  ]


def test_changed_evaluation_batches_are_reported_in_every_program():
  for kind in (TrainConfig, FinetuneConfig, VitConfig):
    assert resume_rule("eval_batches", kind) == "reported"


@pytest.mark.parametrize(
  "values, words",
  [
    (dict(recipe="bf16"), "recipe: coat -> bf16"),
    (dict(residuals="coat"), "residuals: minimal -> coat"),
    (dict(seed=1), "seed: 0 -> 1"),
    (dict(batch=8), "batch: 4 -> 8"),
    (
      dict(model=dataclasses.replace(demo().model, d_ff=64)),
      "model.d_ff: 352 -> 64",
    ),
    (
      dict(optim=dataclasses.replace(demo().optim, codec="log8")),
      "optim.codec: coat -> log8",
    ),
  ],
)
def test_checkpoint_of_another_run_is_rejected(values, words):
  with pytest.raises(
    ValueError, match=f"checkpoints/100 was trained with .*{words}"
  ):
    compare(described(demo()), config(**values))


def test_checkpoint_of_other_data_is_rejected():
  with pytest.raises(ValueError, match="data: the fingerprint differs"):
    compare(described(demo()), demo(), tokens=numbered(1001))


def test_error_names_the_changed_option_and_not_the_data():
  other = numbered(1001)
  with pytest.raises(ValueError, match="given.: seq: 256 -> 128; pass the opt"):
    compare(described(demo()), config(seq=128), tokens=other)


def test_changed_file_times_are_reported():
  other = described(demo(), change_times="others")
  (hint,) = compare(other, demo())
  assert "changed or copied after the checkpoint was saved" in hint


def test_codec_may_change_only_with_convert_state():
  optim = dataclasses.replace(
    demo().optim, second="e5m2", rounding="nearest", group_size=64
  )
  now = config(optim=optim, resume=True)
  with pytest.raises(ValueError, match="e4m3 -> e5m2; pass --convert-state"):
    compare(described(demo()), now)
  now = dataclasses.replace(now, convert_state=True)
  assert sorted(compare(described(demo()), now)) == [
    "optim.group_size: 128 -> 64",
    "optim.rounding: stochastic -> nearest",
    "optim.second: e4m3 -> e5m2",
  ]
  other = dataclasses.replace(now, seed=1)
  with pytest.raises(ValueError, match="seed: 0 -> 1.*; pass the options"):
    compare(described(demo()), other)


def test_weights_may_change_only_with_convert_state():
  now = config(params="bfloat16_low8", resume=True)
  words = "params: float32 -> bfloat16_low8; pass --convert-state to"
  with pytest.raises(ValueError, match=words):
    compare(described(demo()), now)
  now = dataclasses.replace(now, convert_state=True)
  assert compare(described(demo()), now) == ["params: float32 -> bfloat16_low8"]


def test_description_restores_the_configuration():
  made = config(steps=7, batch=8)
  assert configuration(described(made)) == made


@pytest.mark.parametrize(
  "text", ["", "{}", "null", '{"format": 1}', "\xff", "[" * 300_000]
)
def test_other_files_are_not_descriptions(tmp_path, text):
  file = tmp_path / "config.json"
  assert not is_described(file)
  file.write_text(text)
  assert not is_described(file)
  file.write_text(json.dumps(described(demo())))
  assert is_described(file)
