# SPDX-License-Identifier: Apache-2.0
"""Reads metrics.jsonl for a table or a picture, whatever became of it.

What makes no sense is left out, be it a line without JSON or words in place of
a loss, and `MetricsRows.damaged` says so. The last line of a killed run may end
early; that is no damage.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from train.run.metrics import parse_lines

# Training losses are noisy from batch to batch: their mean over the last ones.
LAST = 50
MOMENTS = ("mu", "nu")


class MetricsRows(NamedTuple):
  """The lines of a metrics.jsonl."""

  # Lines that have a step, without values that make no sense or are not finite.
  rows: list[dict]
  # A sentence on what was left out, or None.
  damaged: str | None


def read_rows(path: Path) -> MetricsRows:
  """Reads a metrics.jsonl; there are no rows if there is no file."""
  rows, bad, last = [], 0, None
  for line in parse_lines(path):
    last = line
    values = line if isinstance(line, dict) else {}
    row = {name: x for name, x in values.items() if _makes_sense(name, x)}
    # A number that was not finite is null in the file, and no damage.
    known = [name for name, x in values.items() if x is not None]
    bad += "step" not in row or not row.keys() >= set(known)
    if "step" in row:
      rows.append(row)
  if bad and last is None and _ends_early(path):
    bad -= 1
  if not bad:
    return MetricsRows(rows, None)
  lines = f"{bad} line{'s' * (bad > 1)}"
  return MetricsRows(
    rows,
    f"{path}: {lines} with values that make no sense, which were left out; "
    "restore the file from a copy to have them",
  )


def summarize(rows: list[dict]) -> dict[str, float]:
  """Condenses the lines of a run."""

  def values(key: str) -> list[float]:
    return [row[key] for row in rows if key in row]

  summary = {}
  if losses := values("loss"):
    summary["train_loss"] = statistics.fmean(losses[-LAST:])
  if speeds := values("tokens_per_s"):
    summary["tokens_per_s"] = statistics.median(speeds)
  if held_out := values("held_out_loss"):
    summary["held_out_loss"] = held_out[-1]
  if shares := values("held_out_accuracy"):
    summary["held_out_accuracy"] = shares[-1]
  elif held_out:
    summary["perplexity"] = math.exp(min(held_out[-1], 700.0))
  if sizes := values("step_bytes"):
    summary["step_megabytes"] = sizes[-1] / 1e6
  return summary


def _ends_early(path: Path) -> bool:
  return not path.read_bytes().endswith((b"\n", b"\r"))


def _makes_sense(name: str, value: Any) -> bool:
  return _KNOWN[name](value) if name in _KNOWN else True


def _is_number(x: Any) -> bool:
  # Beyond it sums and a picture's axes overflow.
  is_number = isinstance(x, int | float) and not isinstance(x, bool)
  return is_number and abs(x) < 1e100


def _is_count(x: Any) -> bool:
  return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**63


def _is_state(x: Any) -> bool:
  """Whether it is `coat_jax.optimizer.state_report`, as far as it is drawn."""

  def is_leaf(leaf: Any) -> bool:
    if not isinstance(leaf, dict) or "encoded" not in leaf:
      return False
    return not leaf["encoded"] or (
      _is_count(leaf.get("parameters"))
      and leaf["parameters"] > 0
      and all(
        isinstance(leaf.get(moment), dict)
        and _is_number(leaf[moment].get("relative_error"))
        for moment in MOMENTS
      )
    )

  return isinstance(x, dict) and all(map(is_leaf, x.values()))


def _is_powers(x: Any) -> bool:
  """Whether it is, for each moment, counts by powers in sixteenths."""
  return isinstance(x, dict) and all(
    name in MOMENTS
    and isinstance(counts, dict)
    and all(
      key.isascii() and key.isdigit() and len(key) < 4 and _is_count(count)
      for key, count in counts.items()
    )
    for name, counts in x.items()
  )


def _is_watch(x: Any) -> bool:
  """Whether it is what `train.watch` found: lists of numbers by name."""
  return isinstance(x, dict) and all(
    isinstance(values, list)
    and all(value is None or _is_number(value) for value in values)
    for values in x.values()
  )


_KNOWN: dict[str, Callable[[Any], bool]] = {
  "step": _is_count,
  "loss": _is_number,
  "grad_norm": _is_number,
  "lr": _is_number,
  "tokens_per_s": _is_number,
  "targets": _is_count,
  "padding": _is_number,
  "unpadded_tokens_per_s": _is_number,
  "held_out_loss": _is_number,
  "held_out_accuracy": _is_number,
  "step_bytes": _is_count,
  "state": _is_state,
  "powers": _is_powers,
  "watch": _is_watch,
}
