# SPDX-License-Identifier: Apache-2.0
"""Draws the rows of `benchmarks.layer`: time and memory, variant by variant.

python -m benchmarks.layer > layer.jsonl
python -m benchmarks.plot layer.jsonl layer.png
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure


def read_rows(path: Path) -> list[dict]:
  """Rows of layer.time for forward and backward, in their order.

  Raises:
    ValueError: there are none.
  """
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  rows = [
    row
    for row in rows
    if row["bench"] == "layer.time"
    and row["case"]["mode"] == "full"
    and "median_ms" in row
  ]
  if not rows:
    raise ValueError(
      f"plot: {path} must hold rows of layer.time with times, got none; write "
      "it with `python -m benchmarks.layer` on a GPU"
    )
  return rows


def draw(rows: list[dict], out: Path) -> None:
  """Draws the bars to a PNG."""
  names = [row["case"]["variant"] for row in rows]
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
  draw(read_rows(options.rows), options.out)


if __name__ == "__main__":
  main()
