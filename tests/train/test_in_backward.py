# SPDX-License-Identifier: Apache-2.0
"""Training with the optimizer's updates in the backward pass."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from tests.attacks.equality import check_runs
from tests.matrices import quick
from tests.train import steps
from tests.train.runs import arguments, losses, run
from tests.train.steps import (
  EXACT,
  SMALL,
  Trained,
  gpt2,
  largest_difference,
  on,
)
from train import convert

# No gradient norm is this large, so every clipping scale is exactly 1.
UNCLIPPED = 1e9


def with_clip(config, clip, grad_clip=UNCLIPPED):
  optim = dataclasses.replace(config.optim, clip=clip, grad_clip=grad_clip)
  return dataclasses.replace(config, optim=optim)


def in_backward(config):
  return dataclasses.replace(config, optimizer_in_backward=True)


def lion(config):
  optim = dataclasses.replace(config.optim, optimizer="coat_lion", lr=1e-3)
  return dataclasses.replace(config, optim=optim)


def tied(config):
  model = dataclasses.replace(config.model, tied_embeddings=True)
  return dataclasses.replace(config, model=model)


def gemma(config):
  """Makes the model a Gemma 3 with local and global layers, and soft caps."""
  model = dataclasses.replace(
    config.model,
    family="gemma3_text",
    num_layers=3,
    window=8,
    full_every=2,
    window_rope_theta=100.0,
    attention_soft_cap=5.0,
    logits_soft_cap=10.0,
  )
  return dataclasses.replace(config, model=model)


@pytest.mark.parametrize(
  "config",
  quick(
    0,
    [
      # Each case covers several options, because compiling two steps is slow.
      on(SMALL, "", params="bfloat16_low8", weight_cache="codes"),
      # GPT-2 also has an embedding of positions.
      on(gpt2(SMALL), "fsdp=8", params="bfloat16"),
      on(tied(EXACT), "data=2,fsdp=2,tensor=2"),
      on(lion(gemma(SMALL)), "fsdp=8", params="bfloat16", remat="fp8"),
    ],
  ),
)
def test_steps_are_bit_identical_to_ordinary_steps(config, monkeypatch):
  monkeypatch.setattr(steps, "STEPS", 10)
  config = with_clip(config, "share")
  ordinary = Trained(config).run()
  other = Trained(in_backward(config)).run()
  assert ordinary.losses == other.losses
  assert ordinary.losses[0] - ordinary.losses[-1] > 0.1
  pairs = zip(
    jax.tree.leaves((ordinary.state.params, ordinary.state.optimizer)),
    jax.tree.leaves((other.state.params, other.state.optimizer)),
    strict=True,
  )
  for x, y in pairs:
    assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "clip"), [("", "adaptive"), ("fsdp=8", "share")]
)
def test_clipping_in_backward_equals_that_of_ordinary_steps(mesh, clip):
  config = with_clip(on(SMALL, mesh), clip, grad_clip=0.1)
  config = dataclasses.replace(config, recipe="bf16", compute="float32")
  ordinary, other = (Trained(x).run() for x in (config, in_backward(config)))
  assert largest_difference(ordinary, other) <= 1e-5
  norms = (jax.tree.leaves(x.state.clip.own) for x in (ordinary, other))
  for x, y in zip(*norms, strict=True):
    assert x.shape in ((), (SMALL.model.num_layers,))
    np.testing.assert_allclose(x, y, rtol=1e-3)


@pytest.mark.slow
def test_resumed_run_keeps_its_gradient_norms(tmp_path):
  options = dict(optim__clip="adaptive", optim__grad_clip=0.1)
  flags = "--optimizer-in-backward", "--no-report-state"
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  assert run(whole, *flags, **options) == 0
  shutil.copytree(whole, parts)
  # As if the run had been killed before it wrote this checkpoint.
  shutil.rmtree(parts / "checkpoints" / "8")
  assert run(parts, *flags, "--resume", **options) == 0
  check_runs(parts, whole)


@pytest.mark.slow
def test_run_may_change_its_clipping_with_convert_state(tmp_path, capsys):
  out, flags = tmp_path / "out", ("--resume", "--no-report-state")
  assert run(out, "--no-report-state", steps=4) == 0
  lean = (*flags, "--optimizer-in-backward")
  assert run(out, *lean, steps=8, optim__clip="share") == 2
  assert "convert-state" in capsys.readouterr().err
  convert = "--convert-state"
  assert run(out, *lean, convert, steps=6, optim__clip="share") == 0
  assert run(out, *lean, convert, steps=8, optim__clip="adaptive") == 0
  assert run(out, *flags, convert, steps=10, optim__clip="global") == 0
  assert losses(out)[1, "loss"] > losses(out)[10, "loss"]


@pytest.mark.slow
def test_imported_run_can_be_resumed_without_gradient_norms(tmp_path):
  out, exported = tmp_path / "out", tmp_path / "exported"
  made = tmp_path / "made"
  assert run(out, "--no-report-state", steps=4) == 0
  assert convert.main(["export", str(out), str(exported)]) == 0
  options = ("--no-report-state", "--optimizer-in-backward")
  line = arguments(made, *options, optim__clip="share")
  assert convert.main(["import", str(exported), *line]) == 0
  assert run(made, "--resume", *options, optim__clip="share") == 0


@pytest.mark.slow
def test_gradient_that_is_not_finite_stops_the_run(tmp_path, capsys):
  out = tmp_path / "out"
  options = dict(optim__lr=1e37, save_every=3, optim__warmup=0)
  flags = "--optimizer-in-backward", "--no-report-state"
  assert run(out, *flags, optim__clip="adaptive", **options) == 1
  errors = capsys.readouterr().err
  assert "step 2 has loss nan" in errors
  assert "not finite: embedding, " in errors and "mlp/down" in errors


@pytest.mark.parametrize(
  "values, words",
  [
    (dict(accumulate=2), "with accumulate 2: each microbatch would be a"),
    (dict(report_state=True), "with report_state: .* pass --no-report-state"),
    (dict(optim=SMALL.optim), "with optim.clip global: .* --optim.clip share"),
  ],
)
def test_options_that_need_all_gradients_are_refused(values, words):
  config = with_clip(SMALL, "adaptive")
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(config, optimizer_in_backward=True, **values)
