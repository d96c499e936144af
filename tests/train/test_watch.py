# SPDX-License-Identifier: Apache-2.0
"""--watch: probes, the lines that they print, and their cost."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from tests.train.runs import losses, run
from tests.train.steps import SMALL, TOKENS
from train import step, watch
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics

CONFIG = dataclasses.replace(SMALL, watch=2)


def probed(**options):
  """Returns a tiny run's config, state after one update, watcher and graph."""
  config = dataclasses.replace(CONFIG, **options)
  graph, optimizer = step.build_graph(config), step.build_optimizer(config)
  state = step.initial_state(config, optimizer)
  grads = jax.tree.map(
    lambda p: jax.random.normal(jax.random.key(0), p.shape) ** 3, state.params
  )
  params, stored = jax.jit(optimizer.apply)(
    grads, state.optimizer, state.params
  )
  state = state._replace(params=params, optimizer=stored)
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, TOKENS)
  )
  watcher = watch.Watcher(config, graph, None, *abstract)
  return config, state, watcher, graph


@pytest.mark.slow
def test_probe_agrees_with_numpy_and_costs_little():
  config, state, watcher, graph = probed()
  found, said = watcher.look(state, TOKENS, 1.5)
  assert found.keys() == watch.RULES.keys() and said == []
  assert found["grad_norm"] == [1.5]
  assert all(len(found[f"activations_{x}"]) == 2 for x in ("amax", "kurtosis"))
  codes = {"mu": [], "nu": []}
  for name, all_codes in codes.items():
    for leaf in jax.tree.leaves(getattr(state.optimizer, name).codes):
      if leaf.dtype.itemsize == 1:
        all_codes.append(np.abs(np.asarray(leaf, np.float64)).ravel())
    values = np.concatenate(all_codes)
    assert found[f"{name}_saturated"][0] == pytest.approx(
      np.mean(values == 448), rel=1e-4
    )
    assert found[f"{name}_zeroed"][0] == pytest.approx(
      np.mean(values == 0), rel=1e-4
    )
    powers = [
      np.asarray(leaf)[np.asarray(amax) > 0].min() / 16
      for leaf, amax in zip(
        jax.tree.leaves(getattr(state.optimizer, name).range),
        jax.tree.leaves(getattr(state.optimizer, name).amax),
        strict=True,
      )
      if leaf.ndim
    ]
    assert found[f"{name}_power"] == [min(powers)]

  train = step.train_step(config, graph, step.build_optimizer(config))
  train, seconds = jax.jit(train), []
  for call in (
    lambda: watcher.look(state, TOKENS, 1.0),
    lambda: jax.block_until_ready(train(state, TOKENS)),
  ):
    call()
    times = []
    for _ in range(9):
      started = time.perf_counter()
      call()
      times.append(time.perf_counter() - started)
    seconds.append(min(times))
  # A probe every 100 steps may cost 2 % of the time, which is two steps.
  assert seconds[0] < 2 * seconds[1]


@pytest.mark.parametrize("optimizer", ["coat_lion", "coat_muon"])
def test_codes_of_all_states_of_an_optimizer_are_counted(optimizer):
  optim = dataclasses.replace(CONFIG.optim, optimizer=optimizer)
  config = dataclasses.replace(CONFIG, optim=optim)
  graph, built = step.build_graph(config), step.build_optimizer(config)
  state = step.abstract_state(config, built)
  random, drawn = np.random.default_rng(0), {"mu": [], "nu": []}

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    if ".codes" not in name or leaf.dtype.itemsize > 1:
      return jnp.ones(leaf.shape, leaf.dtype)
    values = random.choice([0, 1, 448], leaf.shape)
    drawn["mu" if "mu.codes" in name else "nu"].append(values.ravel())
    return jnp.asarray(values, leaf.dtype)

  stored = jax.tree.map_with_path(draw, state.optimizer)
  found = watch.of_moments(stored)
  # With Muon, AdamW updates the tables, which therefore have second moments.
  kept = {name: x for name, x in drawn.items() if x}
  assert [*kept] == (["mu", "nu"] if optimizer == "coat_muon" else ["mu"])
  for name, values in kept.items():
    values = np.concatenate(values)
    for key, code in {"zeroed": 0, "saturated": 448}.items():
      (share,) = found[f"{name}_{key}"]
      assert float(share) == pytest.approx(np.mean(values == code), rel=1e-6)
  names = {f"{m}_{x}" for m in kept for x in ("saturated", "zeroed", "power")}
  assert found.keys() == names
  probed = jax.eval_shape(watch.probe(config, graph), state, TOKENS)
  assert names <= probed.keys()


