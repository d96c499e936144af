# SPDX-License-Identifier: Apache-2.0
"""The step and its state: what is trained, saved, counted and drawn."""

import contextlib
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.runs import MODEL
from train import plot, step
from train.data.batches import train_iterator
from train.data.tokens import DataConfig, load_tokens
from train.presets import demo
from train.run import report
from train.run.checkpoint import Checkpoints, latest_step, read_description

SMALL = dataclasses.replace(
  demo(),
  model=dataclasses.replace(demo().model, **MODEL),
  batch=2,
  seq=32,
)
TWIN = SMALL.bf16_twin(seed=SMALL.seed, out="twin")


@pytest.fixture(scope="module")
def trained():
  """State and losses after steps over one and the same batch."""
  optimizer = step.build_optimizer(SMALL)
  state = step.initial_state(SMALL, optimizer)
  run = step.train_step(SMALL, step.build_graph(SMALL), optimizer)
  run = jax.jit(run, donate_argnums=0)
  tokens = jax.random.randint(jax.random.key(0), (2, 33), 0, 256)
  losses = []
  for _ in range(20):
    state, metrics = run(state, tokens)
    losses.append(float(metrics.loss))
    assert metrics.is_finite.all()
  return state, losses


def test_a_step_learns(trained):
  state, losses = trained
  assert int(state.step) == 20
  assert losses[0] == pytest.approx(np.log(256), abs=0.1)
  assert losses[-1] < losses[0] - 0.1


def test_norms_biases_and_embeddings_do_not_decay():
  params = jax.eval_shape(
    lambda: step.initial_state(SMALL, step.build_optimizer(SMALL)).params
  )
  names = step.leaf_names(params)
  decays = dict(zip(names, jax.tree.leaves(step.decays(params)), strict=True))
  assert {name for name, decayed in decays.items() if not decayed} == {
    "embedding",
    "layers/attention/qkv/norm/scale",
    "layers/mlp/norm/scale",
    "norm/scale",
  }
  biases = step.decays({"mlp": {"bias": 0, "kernel": 0}})
  assert biases == {"mlp": {"bias": False, "kernel": True}}


def test_leaves_that_are_not_finite_are_named():
  grads = {"a": {"b": jnp.array([1.0, jnp.nan])}, "c": jnp.ones(2)}
  assert step.leaf_names(grads) == ["a/b", "c"]
  assert step.finite_leaves(grads).tolist() == [False, True]


def test_a_twin_starts_from_the_same_weights():
  runs = (SMALL, TWIN, dataclasses.replace(SMALL, seed=1))
  mine, twins, other = (
    step.initial_state(each, step.build_optimizer(each)).params for each in runs
  )
  assert jax.tree.all(jax.tree.map(np.array_equal, mine, twins))
  assert not jax.tree.all(jax.tree.map(np.array_equal, mine, other))


def test_a_checkpoint_keeps_the_very_bytes(trained, tmp_path):
  state, _ = trained
  tokens = load_tokens(DataConfig(), 256)
  batches, again = (
    train_iterator(tokens, seq_len=32, batch_size=2, seed=0) for _ in range(2)
  )
  for _ in range(3):
    next(batches)
  optimizer = step.build_optimizer(SMALL)
  abstract = jax.eval_shape(lambda: step.initial_state(SMALL, optimizer))
  folder = tmp_path / "checkpoints"
  assert latest_step(folder) is None
  with contextlib.closing(Checkpoints(folder, keep=2)) as checkpoints:
    for number in (10, 15, 20):
      checkpoints.save(number, state, batches, {"config": number})
    checkpoints.wait()
    assert latest_step(folder) == checkpoints.latest_step() == 20
    assert not (folder / "10").exists(), "only two are kept"
    restored = checkpoints.restore(20, abstract, again)
  assert read_description(folder, 20) == {"step": 20, "config": 20}
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  before, after = jax.tree.leaves(state), jax.tree.leaves(restored)
  assert jnp.dtype(jnp.float8_e4m3fn) in {leaf.dtype for leaf in before}
  for x, y in zip(before, after, strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
  np.testing.assert_array_equal(next(batches)["tokens"], next(again)["tokens"])


def test_the_optimizer_state_is_counted():
  assert report.state_bytes_per_param(TWIN) == pytest.approx(8, rel=0.01)
  assert 2 < report.state_bytes_per_param(SMALL) < 2.3


def test_a_report_counts_powers_and_errors(trained):
  state, _ = trained
  row = report.report_state(SMALL, state)
  adam = state.optimizer
  for moment in ("mu", "nu"):
    ranges = jax.tree.leaves(getattr(adam, f"{moment}_range"))
    groups = sum(leaf.size for leaf in ranges if leaf.ndim)
    counts = row["powers"][moment]
    assert 0 < sum(counts.values()) <= groups
    assert all(1 <= sixteenths <= 255 for sixteenths in counts)
  errors = [
    leaf["mu"]["relative_error"]
    for leaf in row["state"].values()
    if leaf["encoded"]
  ]
  # E4M3 moves a value by at most 1/16 a step, and moments forget: b1 = 0.9.
  assert errors and all(0 < error < 0.2 for error in errors)


def rows(*, with_state):
  lines = [
    dict(step=i, loss=None if i == 3 else 1.0 / i, tokens_per_s=1.0)
    for i in range(1, 40)
  ]
  lines.append(dict(step=39, held_out_loss=0.5))
  if with_state:
    moment = dict(relative_error=0.1)
    leaf = dict(encoded=True, parameters=10, mu=moment, nu=moment)
    powers = dict(mu={"16": 3, "17": 1}, nu={"40": 4})
    lines.append(dict(step=39, state={"w": leaf}, powers=powers))
  return lines


@pytest.mark.parametrize("with_state", [True, False])
def test_a_picture_is_drawn(tmp_path, with_state):
  out = tmp_path / "plot.png"
  plot.draw(
    {"a": rows(with_state=with_state), "b": rows(with_state=False)}, out
  )
  assert out.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_a_single_step_is_drawn(tmp_path):
  plot.draw({"a": [dict(step=1, loss=1.0)]}, tmp_path / "plot.png")


def test_plotting_what_is_no_run_is_told(tmp_path):
  with pytest.raises(
    ValueError, match="must be the folder of a run with steps"
  ):
    plot.load((Path(tmp_path),))
