# SPDX-License-Identifier: Apache-2.0
"""Draws the data that a block moves between the devices of a mesh.

  python -m docs.figures.mesh

The left half shows the axis `fsdp`, which splits rows of weights. The right
half shows `tensor`, which splits columns of weights and, between blocks,
positions.
"""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.figures.style import Drawing, Palette, canvas, main

WIDTH, HEIGHT = 0.92, 0.78  # Size of one device's array.


def draw(palette: Palette) -> Figure:
  """Draws time from the top, and a column for each device."""
  figure = Figure(figsize=(12, 7.3))
  d = Drawing(canvas(figure), palette)
  _fsdp(d, palette)
  _tensor(d, palette)
  return figure


def _fsdp(d: Drawing, p: Palette) -> None:
  d.zone((0.1, 0.1), (6.75, 7.2), "fsdp: rows of a weight are split")
  columns = [2.3 + 1.2 * i for i in range(4)]
  own = [[i] for i in range(4)]
  whole = [range(4)] * 4
  _devices(d, columns)
  rows = (
    (6.1, "weight W,\nf32", own, p.plain),
    (4.4, "codes of W,\nin the forward,\nin the backward", whole, p.value),
    (2.7, "gradient dW\nof its own\nsequences", whole, p.gradient),
    (1.0, "dW, moments\nand W of its\nown rows", own, p.plain),
  )
  for y, label, filled, color in rows:
    d.text(0.98, y, label, size=11)
    for x, parts in zip(columns, filled, strict=True):
      _array(d, x, y, 4, parts, color, across=False)
  for y, text, color in (
    (5.25, "all-gather of E4M3 codes: 1 byte a parameter", p.value),
    (3.55, "every device multiplies its own sequences", p.faint),
    (1.85, "reduce-scatter: 4 bytes (f32) or 2 (BF16)", p.gradient),
  ):
    _exchange(d, columns, y, text, color, p)
  d.text(
    4.1, 0.36, "the optimizer's step moves nothing", size=11, color=p.saved
  )


def _tensor(d: Drawing, p: Palette) -> None:
  d.zone((6.95, 0.1), (11.9, 7.2), "tensor: columns of a weight are split")
  columns = [9.45, 10.9]
  own, whole = [[0], [1]], [range(2)] * 2
  _devices(d, columns)
  rows = (
    (6.1, "x: its own\npositions,\nBF16", own, p.plain, False),
    (4.4, "all positions,\nE4M3", whole, p.value, False),
    (2.7, "its own heads\nor columns", own, p.plain, True),
    (1.0, "y: its own\npositions,\nBF16", own, p.plain, False),
  )
  for y, label, filled, color, across in rows:
    d.text(7.9, y, label, size=11)
    for x, parts in zip(columns, filled, strict=True):
      _array(d, x, y, 2, parts, color, across=across)
  for y, text, color in (
    (5.25, "all-gather of E4M3 codes", p.value),
    (3.55, "front and middle of the block", p.faint),
    (1.85, "reduce-scatter of BF16 sums", p.plain),
  ):
    _exchange(d, columns, y, text, color, p)
  d.text(9.4, 0.36, "backward: the same in reverse", size=11, color=p.faint)


def _devices(d: Drawing, columns: list[float]) -> None:
  for i, x in enumerate(columns):
    d.text(x, 6.66, f"device {i}", size=10, color=d.palette.faint)


def _array(d, x, y, count, filled, color, *, across) -> None:
  """Draws an array of `count` parts; a device stores those in `filled`."""
  p, low, left = d.palette, y - HEIGHT / 2, x - WIDTH / 2
  for i in range(count):
    width, height = WIDTH, HEIGHT / count
    corner = left, low + HEIGHT - (i + 1) * height
    if across:
      width, height = WIDTH / count, HEIGHT
      corner = left + i * width, low
    d.axes.add_patch(
      Rectangle(
        corner,
        width,
        height,
        facecolor=color if i in filled else p.ground,
        edgecolor=p.faint,
        linewidth=0.8,
        linestyle="-" if i in filled else (0, (1, 1.5)),
        alpha=1 if i in filled else 0.8,
        zorder=3,
      )
    )


def _exchange(d, columns, y, text, color, p) -> None:
  """Draws what devices exchange between two rows of arrays."""
  for x in columns:
    d.arrow((x, y + 0.42), (x, y + 0.2), color=color)
    d.arrow((x, y - 0.2), (x, y - 0.42), color=color)
  middle = (columns[0] + columns[-1]) / 2
  for end in (y + 0.2, y - 0.2):
    if color != p.faint:  # The devices exchange data.
      ends = columns[0], columns[-1]
      d.axes.plot(ends, (end, end), color=color, linewidth=1.8)
  d.text(middle, y, text, size=11, color=color)


if __name__ == "__main__":
  main("mesh", draw)
