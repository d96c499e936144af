# SPDX-License-Identifier: Apache-2.0
"""Runs with Lion and Muon: they learn, resume, and refuse AdamW's options."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import coat_lion
from tests.attacks.equality import check_runs
from tests.train.runs import MODEL, losses, run
from train import optimizers, pretrain, step
from train.memory.step import state_of
from train.presets import PRESETS, demo

OTHERS = ("coat_lion", "coat_muon")


def config(optimizer, **options):
  optim = dataclasses.replace(demo().optim, optimizer=optimizer)
  model = dataclasses.replace(demo().model, **MODEL)
  options = dict(report_state=False, model=model) | options
  return dataclasses.replace(demo(), optim=optim, **options)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OTHERS)
def test_resumed_run_is_bit_identical_to_an_uninterrupted_run(
  tmp_path, optimizer, capsys
):
  options = dict(optim__optimizer=optimizer, optim__lr=1e-3, params="bfloat16")
  flags = []
  if optimizer == "coat_lion":
    flags = ["--optimizer-in-backward"]
    options |= dict(params="bfloat16_low8", optim__clip="share")
  out, whole = tmp_path / "out", tmp_path / "whole"
  assert run(out, *flags, **options) == 0
  shutil.copytree(out, whole)
  # As if the run had been killed before it wrote this checkpoint.
  shutil.rmtree(out / "checkpoints" / "8")
  assert run(out, *flags, "--resume", **options) == 0
  check_runs(out, whole)
  held_out = losses(out)
  assert held_out[8, "held_out_loss"] < held_out[4, "held_out_loss"]
  # States of these optimizers cannot be converted to another codec, so the
  # error must not suggest it.
  options |= dict(optim__codec="log8", steps=9)
  assert run(out, *flags, "--resume", **options) == 2
  errors = capsys.readouterr().err
  assert "-> log8; pass the options with which" in " ".join(errors.split())


@pytest.mark.parametrize("optimizer", OTHERS)
def test_plan_counts_one_moment(optimizer):
  def state_bytes(optimizer):
    state = state_of(config(optimizer)).optimizer
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

  # Without second moments, the state would be half as large. It is larger
  # because small leaves are f32 and, with Muon, AdamW updates embeddings.
  assert 0.45 < state_bytes(optimizer) / state_bytes("coat_adamw") < 0.95


def test_presets_adapt_to_the_optimizer_and_unused_options_are_refused(
  monkeypatch, capsys
):
  def only_read(read, load, words):
    return read(words)

  monkeypatch.setattr(pretrain, "run_command", only_read)
  some = {name: PRESETS[name] for name in ("demo", "olmo_1b")}
  # tyro parses every preset, which is slow.
  monkeypatch.setattr(pretrain, "PRESETS", some)

  def read(*words):
    return pretrain.main(words)

  lion, muon = ("--optim.optimizer", "coat_lion"), "--optim.optimizer=coat_muon"
  found = read("olmo_1b", *lion)
  assert (found.optim.optimizer, found.optim.eps) == ("coat_lion", 1e-8)
  assert found.optim.lr == 4e-4
  # Muon leaves some parameters to AdamW, so it keeps the preset's eps.
  found = read("olmo_1b", muon)
  assert (found.optim.optimizer, found.optim.eps) == ("coat_muon", 1e-5)
  assert not read("demo", muon).report_state
  assert not read("demo", muon, "--no-report-state").report_state
  assert read("demo").report_state and read("olmo_1b").optim.eps == 1e-5
  for words, message in (
    ((*lion, "--optim.eps", "1e-5"), "eps applies to optimizer coat_adamw or"),
    (
      (*lion, "--report-state"),
      "report_state needs optim.optimizer coat_adamw",
    ),
    (("--optim.optimizer", "lion"), "invalid choice"),
    (("--optim.optimizer",), "argument"),
  ):
    with pytest.raises(SystemExit) as stopped:
      read("demo", *words)
    errors = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert stopped.value.code == 2 and message in errors


@pytest.mark.parametrize("optimizer", ["coat_adamw", *OTHERS])
def test_every_optimizer_decays_the_same_leaves(optimizer):
  params = {
    **{name: jnp.ones((8, 8)) for name in ("embedding", "head")},
    "layers": {"mlp": {"up": {"kernel": jnp.ones((1, 8, 8))}}},
    "norm": {"scale": jnp.ones(8)},
  }
  tx = step.build_optimizer(config(optimizer), rate=0.5, seed=0)
  zeros = jax.tree.map(jnp.zeros_like, params)
  state = tx.init(params)
  new, new_state = tx.apply(zeros, state, params)
  assert jax.tree.structure(new_state) == jax.tree.structure(state)
  means = [float(jnp.mean(x)) for x in jax.tree.leaves(new)]
  got = dict(zip(step.leaf_names(new), means, strict=True))
  decayed = {"head", "layers/mlp/up/kernel"}
  assert {k for k, x in got.items() if x != 1} == decayed
  # Gradients are zero, so weights only decay, to 1 - 0.5 * 0.1.
  assert [got[k] for k in decayed] == pytest.approx([0.95, 0.95])


def test_muon_equals_optax_on_clipped_gradients():
  # Muon's update depends on the scale of the gradient only because of eps.
  rate, eps = 0.5, 0.05
  muon = config("coat_muon")
  optim = dataclasses.replace(
    muon.optim, codec="float32", eps=eps, weight_decay=0.1, momentum=0.8
  )
  tx = step.build_optimizer(
    dataclasses.replace(muon, optim=optim), rate=rate, seed=0
  )
  normal = 0.05 * np.random.default_rng(0).normal(size=(4, 8, 16))
  tables, matrices = (
    jnp.asarray(normal[:2], "f4"),
    jnp.asarray(normal[2:], "f4"),
  )
  params, grads = (
    {"embedding": x, "layers": {"mlp": {"up": {"kernel": y[None]}}}}
    for x, y in zip(tables, matrices, strict=True)
  )
  got, _ = tx.apply(grads, tx.init(params), params, grad_scale=0.5)
  theirs = optax.contrib.muon(
    rate,
    beta=0.8,
    eps=eps,
    weight_decay=0.1,
    adam_b1=optim.b1,
    adam_b2=optim.b2,
    consistent_rms=0.2,
  )
  # optax.contrib.muon uses AdamW for an array with three axes.
  params, grads = (
    {"embedding": x[None], "up": y}
    for x, y in zip(tables, matrices, strict=True)
  )
  grads = jax.tree.map(lambda g: 0.5 * g, grads)
  updates, _ = theirs.update(grads, theirs.init(params), params)
  want = optax.apply_updates(params, updates)
  np.testing.assert_allclose(got["embedding"], want["embedding"][0], atol=1e-6)
  kernel = got["layers"]["mlp"]["up"]["kernel"][0]
  # Updates are about 0.1. Each of Muon's five iterations sums over rows in f32,
  # which adds rounding errors.
  np.testing.assert_allclose(kernel, want["up"], atol=1e-5)


def test_rounding_of_updated_parameters_depends_on_the_step():
  tx = optimizers.of_transformation(coat_lion(1e-3), seed=0)
  params = {"w": jnp.ones((8, 64), "bfloat16")}
  state = tx.init(params)

  def step(count):
    later = jax.tree.map(
      lambda x: x + count if x.dtype == jnp.int32 else x, state
    )
    return np.asarray(tx.apply(params, later, params)[0]["w"], "float32")

  np.testing.assert_array_equal(step(0), step(0))
  assert 0.1 < np.mean(step(0) != step(1)) < 0.9


@pytest.mark.parametrize("optimizer", OTHERS)
def test_options_of_other_optimizers_are_refused(optimizer):
  of_leaves = "optim.optimizer coat_adamw or coat_lion"
  for options, words in (
    (dict(optimizer_in_backward=True), f"in_backward needs {of_leaves}"),
    (dict(params="bfloat16_low8"), f"bfloat16_low8 needs {of_leaves}"),
    (dict(report_state=True), "report_state needs optim.optimizer coat_adamw,"),
    (dict(resume=True, convert_state=True), "convert_state needs"),
  ):
    if optimizer == "coat_lion" and of_leaves in words:
      continue
    with pytest.raises(ValueError, match=words):
      config(optimizer, **options)
  with pytest.raises(ValueError, match="momentum applies to optimizer"):
    dataclasses.replace(demo().optim, momentum=0.9)
