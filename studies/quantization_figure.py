# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of `studies.quantization`."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from studies.quantization_error import FORMATS, GROUPS
from studies.quantization_tables import Rows, digits, one, select
from studies.trained_moments import GROUP_SIZE

_COLORS = {"E4M3": "C0", "E5M2": "C1", "INT8": "C2"}
_TICKS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def draw_moments(rows: Rows, out: Path) -> None:
  """Draws errors by the two moments' formats, and by group size."""
  figure = Figure(figsize=(13, 5.4), layout="constrained")
  pairs, lines = figure.subplots(1, 2, width_ratios=(1.15, 1))
  of_group = select(rows, "moments", group_size=GROUP_SIZE)
  names = list(dict.fromkeys(row["case"]["first"] for row in of_group))
  errors = np.array(
    [
      [
        one(of_group, "moments", first=x, second=y)["update_error"]
        for y in names
      ]
      for x in names
    ]
  )
  image = pairs.imshow(errors, cmap="RdYlGn_r", norm=LogNorm(0.01, 10))
  for (i, j), error in np.ndenumerate(errors):
    color = "white" if error > 3 else "black"
    text = dict(ha="center", va="center", fontsize=11, color=color)
    pairs.text(j, i, digits(error), **text)
  labels = [name.replace(" + ", "\n+ ") for name in names]
  pairs.set_xticks(range(len(names)), labels)
  pairs.set_yticks(range(len(names)), labels)
  pairs.set(
    xlabel="second moment v stored in",
    ylabel="first moment m stored in",
    title=f"Error of m / (√v + ε), groups of {GROUP_SIZE}",
  )
  bar = figure.colorbar(image, ax=pairs, shrink=0.8, extend="both")
  bar.set_label("relative RMS error")
  lines.set_yscale("log")
  ends, sizes = {}, []
  for name in names:
    number, *expansion = name.split(" + ")
    found = select(rows, "moments", first=name, second=name)
    found.sort(key=lambda row: row["case"]["group_size"])
    sizes = [row["case"]["group_size"] for row in found]
    values = [row["update_error"] for row in found]
    style = "o-" if expansion else "o--"
    lines.plot(sizes, values, style, color=_COLORS[number])
    ends[name] = values[-1], _COLORS[number]
  _label_ends(lines, sizes[-1], ends)
  lines.set_xscale("log", base=2)
  lines.set_xticks(sizes, list(map(str, sizes)))
  lines.set_xlim(sizes[0] / 1.2, sizes[-1] * 4)
  lines.grid(alpha=0.3)
  lines.set(
    xlabel="values that share a scale",
    ylabel="relative RMS error of m / (√v + ε)",
    title="Both moments in the same format, by group size",
  )
  figure.suptitle(f"Adam's moments, rounded to nearest: {_trained(rows)}")
  figure.savefig(out, dpi=110)


def draw_tensors(rows: Rows, out: Path) -> None:
  """Draws the errors of each tensor by the number of values per scale."""
  names = {
    kind: list(
      dict.fromkeys(
        row["case"]["tensor"] for row in select(rows, "tensors", kind=kind)
      )
    )
    for kind in ("activation", "gradient", "weight")
  }
  activations = names["activation"]
  lines = activations[:5], activations[5:], names["gradient"], names["weight"]
  figure = Figure(figsize=(16, 12), layout="constrained")
  grid = figure.subplots(len(lines), 5, sharey=True)
  for places, line in zip(grid, lines, strict=True):
    places[0].set_ylabel("relative RMS error")
    for axes in places[len(line) :]:
      axes.axis("off")
    for axes, name in zip(places, line, strict=False):
      _draw_tensor(axes, select(rows, "tensors", tensor=name), name)
  grid[0, 0].set_yticks(_TICKS, [f"{100 * x:g} %" for x in _TICKS])
  grid[0, 0].yaxis.set_minor_formatter(NullFormatter())
  figure.supxlabel(
    "values that share a scale: the tensor, a tile of 128 x 128, or this many "
    "values of a row"
  )
  figure.suptitle(
    f"Activations, gradients and weights in 8 bits: {_trained(rows)}"
  )
  figure.savefig(out, dpi=90)


def _draw_tensor(axes: Axes, rows: Rows, name: str) -> None:
  axes.set_yscale("log")
  shared, ends = _shared(rows), {}
  for number in FORMATS:
    values = [
      one(rows, "tensors", format=number, shared=x)["error"] for x in shared
    ]
    color = _COLORS[number]
    axes.plot(list(map(str, shared)), values, "o-", color=color, markersize=4)
    ends[number] = values[-1], color
  _label_ends(axes, len(shared) - 1, ends)
  axes.set_xlim(-0.3, len(shared) + 0.3)
  axes.grid(alpha=0.3)
  axes.set_title(name, fontsize=10)


def _label_ends(axes: Axes, x: float, ends: dict) -> None:
  """Labels each line at its last point x; `ends` maps names to (y, color)."""
  low, high = np.log(axes.get_ylim())
  place = -np.inf
  for name, (y, color) in sorted(ends.items(), key=lambda item: item[1][0]):
    place = max(np.log(y), place + (high - low) / 22)
    options: dict[str, Any] = dict(
      color=color, va="center", textcoords="offset points"
    )
    axes.annotate(name, (x, np.exp(place)), (7, 0), fontsize=9, **options)


def _shared(rows: Rows) -> list:
  found = {row["case"]["shared"] for row in rows}
  return [x for x in ("tensor", "tile", *GROUPS[1:]) if x in found]


def _trained(rows: Rows) -> str:
  case = rows[0]["case"]
  return (
    f"{case['preset']} after {case['steps']:,} steps of {case['batch']} x "
    f"{case['seq']} tokens"
  )
