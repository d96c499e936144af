# SPDX-License-Identifier: Apache-2.0
"""The step and its state: what is trained, saved, counted and plotted."""

import contextlib
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from tests.train.runs import MODEL
from train import plot, step, update
from train.data.batches import train_iterator
from train.data.tokens import DataConfig, load_tokens
from train.presets import demo
from train.run import checkpoint, report
from train.run.checkpoint import Checkpoints, latest_step, read_description

SMALL = dataclasses.replace(
  demo(),
  model=dataclasses.replace(demo().model, **MODEL),
  batch=2,
  seq=32,
)
TWIN = SMALL.bf16_twin(seed=SMALL.seed, out="twin")


def train(config):
  """Returns the state and the losses of 20 steps on one batch."""
  optimizer = step.build_optimizer(config)
  state = step.initial_state(config, optimizer)
  run = step.train_step(config, step.build_graph(config), optimizer)
  run = jax.jit(run, donate_argnums=0)
  tokens = jax.random.randint(jax.random.key(0), (2, 33), 0, 256)
  losses = []
  for _ in range(20):
    state, metrics = run(state, tokens)
    losses.append(float(metrics.loss))
    assert metrics.is_finite.all()
  return state, losses


@pytest.fixture(scope="module")
def trained():
  return train(SMALL)


def test_fp8_losses_follow_those_of_f32(trained):
  # test_step_against_optax compares f32 steps with optax. Here, f32 losses fall
  # by 0.35. When measured, FP8 losses differed from them by at most 0.002.
  _, exact = train(dataclasses.replace(TWIN, compute="float32"))
  state, losses = trained
  assert int(state.step) == 20
  assert exact[0] - exact[-1] == pytest.approx(0.35, abs=0.01)
  np.testing.assert_allclose(losses, exact, rtol=0, atol=0.005)


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
  biases = step.decays({"mlp": {"up": {"bias": 0, "kernel": 0}}})
  assert biases == {"mlp": {"up": {"bias": False, "kernel": True}}}


def test_leaf_names_and_finite_leaves_follow_tree_order():
  grads = {"a": {"b": jnp.array([1.0, jnp.nan])}, "c": jnp.ones(2)}
  assert step.leaf_names(grads) == ["a/b", "c"]
  assert update.finite_leaves(grads).tolist() == [False, True]


def test_twin_starts_from_the_same_weights():
  runs = (SMALL, TWIN, dataclasses.replace(SMALL, seed=1))
  mine, twins, other = (
    step.initial_state(each, step.build_optimizer(each)).params for each in runs
  )
  assert jax.tree.all(jax.tree.map(np.array_equal, mine, twins))
  assert not jax.tree.all(jax.tree.map(np.array_equal, mine, other))


def test_checkpoint_restores_the_saved_bytes(trained, tmp_path):
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
    assert latest_step(folder) == 20
    assert not (folder / "10").exists(), "only two are kept"
  restored = checkpoint.restore(folder, 20, abstract, again)
  assert read_description(folder, 20) == {"step": 20, "config": 20}
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  before, after = jax.tree.leaves(state), jax.tree.leaves(restored)
  assert jnp.dtype(jnp.float8_e4m3fn) in {leaf.dtype for leaf in before}
  for x, y in zip(before, after, strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
  np.testing.assert_array_equal(next(batches)["tokens"], next(again)["tokens"])


def test_state_bytes_are_counted_per_parameter():
  assert report.state_bytes_per_param(TWIN) == pytest.approx(8, rel=0.01)
  assert 2 < report.state_bytes_per_param(SMALL) < 2.3


@pytest.mark.slow
def test_report_counts_powers_and_errors(trained):
  state, _ = trained
  row = report.report_state(SMALL, state)
  adam = state.optimizer
  for moment in ("mu", "nu"):
    ranges = jax.tree.leaves(getattr(adam, moment).range)
    groups = sum(leaf.size for leaf in ranges if leaf.ndim)
    counts = row["powers"][moment]
    assert 0 < sum(counts.values()) <= groups
    assert all(1 <= sixteenths <= 255 for sixteenths in counts)
  errors = [
    leaf["mu"]["relative_error"]
    for leaf in row["state"].values()
    if leaf["encoded"]
  ]
  # In each step, E4M3 changes a value by at most 1/16 of it, and earlier errors
  # are multiplied by b1.
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
def test_figure_has_panels_of_the_state_if_it_was_reported(
  tmp_path, with_state
):
  out = tmp_path / "plot.png"
  plot.draw(
    {"a": rows(with_state=with_state), "b": rows(with_state=False)}, out
  )
  # Each panel is 6 x 4 inches, at 150 pixels per inch.
  panels = 4 if with_state else 2
  picture = matplotlib.image.imread(out)
  assert picture.shape[:2] == (600, 900 * panels)
  for panel in np.split(picture[..., :3], panels, axis=1):
    assert np.any(panel < 0.5), "an empty panel"


def test_loss_of_a_single_step_is_not_smoothed(tmp_path, monkeypatch):
  figures = []
  monkeypatch.setattr(
    plot.Figure, "savefig", lambda figure, *_, **__: figures.append(figure)
  )
  plot.draw({"a": [dict(step=1, loss=2.5)]}, tmp_path / "plot.png")
  ((axes,),) = (figure.axes for figure in figures)
  raw, smoothed, held_out = (line.get_xydata().tolist() for line in axes.lines)
  assert raw == smoothed == [[1.0, 2.5]] and held_out == []


def test_plot_of_a_folder_without_a_run_raises(tmp_path):
  with pytest.raises(
    ValueError, match="does not contain a run that has trained"
  ):
    plot.load((Path(tmp_path),))
