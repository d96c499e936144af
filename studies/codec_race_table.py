# SPDX-License-Identifier: Apache-2.0
"""Formats the rows of `studies.codec_race` as a table."""

import math
from pathlib import Path

from studies.stability_figure import interval

BENCH = "codec_race"
ROWS = Path("docs/rows/codec_race.jsonl")
# Maps keys of error rows to column titles.
_ERRORS = {"m_error": "m", "root_v_error": "sqrt(v)", "update_error": "update"}


def baseline(name: str) -> str:
  """Returns a candidate's baseline: its optimizer with f32 moments."""
  optimizer = name.split(",")[0]
  if optimizer in ("lion", "momentum", "muon"):
    return f"{optimizer}, float32"
  return "float32"


def sizes(rows: list[dict], preset: str) -> dict[str, float]:
  """Maps a preset's candidates to bytes per parameter, largest first."""
  found = {
    row["case"]["candidate"]: row["bytes_per_param"]
    for row in rows
    if row["bench"] == f"{BENCH}.losses" and row["case"]["preset"] == preset
  }
  return dict(sorted(found.items(), key=lambda item: -item[1]))


def table(rows: list[dict], preset: str) -> str:
  """Formats the table of a preset's candidates: bytes, errors and losses.

  If a candidate has no errors, the table leaves out the columns of errors. The
  row of a baseline contains its losses. The other rows contain differences from
  the losses of their baseline.
  """
  errors = {
    row["case"]["candidate"]: row
    for row in rows
    if row["bench"] == f"{BENCH}.errors"
  }
  bytes_each = sizes(rows, preset)
  keys = _ERRORS if all(name in errors for name in bytes_each) else {}
  titles = ["codec", "bytes", *keys.values(), "training loss", "held-out loss"]
  lines = [titles, ["---"] * len(titles)]
  for name, size in bytes_each.items():
    cells = [name, f"{size:.2f}"]
    cells += [f"{errors[name][key]:.2g}" for key in keys]
    for key in ("loss", "held_out_loss"):
      if name == baseline(name):
        by_seed = losses(rows, preset, name, key).values()
        shown = ("diverged" if x is None else f"{x:.4f}" for x in by_seed)
        cells.append(", ".join(shown))
      else:
        cells.append(_shown(differences(rows, preset, name, key)))
    lines.append(cells)
  return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _shown(found: list[float]) -> str:
  if len(found) < 3:
    return ", ".join(f"{x:+.4f}" for x in found)
  return "{:+.4f} ± {:.4f}".format(*interval(found))


def losses(
  rows: list[dict], preset: str, name: str, key: str
) -> dict[int, float | None]:
  """Returns a candidate's loss for each seed; None if a run diverged.

  If a run was repeated with the same seed, the loss is the mean of these runs.
  """
  found: dict[int, list] = {}
  for row in rows:
    case = row["case"]
    if row["bench"] != f"{BENCH}.losses":
      continue
    if (case["preset"], case["candidate"]) == (preset, name):
      found.setdefault(case["seed"], []).append(row[key])
  return {
    seed: None if None in each else math.fsum(each) / len(each)
    for seed, each in sorted(found.items())
  }


def differences(
  rows: list[dict], preset: str, name: str, key: str
) -> list[float]:
  """Lists, for each seed, the candidate's loss minus the baseline's loss."""
  if name == baseline(name):
    return []
  own, other = (losses(rows, preset, x, key) for x in (name, baseline(name)))
  pairs = [(loss, other.get(seed)) for seed, loss in own.items()]
  return [a - b for a, b in pairs if a is not None and b is not None]
