# SPDX-License-Identifier: Apache-2.0
"""Writes metrics.jsonl, shows a run's progress, and formats tables.

Each line of metrics.jsonl is a JSON object with the key `step`. There are four
kinds of lines:
  * a step: loss, grad_norm, lr, tokens_per_s; in train.finetune also targets,
    padding (a fraction of all tokens) and unpadded_tokens_per_s;
  * an evaluation: held_out_loss, held_out_accuracy in train.vit, and
    step_bytes, the memory of the compiled step on a device (see
    `train.run.report.step_bytes`);
  * a report: state (`state_report` of each leaf) and, with codec coat, powers,
    an object that maps 16 * k to the number of groups with the power k;
  * a probe: watch (see `train.watch`).
Every line is written immediately, in a single write, so a killed run loses no
line. A resumed run first drops the lines that it will write again.
"""

import collections
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from train.run import processes
from train.run.trackers import Tracker
from train.run.writing import replace_file, save_errors
from train.step import StepMetrics

_SECONDS_BETWEEN_LINES = 10


class MetricsLog:
  """Appends lines to a run's metrics.jsonl; copies numbers to trackers."""

  def __init__(
    self,
    path: Path,
    *,
    resumed_step: int = 0,
    trackers: Sequence[Tracker] = (),
  ):
    self._file, self._trackers = None, trackers
    if not processes.is_primary():
      return
    self._folder = path.parent
    kept = [row for row in read_metrics(path) if row["step"] <= resumed_step]
    with save_errors(self._folder):
      replace_file(path, "".join(json.dumps(row) + "\n" for row in kept))
      self._file = path.open("a", buffering=1)

  def write(self, **row) -> None:
    """Appends a line; NaN and infinity become null."""
    if self._file is None:
      return
    row = {
      name: None if isinstance(x, float) and not math.isfinite(x) else x
      for name, x in row.items()
    }
    line, step = json.dumps(row, allow_nan=False) + "\n", row.pop("step")
    values = {
      name: float(x) for name, x in row.items() if isinstance(x, int | float)
    }
    with save_errors(self._folder):
      self._file.write(line)
      for tracker in self._trackers if values else ():
        tracker.write(step, values)

  def close(self) -> None:
    if self._file is None:
      return
    with save_errors(self._folder):
      self._file.close()
      for tracker in self._trackers:
        tracker.close()


def read_metrics(path: Path) -> Iterator[dict]:
  """Yields the lines of a metrics.jsonl, without their null values.

  Skips lines without a step, such as a line that a full disk cut short.
  """
  if not path.exists():
    return
  for line in path.read_bytes().splitlines():
    try:
      row = json.loads(line)
    except ValueError:
      continue
    if isinstance(row, dict) and isinstance(row.get("step"), int):
      yield {name: x for name, x in row.items() if x is not None}


class Progress:
  """Shows progress on standard error: a bar on a terminal, otherwise lines."""

  def __init__(self, name: str, *, steps: int, done: int):
    self._name, self._steps, self._held_out = name, steps, ""
    self._done = self._first = done
    self._start = self._printed = time.monotonic()
    self._bar = None
    # Without a terminal, tqdm would write one endless line.
    if sys.stderr.isatty() and processes.is_primary():
      self._bar = tqdm(
        total=steps,
        initial=done,
        desc=name,
        unit="step",
        dynamic_ncols=True,
        smoothing=0.05,
      )

  def step(self, step: int, loss: float, tokens_per_s: float) -> None:
    text = f"loss {loss:.4f}{self._held_out}, {tokens_per_s:,.0f} tokens/s"
    if self._bar:
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update(step - self._done)
      self._done = step
    elif time.monotonic() - self._printed > _SECONDS_BETWEEN_LINES:
      self._printed = time.monotonic()
      per_step = (self._printed - self._start) / (step - self._first)
      left = tqdm.format_interval((self._steps - step) * per_step)
      self.say(f"{self._name}: step {step}/{self._steps}, {text}, {left} left")

  def held_out(
    self,
    step: int,
    held_out_loss: float,
    held_out_accuracy: float | None = None,
  ) -> None:
    """Shows the held-out loss and accuracy from now on."""
    text = f"held-out {held_out_loss:.4f}"
    if held_out_accuracy is not None:
      text += f", accuracy {held_out_accuracy:.2%}"
    self._held_out = f" ({text})"
    if not self._bar:
      self.say(f"{self._name}: step {step}/{self._steps}, {text}")

  def say(self, text: str) -> None:
    """Prints a line, above the bar if there is one."""
    if self._bar:
      self._bar.write(text, file=sys.stderr)
    elif processes.is_primary():
      print(text, file=sys.stderr, flush=True)

  def close(self) -> None:
    if self._bar:
      self._bar.close()


class StepsInFlight:
  """Steps that have started, but whose metrics have not been read yet.

  Reading a step's metrics waits until the step ends. We read them after the
  next step has started. Otherwise the device would be idle for 2 to 3 ms per
  step.
  """

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
    self._started: collections.deque[tuple[int, float, StepMetrics]] = (
      collections.deque()
    )
    self._last_end = 0.0

  def add(self, step: int, start: float, metrics: StepMetrics) -> None:
    """Adds a started step; `start` is the time before its batch was read."""
    self._started.append((step, start, metrics))

  def read(self, *, leave: int = 0) -> str | None:
    """Logs all but the newest `leave` steps; returns the first fault found."""
    while len(self._started) > leave:
      if fault := self._read(*self._started.popleft()):
        return fault
    return None

  def _read(self, step: int, start: float, metrics: StepMetrics) -> str | None:
    metrics = jax.device_get(metrics)
    end = time.monotonic()
    # The device could not start this step before the previous step ended.
    seconds = end - max(start, self._last_end)
    self._last_end = end
    speed, loss = self._tokens / seconds, float(metrics.loss)
    self._log.write(
      step=step,
      loss=loss,
      grad_norm=float(metrics.grad_norm),
      lr=float(metrics.lr),
      tokens_per_s=round(speed, 1),
      **describe_rows(metrics, speed),
    )
    if not (math.isfinite(loss) and metrics.is_finite.all()):
      leaves = zip(self._leaf_names, metrics.is_finite, strict=True)
      bad = ", ".join(name for name, is_finite in leaves if not is_finite)
      return (
        f"step {step} has loss {loss}; gradients that are not finite: "
        f"{bad or 'none'}"
      )
    self._progress.step(step, loss, speed)
    return None


def describe_rows(metrics: StepMetrics, tokens_per_s: float) -> dict:
  """Returns values to log about targets and padding; {} if either is None."""
  if metrics.targets is None or metrics.padding is None:
    return {}
  padding = float(metrics.padding)
  return {
    "targets": int(metrics.targets),
    "padding": round(padding, 4),
    "unpadded_tokens_per_s": round(tokens_per_s * (1 - padding), 1),
  }


def format_number(x: float) -> str:
  """Formats a number, for example 5.1234, 67,395.9 or 1.23457e+42."""
  return f"{x:,.6g}" if abs(x) >= 1000 else f"{x:,.4f}"


def format_table(header: list[str], rows: list[list[str]]) -> str:
  """Formats a table; only the first column is left-aligned."""
  lines = [header, *rows]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  lines.insert(1, ["-" * width for width in widths])
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i == 0 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )
