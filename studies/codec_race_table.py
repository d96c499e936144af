# SPDX-License-Identifier: Apache-2.0
"""Formats the rows of `studies.codec_race` as a table."""

from pathlib import Path

from studies.stability_figure import interval

BENCH = "codec_race"
ROWS = Path("docs/rows/codec_race.jsonl")


def baseline(name: str) -> str:
  """Returns the candidate that has the same optimizer and f32 moments."""
  optimizer = name.split(",")[0]
  if optimizer in ("lion", "momentum", "muon"):
    return f"{optimizer}, float32"
  return "float32"


def sizes(rows: list[dict]) -> dict[str, float]:
  """Returns the bytes per parameter of each candidate, largest first.

  If there is a row of errors, the bytes are those of large leaves.
  """
  errors_last = sorted(rows, key=lambda row: row["bench"], reverse=True)
  found = {x["case"]["candidate"]: x["bytes_per_param"] for x in errors_last}
  return dict(sorted(found.items(), key=lambda item: -item[1]))


def table(rows: list[dict], preset: str) -> str:
  """Formats the table of candidates: bytes, errors and losses."""
  errors = {
    row["case"]["candidate"]: row
    for row in rows
    if row["bench"] == f"{BENCH}.errors"
  }
  lines = [
    "| codec | bytes | m | sqrt(v) | update | training loss | held-out loss |",
    "| --- | --- | --- | --- | --- | --- | --- |",
  ]
  for name, size in sizes(rows).items():
    own = errors.get(name, {})
    cells = [name, f"{size:.2f}"]
    for key in ("m_error", "root_v_error", "update_error"):
      cells.append(f"{own[key]:.2g}" if key in own else "")
    for key in ("loss", "held_out_loss"):
      found = differences(rows, preset, name, key)
      mean, half = interval(found)
      cells.append(f"{mean:+.4f} ± {half:.4f}" if len(found) > 1 else "")
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines)


def runs(rows: list[dict], preset: str, name: str) -> dict[int, dict]:
  """Returns the rows of a candidate's runs by seed."""
  return {
    row["case"]["seed"]: row
    for row in rows
    if row["bench"] == f"{BENCH}.losses"
    and (row["case"]["preset"], row["case"]["candidate"]) == (preset, name)
  }


def differences(
  rows: list[dict], preset: str, name: str, key: str
) -> list[float]:
  """Lists, for each seed, a loss minus the loss with f32 moments."""
  own, other = (runs(rows, preset, x) for x in (name, baseline(name)))
  if own == other:
    return []
  pairs = [(own[s][key], other[s][key]) for s in sorted(own) if s in other]
  return [a - b for a, b in pairs if None not in (a, b)]
