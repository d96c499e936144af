# SPDX-License-Identifier: Apache-2.0
"""Draws time and memory of each variant in rows of `benchmarks.layer`.

python -m benchmarks.layer > layer.jsonl
python -m benchmarks.plot layer.jsonl layer.png
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import arguments as args
from train.plot import check_figure

_KEYS = ("case", "device", "median_ms", "temporary_bytes")


def read_rows(path: Path) -> list[dict]:
  """Reads the rows of layer.time for forward and backward, in order."""
  rows = []
  for i, line in enumerate(path.read_bytes().splitlines()):
    try:
      row = json.loads(line)
      if _is_drawn(row):
        rows.append({name: row[name] for name in _KEYS})
    except (
      AttributeError,
      KeyError,
      TypeError,
      ValueError,
      RecursionError,
    ) as error:
      raise ValueError(
        f"plot: line {i + 1} of {path} must be a row of a benchmark, got "
        f"{line[:40]!r} ({type(error).__name__}); write the file again"
      ) from error
  if not rows:
    raise ValueError(
      f"plot: {path} must hold rows of layer.time with times, got none; write "
      "it with `python -m benchmarks.layer` on a GPU"
    )
  return rows


def _is_drawn(row: dict) -> bool:
  if row["bench"] != "layer.time" or row["case"]["mode"] != "full":
    return False
  # A layer that was only compiled has no times.
  if "median_ms" not in row:
    return False
  known = row["case"].keys() >= {"variant", "preset", "batch", "seq"}
  sizes = row["median_ms"], row["temporary_bytes"]
  if not known or not all(0 <= x < 1e100 for x in sizes):
    raise ValueError("neither its case nor its sizes")
  return True


def draw(rows: list[dict], out: Path) -> None:
  """Draws the bars to a PNG."""
  # If layers alternate, each kind has its own bar.
  cases = [row["case"] for row in rows]
  names = [f"{x['variant']} {x.get('kind', '')}".rstrip() for x in cases]
  panels = {
    "forward and backward, ms": [row["median_ms"] for row in rows],
    "temporary memory, MB": [row["temporary_bytes"] / 1e6 for row in rows],
  }
  figure = Figure(figsize=(10, 0.4 * len(rows) + 1.5), layout="constrained")
  axes = figure.subplots(1, 2, sharey=True)
  colors = ["tab:gray" if n.startswith("bf16") else "tab:blue" for n in names]
  for ax, (title, values) in zip(axes, panels.items(), strict=True):
    bars = ax.barh(names, values, color=colors)
    ax.bar_label(bars, fmt="%.4g", padding=3)
    ax.set_title(title)
    ax.margins(x=0.15)
  axes[0].invert_yaxis()
  case, device = rows[0]["case"], rows[0]["device"]
  figure.suptitle(
    f"one layer, {case['preset']}, B {case['batch']}, T {case['seq']}, {device}"
  )
  figure.savefig(out, dpi=120)


def main(arguments: list[str] | None = None) -> None:
  """Runs the command."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.plot",
    description="Draws rows of benchmarks.layer.",
  )
  parser.add_argument("rows", type=Path)
  parser.add_argument("out", type=Path)
  options = parser.parse_args(arguments)
  with args.checked(parser):
    check_figure(options.out)
    rows = read_rows(options.rows)
  draw(rows, options.out)


if __name__ == "__main__":
  main()
