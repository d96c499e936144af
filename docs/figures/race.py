# SPDX-License-Identifier: Apache-2.0
"""Draws the race of codecs: bytes per parameter against the loss.

  python -m docs.figures.race

Each point is a way to store Adam's moments. It shows the held-out loss minus
the loss of f32 moments with the same seed: the mean and its 95 % interval.
Candidates with the same bytes per parameter are drawn next to each other. The
rows are in docs/rows/codec_race.jsonl, from `studies.codec_race`.
"""

import json

from matplotlib.figure import Figure

from docs.figures.style import FOLDER, Palette, main, style_axes
from studies.codec_race_table import differences, sizes
from studies.stability_figure import interval

ROWS = FOLDER.parent / "rows" / "codec_race.jsonl"
PRESET = "demo"
# Points above this loss are drawn at the top with their value.
LARGEST = 0.1
# Points of the library's codecs are blue, and the others are green.
_OURS = ("coat", "log8", "int8")


def draw(palette: Palette) -> Figure:
  """Draws a point with its interval for each candidate."""
  rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
  figure = Figure(figsize=(10, 5), layout="constrained")
  axes = figure.subplots()
  places: dict[float, int] = {}
  for name, size in sizes(rows, PRESET).items():
    found = differences(rows, PRESET, name, "held_out_loss")
    if not found:
      continue
    mean, half = interval(found)
    # Shift candidates with the same bytes, so that they do not overlap.
    place = places[round(size, 1)] = places.get(round(size, 1), -1) + 1
    x = size + 0.07 * place
    color = palette.value if name in _OURS else palette.saved
    is_far = mean > LARGEST
    top = LARGEST if is_far else mean + half
    axes.errorbar(
      x,
      min(mean, LARGEST),
      0 if is_far else half,
      fmt="^" if is_far else "o",
      color=palette.fault if is_far else color,
      capsize=5,
      lw=2,
      markersize=7,
    )
    axes.annotate(
      f"{name} {mean:+.0f}" if is_far else name,
      (x, top),
      xytext=(0, -8 if is_far else 6),
      textcoords="offset points",
      rotation=90,
      ha="center",
      va="top" if is_far else "bottom",
      color=palette.text,
      size=11,
    )
  axes.axhline(0, color=palette.faint, lw=0.8, zorder=0)
  axes.set_xlim(0.4, 2.5)
  axes.set_ylim(-0.1, 0.11)
  axes.set_title("Held-out loss minus that of f32 moments, nats", size=14)
  axes.set_xlabel("bytes per parameter for both moments", size=12)
  style_axes(axes, palette)
  return figure


if __name__ == "__main__":
  main("race", draw)
