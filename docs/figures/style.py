# SPDX-License-Identifier: Apache-2.0
"""Defines palettes, boxes and arrows for figures.

Each figure is written twice, NAME.light.svg and NAME.dark.svg, with a
transparent background. Pages show the one for their color scheme. `--png` also
writes PNGs to look at.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Palette:
  """Colors by their meaning.

  Attributes:
    ground: background of the page.
    text, faint: text, and less important text.
    plain: BF16 and f32.
    value: E4M3.
    gradient: E5M2.
    saved: arrays saved for the backward pass.
    fault: errors.
    zone: large areas in the background.
  """

  name: str
  ground: str
  text: str
  faint: str
  plain: str
  value: str
  gradient: str
  saved: str
  fault: str
  zone: str


PALETTES = (
  Palette(
    name="light",
    ground="#ffffff",
    text="#1f2430",
    faint="#6b7280",
    plain="#8a919e",
    value="#2563c9",
    gradient="#c2570c",
    saved="#0f8a5f",
    fault="#c81e3a",
    zone="#f1f3f7",
  ),
  Palette(
    name="dark",
    ground="#1e2129",
    text="#e6e8ee",
    faint="#9aa3b2",
    plain="#a3abb9",
    value="#77a9ff",
    gradient="#ff9d57",
    saved="#4fd1a1",
    fault="#ff7a90",
    zone="#2b303c",
  ),
)


class Drawing:
  """Boxes and arrows on axes whose units are inches."""

  def __init__(self, axes: Axes, palette: Palette):
    self.axes, self.palette = axes, palette

  def box(
    self,
    x: float,
    y: float,
    text: str,
    *,
    width: float = 1.3,
    height: float = 0.62,
    color: str,
    filled: bool = False,
    size: float = 12,
  ) -> None:
    """Draws a rounded box around (x, y)."""
    low = (x - width / 2, y - height / 2)
    # A light tint keeps text legible in both palettes.
    for face, alpha in ((self.palette.ground, 1), (color, 0.22 * filled)):
      self.axes.add_patch(
        FancyBboxPatch(
          low,
          width,
          height,
          boxstyle="round,pad=0,rounding_size=0.1",
          facecolor=matplotlib.colors.to_rgba(face, alpha),
          edgecolor=color,
          linewidth=1.5,
          zorder=3,
        )
      )
    self.text(x, y, text, size=size)

  def zone(self, low: tuple, high: tuple, title: str = "") -> None:
    """Draws a large area from corner to corner, with a title at the top."""
    (x0, y0), (x1, y1) = low, high
    self.axes.add_patch(
      FancyBboxPatch(
        low,
        x1 - x0,
        y1 - y0,
        boxstyle="round,pad=0,rounding_size=0.15",
        facecolor=self.palette.zone,
        edgecolor="none",
        zorder=0,
      )
    )
    self.text((x0 + x1) / 2, y1 - 0.22, title, color=self.palette.faint)

  def arrow(
    self,
    start: tuple,
    end: tuple,
    *,
    color: str,
    label: str = "",
    shift: tuple = (0, 0.18),
    bend: float = 0,
    dashed: bool = False,
    size: float = 11,
  ) -> None:
    """Draws an arrow with a label next to its middle."""
    self.axes.add_patch(
      FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>,head_length=5,head_width=2.6",
        connectionstyle=f"arc3,rad={bend}",
        shrinkA=0,
        shrinkB=0,
        color=color,
        linewidth=1.8,
        linestyle=(0, (3, 2)) if dashed else "-",
        zorder=2,
      )
    )
    middle = [
      (a + b) / 2 + s for a, b, s in zip(start, end, shift, strict=True)
    ]
    if label:
      self.text(*middle, label, color=color, size=size)

  def line(self, *points: tuple, color: str, dashed: bool = False) -> None:
    """Draws straight lines between points; the last line is an arrow."""
    style = (0, (3, 2)) if dashed else "-"
    xs, ys = zip(*points[:-1], strict=True)
    self.axes.plot(
      xs, ys, color=color, linewidth=1.8, linestyle=style, zorder=2
    )
    self.arrow(points[-2], points[-1], color=color, dashed=dashed)

  def text(self, x: float, y: float, text: str, **options) -> None:
    """Writes text around (x, y)."""
    options = dict(size=12, color=self.palette.text) | options
    options = dict(ha="center", va="center", zorder=4) | options
    self.axes.text(x, y, text, **options)


def style_axes(axes: Axes, palette: Palette) -> None:
  """Sets the palette's colors on axes with data, and hides two spines."""
  axes.set_facecolor("none")
  axes.title.set_color(palette.text)
  axes.xaxis.label.set_color(palette.text)
  axes.tick_params(colors=palette.faint, labelsize=11)
  for side, spine in axes.spines.items():
    spine.set_visible(side in ("left", "bottom"))
    spine.set_color(palette.faint)


def canvas(figure: Figure) -> Axes:
  """Makes empty axes that fill a figure, in inches."""
  axes = figure.add_axes((0, 0, 1, 1))
  width, height = figure.get_size_inches()
  axes.set(xlim=(0, width), ylim=(0, height))
  axes.axis("off")
  return axes


def write(
  name: str,
  draw: Callable[[Palette], Figure],
  folder: Path = FOLDER,
  *,
  png: bool = False,
) -> list[Path]:
  """Writes a figure in each palette; returns the files."""
  files = []
  # Without a date and with fixed names, the bytes are the same each time.
  with matplotlib.rc_context({"svg.hashsalt": name}):
    for palette in PALETTES:
      figure, path = draw(palette), folder / f"{name}.{palette.name}.svg"
      figure.savefig(path, transparent=True, metadata={"Date": None})
      files.append(path)
      if png:
        ground = dict(facecolor=palette.ground)
        figure.savefig(path.with_suffix(".png"), dpi=110, **ground)
  return files


def main(name: str, draw: Callable[[Palette], Figure]) -> None:
  """Runs the command of a figure's module."""
  parser = argparse.ArgumentParser(description=f"Draws {name}.*.svg.")
  parser.add_argument("--png", action="store_true", help="also write PNGs")
  parser.add_argument("--out", type=Path, default=FOLDER)
  options = parser.parse_args()
  for path in write(name, draw, options.out, png=options.png):
    print(path)
