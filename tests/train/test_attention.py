# SPDX-License-Identifier: Apache-2.0
"""What a run says of the backend that computes attention in FP8."""

import dataclasses

import pytest

from tests.train import llava
from tests.train.runs import run
from train import attention, pretrained
from train.mesh import make_mesh
from train.presets import PRESETS
from train.vit_config import vit_s16

FP8 = dict(recipe="coat", attention="fp8", attention_compute="fp8")


def said(preset, *, has_segments=False, mesh=None, **options):
  config = dataclasses.replace(PRESETS[preset](), **FP8 | options)
  lines = attention.describe_fp8(config, has_segments=has_segments, mesh=mesh)
  assert len(lines) == 1
  return lines[0]


@pytest.mark.parametrize(
  "preset, has_segments, words",
  [
    ("llama2_7b", False, "decoder: cudnn on a GPU, xla elsewhere"),
    ("llama2_7b", True, "got an id for each token); slow on a GPU"),
    ("gemma2_2b", False, "got soft_cap=50.0); slow on a GPU"),
    ("gpt2", False, "got heads of 64, 1024 queries"),
  ],
)
def test_backend_of_decoders_is_said(preset, has_segments, words):
  assert words in said(preset, has_segments=has_segments)


def test_layers_are_asked_as_they_run():
  sizes = {"data": 2, "fsdp": 4, "tensor": 1}
  mesh = make_mesh(sizes)
  assert "cudnn on a GPU" in said("llama2_7b", mesh=mesh)
  assert "--implementation xla" in said("llama2_7b", implementation="xla")


def test_towers_attend_through_xla(tmp_path):
  config = dataclasses.replace(vit_s16(), **FP8)
  (line,) = attention.describe_fp8(config, has_segments=False)
  assert "vision tower: xla everywhere" in line and "197 queries" in line
  folder = llava.make(tmp_path)
  tower, decoder = attention.describe_fp8(
    llava.config_of(folder, **FP8), has_segments=True
  )
  assert "vision tower: xla everywhere" in tower
  assert "decoder: xla everywhere" in decoder


def test_run_says_it_before_it_begins(tmp_path, monkeypatch, capsys):
  def stop(*_):
    raise ValueError("enough")

  monkeypatch.setattr(pretrained, "initial_state", stop)
  out = tmp_path / "run"
  options = {name: x for name, x in FP8.items() if name != "recipe"}
  assert run(out, **options) == 2
  assert (
    f"{out}: attention in FP8, decoder: xla every" in capsys.readouterr().err
  )
  assert run(out) == 2
  assert "attention in FP8" not in capsys.readouterr().err
