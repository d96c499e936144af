# SPDX-License-Identifier: Apache-2.0
"""Tests timing: which calls are made, how often, and with which arguments."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness


def sleeping(x):
  """Returns x after 20 milliseconds."""
  sleep = lambda x: time.sleep(0.02) or x  # noqa: E731
  return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_times_are_those_of_one_call():
  timing = harness.measure(sleeping, jnp.ones(4), repeats=5)
  assert 20 <= timing.p20_ms <= timing.median_ms <= timing.p80_ms < 200
  fast = harness.measure(jnp.negative, jnp.ones(4), repeats=5)
  assert fast.p80_ms < 20


@pytest.mark.gpu
def test_short_calls_are_timed_by_their_kernels():
  x = jax.random.normal(jax.random.key(0), (8192, 8192))
  timing = harness.measure(jnp.negative, x, repeats=3)
  # At 4.8 TB/s, 512 MiB take 0.11 ms. Slower GPUs may take up to 0.3 ms.
  assert 0.11 <= timing.median_ms <= 0.3
  small = harness.measure(jnp.negative, x[:256], repeats=3)
  assert 0.002 <= small.median_ms <= 0.02


def test_rates_follow_from_the_median():
  timing = harness.Timing(median_ms=2.0, p20_ms=1.0, p80_ms=3.0)
  assert timing.gbps(8e9) == pytest.approx(4000)
  assert timing.tflops(2e12) == pytest.approx(1000)


def test_calls_alternate_between_copies_of_arguments():
  x = jnp.ones((8, 2**21), jnp.float32)  # 64 MiB, so two copies are needed.
  calls = harness._Calls(lambda x: x.sum(), (x,), ())
  assert len(calls.args) == 2
  assert calls.args[0][0] is x
  np.testing.assert_array_equal(calls.args[1][0], x)
  first, second, third = calls(), calls(), calls()
  assert calls.results == [third, second] and first is not third
  large = jnp.ones(2**25, jnp.float32)
  assert len(harness._Calls(jnp.sum, (large,), ()).args) == 1
  assert len(harness._Calls(jnp.sum, (jnp.ones(4),), ()).args) == 24


def test_results_replace_donated_arguments_in_later_calls():
  def step(grads, state):
    return {"sum": state["sum"] + grads}, grads.sum()

  def counted(sizes):
    grads, state = jnp.ones(sizes), {"sum": jnp.zeros(sizes)}
    calls = harness._Calls(step, (grads, state), (1,))
    for _ in range(2 * len(calls.args)):
      calls()
    assert not grads.is_deleted()
    for _, now in calls.args:
      np.testing.assert_array_equal(now["sum"], 2)

  counted(8)
  counted(2**25)
  arguments = jnp.ones(8), {"sum": jnp.zeros(8)}
  assert harness.measure(step, *arguments, donate=(1,), repeats=2).median_ms > 0


@pytest.mark.parametrize(
  "wrong",
  [
    lambda x, y: y,
    lambda x, y: (x, y),
    lambda x, y: (y.astype(jnp.bfloat16), x),
    lambda x, y: (),
  ],
  ids=["no tuple", "shape", "dtype", "none"],
)
def test_results_that_are_not_the_donated_arguments_are_refused(wrong):
  with pytest.raises(ValueError, match="new values of the donated"):
    harness.measure(wrong, jnp.ones(4), jnp.ones((2, 2)), donate=(1,))


def test_ceilings_are_measured():
  assert harness.copy_bandwidth(2**20, repeats=2) > 0
  found = harness.matmul_ceiling(32, repeats=2)
  assert found.keys() == {"fp8", "bf16"} and min(found.values()) > 0


def test_emit_takes_a_timing(capsys):
  row = harness.emit("x", {}, **harness.Timing(1.0, 0.5, 2.0).row)
  assert (row["p20_ms"], row["median_ms"], row["p80_ms"]) == (0.5, 1.0, 2.0)
  assert '"median_ms": 1.0' in capsys.readouterr().out


def test_emit_rounds_values_and_refuses_nan(capsys):
  with pytest.raises(ValueError):
    harness.emit("x", {}, value=float("nan"))
  row = harness.emit("x", {"a": 1}, value=1 / 3, nested={"b": np.pi})
  assert row["value"] == 0.333333 and row["nested"] == {"b": 3.14159}
  assert json.loads(capsys.readouterr().out) == row
