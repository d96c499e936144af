# SPDX-License-Identifier: Apache-2.0
"""Draws how far the losses of FP8 training are from those of BF16.

  python -m docs.figures.losses

The left panel shows the training loss of coat minus the loss of BF16, over the
steps of runs with the same seed, and for comparison the difference between BF16
runs with different seeds. The right panel shows the held-out loss at the end,
for each learning rate. The rows are in docs/rows/stability.jsonl, from
`studies.stability`.
"""

import itertools
import json

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.style import FOLDER, Palette, main, style_axes
from studies.stability_figure import interval

ROWS = FOLDER.parent / "rows" / "stability.jsonl"
BEST_RATE = 0.001
RATES = (0.0003, 0.001, 0.003)
SEEDS = (0, 1, 2)


def read_runs() -> dict[tuple[str, float, int], dict]:
  """Reads the small model's rows by variant, learning rate and seed."""
  rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
  return {
    (case["variant"], case["rate"], case["seed"]): row
    for row in rows
    for case in (row["case"],)
    if case["preset"] == "study"
  }


def held_out_differences(runs: dict, rate: float) -> list[float]:
  """Returns the held-out loss of coat minus BF16's loss for each seed."""
  return [
    runs["coat", rate, seed]["held_out_loss"]
    - runs["bf16", rate, seed]["held_out_loss"]
    for seed in SEEDS
  ]


def draw(palette: Palette) -> Figure:
  """Draws the differences over steps, and at the end for each rate."""
  runs = read_runs()
  figure = Figure(figsize=(12, 4.4), layout="constrained")
  left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
  _draw_curves(left, runs, palette)
  _draw_ends(right, runs, palette)
  for axes in (left, right):
    axes.axhline(0, color=palette.faint, lw=0.8, zorder=0)
    style_axes(axes, palette)
  return figure


def _draw_curves(axes: Axes, runs: dict, palette: Palette) -> None:
  losses = {
    (variant, seed): np.array(runs[variant, BEST_RATE, seed]["losses"])
    for variant in ("bf16", "coat")
    for seed in SEEDS
  }
  count = len(losses["bf16", 0])
  steps = (np.arange(count) + 0.5) * 1000 / count
  label = "BF16 minus BF16 with another seed"
  for one, other in itertools.combinations(SEEDS, 2):
    difference = losses["bf16", one] - losses["bf16", other]
    axes.plot(steps, difference, color=palette.plain, lw=1.2, label=label)
    label = None
  label = "coat minus BF16, same seed"
  for seed in SEEDS:
    difference = losses["coat", seed] - losses["bf16", seed]
    axes.plot(steps, difference, color=palette.value, lw=2, label=label)
    label = None
  axes.set_title("Training loss, difference in nats", size=14)
  axes.set_xlabel(f"step, at learning rate {BEST_RATE}", size=12)
  axes.legend(
    frameon=False, fontsize=12, labelcolor=palette.text, loc="upper right"
  )


def _draw_ends(axes: Axes, runs: dict, palette: Palette) -> None:
  for place, rate in enumerate(RATES):
    plain = [runs["bf16", rate, seed]["held_out_loss"] for seed in SEEDS]
    spread = np.array([max(plain), min(plain)]) - np.mean(plain)
    axes.bar(
      place,
      spread[0] - spread[1],
      bottom=spread[1],
      width=0.6,
      color=palette.plain,
      alpha=0.35,
      label="range of BF16's seeds" if place == 0 else None,
    )
    differences = held_out_differences(runs, rate)
    mean, half = interval(differences)
    axes.errorbar(
      place,
      mean,
      half,
      fmt="o",
      color=palette.value,
      capsize=6,
      lw=2,
      markersize=7,
      label="coat minus BF16, 95 % interval" if place == 0 else None,
    )
  axes.set_xticks(range(len(RATES)), [f"{rate:g}" for rate in RATES])
  axes.set_title("Held-out loss after 1,000 steps", size=14)
  axes.set_xlabel("learning rate", size=12)
  axes.set_ylim(-0.02, 0.03)
  axes.legend(
    frameon=False, fontsize=12, labelcolor=palette.text, loc="upper left"
  )


if __name__ == "__main__":
  main("losses", draw)
