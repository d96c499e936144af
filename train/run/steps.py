# SPDX-License-Identifier: Apache-2.0
"""Reads the metrics of steps late, so that the device never waits.

Reading a loss waits for its step. A loop that reads each loss before it starts
the next step leaves the device idle while the host logs and makes a batch: 2 to
3 ms per step. So a step's metrics are read once the next step has started.
"""

import collections
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from train.run import report
from train.run.metrics import MetricsLog, Progress
from train.step import StepMetrics


class _Started(NamedTuple):
  step: int
  seconds: float  # On the monotonic clock, before its batch was made.
  metrics: StepMetrics


class StepsInFlight:
  """Steps that were started and not read yet, in order."""

  def __init__(
    self,
    log: MetricsLog,
    progress: Progress,
    *,
    tokens_a_step: int,
    leaf_names: Sequence[str],
  ):
    self._log, self._progress = log, progress
    self._tokens, self._leaf_names = tokens_a_step, leaf_names
    self._started: collections.deque[_Started] = collections.deque()
    self._last_end = 0.0

  def add(self, step: int, seconds: float, metrics: StepMetrics) -> None:
    """Adds a step."""
    self._started.append(_Started(step, seconds, metrics))

  def read(self, *, leave: int = 0) -> str | None:
    """Logs all but the newest `leave` steps; returns the first fault."""
    while len(self._started) > leave:
      if fault := self._read(self._started.popleft()):
        return fault
    return None

  def _read(self, started: _Started) -> str | None:
    step, metrics = started.step, jax.device_get(started.metrics)
    end = time.monotonic()
    # The device was busy until the previous step ended.
    seconds = end - max(started.seconds, self._last_end)
    self._last_end = end
    speed, loss = self._tokens / seconds, float(metrics.loss)
    self._log.write(
      step=step,
      loss=loss,
      grad_norm=float(metrics.grad_norm),
      lr=float(metrics.lr),
      tokens_per_s=round(speed, 1),
      **report.describe_rows(metrics, speed),
    )
    if not (math.isfinite(loss) and metrics.is_finite.all()):
      leaves = zip(self._leaf_names, metrics.is_finite, strict=True)
      bad = ", ".join(name for name, is_finite in leaves if not is_finite)
      return (
        f"step {step} has loss {loss} and gradients that are not finite in "
        f"{bad or 'no leaf'}"
      )
    self._progress.step(step, loss, speed)
    return None
