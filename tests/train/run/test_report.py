# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: held-out means, moments, and bytes of a step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizer.adam_states import from_adam
from train.presets import demo
from train.run import report
from train.step import Evaluation, TrainState


def test_held_out_batches_are_weighted_by_their_targets():
  one = Evaluation(np.float32(1), np.int32(30), np.float32(0.5))
  other = Evaluation(np.float32(3), np.int32(10), np.float32(0.1))
  none = Evaluation(np.float32(0), np.int32(0), np.float32(0))
  # The loss is (1 * 30 + 3 * 10) / 40 nats; 15 + 1 of 40 targets are right.
  found = report.held_out_means([one, other, none])
  assert found == pytest.approx(dict(held_out_loss=1.5, held_out_accuracy=0.4))
  # Batches of plain tokens all have the same number of targets.
  alike = [Evaluation(np.float32(x), None) for x in (1, 3)]
  assert report.held_out_means(alike) == {"held_out_loss": 2.0}


def test_powers_are_counted_in_sixteenths_except_in_groups_of_zeros():
  config = dataclasses.replace(
    demo(), optim=dataclasses.replace(demo().optim, group_size=64)
  )
  # The power k is 2 if a group's largest value is sqrt(448**2 / 2) times its
  # smallest one. A row has two groups.
  span = np.geomspace(1e-4, 1e-4 * np.sqrt(448**2 / 2), 64)
  rows = np.tile(span, (64, 2)).astype(np.float32)
  rows[:24] = 0
  params = {"norm": jnp.ones(64), "w": jnp.asarray(rows)}
  adam = optax.ScaleByAdamState(jnp.int32(1), params, params)
  optimizer = from_adam(adam, config.optim.moment_codec())
  row = report.report_state(
    config, TrainState(jnp.int32(1), params, optimizer, adam)
  )
  for moment in ("mu", "nu"):
    ((sixteenths, count),) = row["powers"][moment].items()
    assert sixteenths == pytest.approx(32, abs=1) and count == 2 * 40
    # E4M3's relative rounding error is at most 1/16, and less if k > 1.
    error = row["state"]["w"][moment]["relative_error"]
    assert 0 < error < 1 / 16
    assert row["state"]["norm"][moment]["relative_error"] == 0
  assert row["state"]["w"]["parameters"] == 64 * 128


def test_step_bytes_are_arguments_temporaries_and_new_results():
  def step(state, x, v, w):
    sums, exact = state
    return (sums + 1, exact + 1), x @ v @ w  # x @ v is temporary.

  def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)

  state, exact = (shape(1024), shape(4096)), shape(4096)
  x, v, w = shape(64, 32), shape(32, 1024), shape(1024, 8)
  jitted = jax.jit(step, donate_argnums=0)
  compiled = jitted.lower(state, x, v, w).compile()
  arguments = 1024 + 64 * 32 + 32 * 1024 + 1024 * 8
  temporary, results = 64 * 1024, 64 * 8
  found = report.step_bytes(compiled, exact)
  assert found is not None
  # The tuple of results adds a few pointers.
  assert 0 <= found - 4 * (arguments + temporary + results) < 100


def test_step_bytes_are_none_if_the_compiler_reports_none():
  class Compiled:
    def memory_analysis(self):
      return None

  compiled: Any = Compiled()
  assert report.step_bytes(compiled, ()) is None
