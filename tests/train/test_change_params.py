# SPDX-License-Identifier: Apache-2.0
"""Runs that change how weights are stored, and their exports."""

import dataclasses
import itertools
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.attacks.equality import check_runs
from tests.comparing import assert_same_bits
from tests.matrices import quick
from tests.optimizer.test_weights import oracle
from tests.train.adam_states import encoded, moments
from tests.train.data.streams import numbered
from tests.train.runs import (
  arguments,
  losses,
  programs_on_disk,
  run,
)
from tests.train.test_change_codec import SHAPES, Batches, config
from train import convert, restore, step, weights
from train.run.checkpoint import (
  Checkpoints,
  read_description,
  restore_state,
)
from train.run.description import configuration, describe
from train.run.directory import RunDirectory

KINDS = ("float32", "bfloat16", "bfloat16_low8")


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
  with programs_on_disk(tmp_path_factory.mktemp("programs")):
    yield


def config_of(kind, **optim):
  return dataclasses.replace(config(**optim), params=kind)


def values():
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in SHAPES.items()
  }


def abstract_state(config):
  init = step.build_optimizer(config).init

  def make(params):
    kept, _ = weights.store(config.params, params)
    return step.TrainState(jnp.int32(0), kept, init(params), ())

  return jax.eval_shape(make, values())


def save(path, config):
  """Saves `values`, stored as in `config`, and moments; returns the state."""
  params, low = weights.store(
    config.params, jax.tree.map(jnp.asarray, values())
  )
  adam = encoded(moments(values()), config)
  state = step.TrainState(jnp.int32(3), params, weights.with_low(adam, low), ())
  checkpoints = Checkpoints(path, keep=3)
  checkpoints.save(3, state, Batches(), describe(config, numbered(1000)))
  checkpoints.close()
  return state


def stored_values(kind, x):
  """Rounds f32 values in NumPy as this kind of storage does."""
  if kind == "float32":
    return x
  if kind == "bfloat16":
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)
  high, low = oracle(x.view(np.uint32))
  word = (high.astype(np.int64) << 8) + low
  return (word << 8).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize(
  "before, now",
  quick(
    1,
    sorted(
      itertools.permutations(KINDS, 2),
      key=lambda pair: pair != ("bfloat16_low8", "float32"),
    ),
  ),
)
def test_weights_are_converted_and_moments_stay_bit_identical(
  tmp_path, before, now
):
  saved = save(tmp_path, config_of(before))
  after = config_of(now)
  abstract = abstract_state(after)
  state = restore.restore(tmp_path, 3, after, abstract, Batches())
  assert jax.tree.structure(state) == jax.tree.structure(abstract)
  for x, want in zip(
    jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True
  ):
    assert (x.dtype, x.shape) == (want.dtype, want.shape)
  adam, low = weights.without_low(state.optimizer)
  assert_same_bits(adam, weights.without_low(saved.optimizer)[0])
  got = weights.load(state.params, low)
  for name, x in values().items():
    if name != "norm":
      x = stored_values(now, stored_values(before, x))
    assert_same_bits(got[name], x)


def test_codec_and_params_can_change_together(tmp_path):
  save(tmp_path, config_of("float32", codec="float32"))
  after = config_of("bfloat16_low8", codec="log8")
  abstract = abstract_state(after)
  state = restore.restore(tmp_path, 3, after, abstract, Batches())
  want = encoded(moments(values()), after)
  assert_same_bits(state.optimizer.inner, want)
  for name, x in values().items():
    if name == "norm":
      continue
    high, low = oracle(x.view(np.uint32))
    assert_same_bits(np.asarray(state.params[name]).view(np.uint16), high)
    assert_same_bits(state.optimizer.low[name], low)


PLAIN = dict(recipe="bf16", optim__codec="log8")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Trains for 8 steps with 24-bit weights; saves checkpoints 4 and 8."""
  out = tmp_path_factory.mktemp("runs") / "finished"
  assert run(out, params="bfloat16_low8", **PLAIN) == 0
  return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_run_resumes_with_other_params_only_with_convert_state(
  finished, tmp_path, capsys, kind
):
  halfway = shutil.copytree(finished, tmp_path / "halfway")
  shutil.rmtree(halfway / "checkpoints" / "8")
  options = dict(params=kind, **PLAIN)
  assert run(halfway, "--resume", **options) == 2
  errors = capsys.readouterr().err
  assert f"params: bfloat16_low8 -> {kind}; pass --convert-state to" in errors
  assert run(halfway, "--resume", "--convert-state", **options) == 0
  before, after = losses(finished), losses(halfway)
  # Layers use BF16 weights, or round f32 weights to BF16: losses nearly agree.
  assert after[5, "loss"] == pytest.approx(before[5, "loss"], rel=1e-3)
  assert after[8, "loss"] == pytest.approx(before[8, "loss"], rel=1e-2)
  assert run(halfway, "--resume", **options) == 0


@pytest.mark.slow
def test_exports_join_weights_and_imports_split_them(finished, tmp_path):
  exported = tmp_path / "adamw"
  assert convert.main(["export", str(finished), str(exported)]) == 0
  tree = ocp.StandardCheckpointer().restore(exported)
  folder = RunDirectory(finished)
  made = configuration(read_description(folder.checkpoints, 8))
  abstract = step.abstract_state(made, step.build_optimizer(made))
  state = restore_state(folder.checkpoints, 8, abstract)
  low = state.optimizer.low
  for name, x in zip(
    step.leaf_names(tree["params"]),
    jax.tree.leaves(tree["params"]),
    strict=True,
  ):
    assert x.dtype == np.float32
    if not name.endswith("norm/scale"):
      assert np.any(np.asarray(x).view(np.uint32) & 0xFF00), name
  assert_same_bits(tree["params"], weights.load(state.params, low))
  # Importing splits the 24 bits into the same two parts.
  out = tmp_path / "imported"
  line = arguments(out, params="bfloat16_low8", **PLAIN)
  assert convert.main(["import", str(exported), *line]) == 0
  again = restore_state(RunDirectory(out).checkpoints, 8, abstract)
  assert_same_bits((again.params, again.optimizer.low), (state.params, low))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_resumed_run_matches_an_uninterrupted_run_bit_for_bit(
  finished, tmp_path, kind
):
  options = dict(params=kind, **PLAIN)
  whole, parts = finished, tmp_path / "parts"
  if kind != "bfloat16_low8":
    whole = tmp_path / "whole"
    assert run(whole, **options) == 0
  shutil.copytree(whole, parts)
  shutil.rmtree(parts / "checkpoints" / "8")  # As if killed before step 8.
  assert run(parts, "--resume", **options) == 0
  check_runs(parts, whole)