def test_statistics_of_values_agree_with_numpy():
  x = np.random.default_rng(0).standard_t(3, (4, 64)).astype(np.float32)
  outlier = x.copy()
  outlier[0, 0] = 1e4
  of_values = jax.jit(lambda x: watch._of_values(x, jnp.float8_e4m3fn))
  for values in (x, outlier):
    y = np.float64(values)
    amax = np.abs(y).max()
    found = of_values(values)
    kurtosis = np.mean(y**4) / np.mean(y**2) ** 2
    assert float(found["activations_kurtosis"]) == pytest.approx(kurtosis, 1e-4)
    assert float(found["activations_amax"]) == amax
    # E4M3's smallest value is 2^-9; below half of it, values become 0.
    zeroed = np.mean(np.abs(y) < 2.0**-10 * amax / 448)
    assert float(found["activations_zeroed"]) == pytest.approx(zeroed)
  assert zeroed > 0


def test_drift_is_reported_when_it_breaks_its_rule():
  usual = {
    "activations_amax": [1.0, 2.0],
    "nu_zeroed": [0.0],
    "nu_power": [1.0],
  }
  earlier = [usual] * 3
  assert watch.drifts(earlier, usual) == []
  edge = {
    "activations_amax": [2.0, 4.0],
    "nu_zeroed": [0.05],
    "nu_power": [0.5],
  }
  assert watch.drifts(earlier, edge) == []
  beyond = {
    "activations_amax": [2.1, 9.0],
    "nu_zeroed": [0.06],
    "nu_power": [0.4],
  }
  assert watch.drifts(earlier[:2], beyond) == []
  amax, zeroed, power = watch.drifts(earlier, beyond)
  assert amax.startswith(
    "watch: activations_amax of layer 1 is 9, but the median of"
  )
  assert "nu_zeroed is 0.06" in zeroed and "divided by eps" in zeroed
  assert "nu_power is 0.4" in power
  # A value that is not finite (null) is not compared.
  assert watch.drifts(earlier, {"nu_power": [None]}) == []


def test_drift_is_relative_to_the_median():
  # The median is 1, but the mean is 4.
  earlier = [{"grad_norm": [x]} for x in (1.0, 10.0, 1.0)]
  assert watch.drifts(earlier, {"grad_norm": [3.0]}) == []
  (said,) = watch.drifts(earlier, {"grad_norm": [4.1]})
  assert "grad_norm is 4.1, but the median of the last 3 probes is 1" in said


@pytest.mark.slow
def test_watching_does_not_change_a_run(tmp_path, capsys, monkeypatch):
  always = watch.Rule("it is so", plus=-1e9)
  monkeypatch.setitem(watch.RULES, "grad_norm", always)
  assert run(tmp_path / "a", optim__codec="int8") == 0
  assert run(tmp_path / "b", optim__codec="int8", watch=2) == 0
  assert losses(tmp_path / "a") == losses(tmp_path / "b")
  rows = read_metrics(RunDirectory(tmp_path / "b").metrics)
  found = [row for row in rows if "watch" in row]
  assert [row["step"] for row in found] == [2, 4, 6, 8]
  assert "nu_power" not in found[0]["watch"]  # int8 has no powers.
  assert 0 < found[0]["watch"]["nu_zeroed"][0] < 1
  # Drift is only reported after three earlier probes.
  said = [x for x in capsys.readouterr().err.splitlines() if "watch: " in x]
  assert len(said) == 1 and "b: step 8: watch: grad_norm is" in said[0]
  # Three panels of 900 x 600 pixels: losses, moments' errors, watched values.
  picture = matplotlib.image.imread(RunDirectory(tmp_path / "b").plot)
  assert picture.shape[:2] == (600, 2700)
