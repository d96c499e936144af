# SPDX-License-Identifier: Apache-2.0
"""Steps whose metrics are read after the next step has started."""

import contextlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

from train.run.metrics import MetricsLog, Progress, StepsInFlight, read_metrics
from train.step import StepMetrics

NAMES = ["embedding", "head"]


def metrics(loss, is_finite=(True, True)):
  return StepMetrics(
    loss=jnp.float32(loss),
    grad_norm=jnp.float32(1),
    lr=jnp.float32(0.1),
    is_finite=np.array(is_finite),
    targets=None,
    padding=None,
  )


@pytest.fixture
def in_flight(tmp_path):
  with contextlib.closing(MetricsLog(tmp_path / "metrics.jsonl")) as log:
    yield StepsInFlight(
      log,
      Progress("run", steps=9, done=0),
      tokens_a_step=100,
      leaf_names=NAMES,
    )


def logged(tmp_path):
  return list(read_metrics(tmp_path / "metrics.jsonl"))


def test_all_steps_but_the_newest_are_read(in_flight, tmp_path):
  for step in (1, 2, 3):
    in_flight.add(step, 0.0, metrics(step))
  assert in_flight.read(leave=1) is None
  assert [(row["step"], row["loss"]) for row in logged(tmp_path)] == [
    (1, 1.0),
    (2, 2.0),
  ]
  assert in_flight.read() is None
  assert [row["step"] for row in logged(tmp_path)] == [1, 2, 3]


def test_nothing_is_read_after_a_step_that_is_not_finite(in_flight, tmp_path):
  in_flight.add(1, 0.0, metrics(2.0))
  in_flight.add(2, 0.0, metrics(np.nan, is_finite=(True, False)))
  in_flight.add(3, 0.0, metrics(np.nan, is_finite=(False, False)))
  assert in_flight.read() == (
    "step 2 has loss nan; gradients that are not finite: head"
  )
  assert [row["step"] for row in logged(tmp_path)] == [1, 2]


def test_step_is_timed_from_its_start_or_the_end_of_the_previous_step(
  in_flight, tmp_path, monkeypatch
):
  # Steps start at 0, 1 and 15 s, and end at 4, 10 and 17 s.
  ends = iter([4.0, 10.0, 17.0])
  clock = types.SimpleNamespace(monotonic=lambda: next(ends))
  monkeypatch.setattr("train.run.metrics.time", clock)
  monkeypatch.setattr(Progress, "step", lambda *_: None)
  for step, started in enumerate([0.0, 1.0, 15.0], start=1):
    in_flight.add(step, started, metrics(1.0))
  assert in_flight.read() is None
  speeds = [row["tokens_per_s"] for row in logged(tmp_path)]
  assert speeds == [25.0, 16.7, 50.0]
