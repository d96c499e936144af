# SPDX-License-Identifier: Apache-2.0
"""Reads a metrics.jsonl for a table or a figure, even if it is damaged.

A line is damaged if it is not JSON or if it contains an invalid value, such as
a word instead of a loss. Invalid values are left out and reported in
`MetricsRows.damaged`. If a run was killed, its last line may be incomplete;
this does not count as damage.
"""

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from train.run.metrics import parse_lines

# Training losses are noisy, so tables show the mean over this many last steps.
LAST = 50
MOMENTS = ("mu", "nu")


class MetricsRows(NamedTuple):
  """The contents of a metrics.jsonl."""

  rows: list[dict]  # Lines with a step, without their invalid or null values.
  damaged: str | None  # A message about damaged lines; None if there are none.


def read_rows(path: Path) -> MetricsRows:
  """Reads a metrics.jsonl; returns no rows if the file does not exist."""
  rows, bad, last = [], 0, None
  for line in parse_lines(path):
    last = line
    values = line if isinstance(line, dict) else {}
    row = {name: x for name, x in values.items() if _is_valid(name, x)}
    # Numbers that were not finite are null in the file. They are not damage.
    known = [name for name, x in values.items() if x is not None]
    bad += "step" not in row or not row.keys() >= set(known)
    if "step" in row:
      rows.append(row)
  if bad and last is None and not path.read_bytes().endswith((b"\n", b"\r")):
    bad -= 1  # A kill cut the last line short.
  if not bad:
    return MetricsRows(rows, None)
  lines = f"{bad} line{'s' * (bad > 1)}"
  return MetricsRows(
    rows,
    f"{path}: {lines} with invalid values, which were left out; restore the "
    "file from a copy to include them",
  )


def summarize(rows: list[dict]) -> dict[str, float]:
  """Computes a run's values for the comparison table."""

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


_NUMBERS = {
  *("loss", "grad_norm", "lr", "tokens_per_s", "padding"),
  *("unpadded_tokens_per_s", "held_out_loss", "held_out_accuracy"),
}
_COUNTS = {"step", "targets", "step_bytes"}


def _is_valid(name: str, x: Any) -> bool:
  """Returns whether a value is valid; values of unknown names always are."""
  if name in _NUMBERS:
    return _is_number(x)
  if name in _COUNTS:
    return _is_count(x)
  if name == "state":
    return isinstance(x, dict) and all(map(_is_leaf, x.values()))
  if name == "powers":
    return isinstance(x, dict) and all(
      moment in MOMENTS and _are_counts(counts) for moment, counts in x.items()
    )
  if name == "watch":
    return isinstance(x, dict) and all(map(_are_probes, x.values()))
  return True


def _is_number(x: Any) -> bool:
  # Larger numbers would overflow in sums and on the axes of a figure.
  is_number = isinstance(x, int | float) and not isinstance(x, bool)
  return is_number and abs(x) < 1e100


def _is_count(x: Any) -> bool:
  return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**63


def _is_leaf(leaf: Any) -> bool:
  """Returns whether `leaf` is a valid leaf of `state_report`."""
  if not isinstance(leaf, dict) or "encoded" not in leaf:
    return False
  size, moments = leaf.get("parameters"), [leaf.get(x) for x in MOMENTS]
  return not leaf["encoded"] or (
    _is_count(size)
    and size > 0
    and all(
      isinstance(moment, dict) and _is_number(moment.get("relative_error"))
      for moment in moments
    )
  )


def _are_counts(counts: Any) -> bool:
  """Returns whether `counts` maps powers to numbers of groups."""
  return isinstance(counts, dict) and all(
    key.isascii() and key.isdigit() and len(key) < 4 and _is_count(count)
    for key, count in counts.items()
  )


def _are_probes(x: Any) -> bool:
  """Returns whether x is a list of numbers or nulls."""
  return isinstance(x, list) and all(
    value is None or _is_number(value) for value in x
  )
