# SPDX-License-Identifier: Apache-2.0
"""Draws the losses of the longest runs and their differences from BF16.

  python -m docs.figures.long

Top: held-out losses. Bottom: the training loss minus BF16's training loss at
the same step. Dots: held-out losses of a second BF16 seed minus the losses of
the first. All other runs start from the same weights and read the same batches.
The rows are docs/rows/long.jsonl, from runs of `studies/long.sh`.
"""

import json

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.style import FOLDER, Palette, main, style_axes

ROWS = FOLDER.parent / "rows" / "long.jsonl"
SECOND_SEED = "bf16, seed 1"
# The variants by the palette's color, in the order of the legend.
COLORS = {
  "bf16": "plain",
  "bf16, coat moments": "saved",
  "coat": "value",
  "lean, attention fp8": "gradient",
  "coat, attention and its output in fp8": "fault",
}
TOKENS_PER_STEP = 32 * 1024
# Differences above this are cut off: the run has diverged.
LARGEST = 0.06


def read_runs() -> dict[str, dict]:
  """Returns rows by variant; the second BF16 run is called `bf16, seed 1`."""
  rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
  return {_name(**row["case"]): row for row in rows}


def _name(variant: str, seed: int, **rest: object) -> str:
  del rest
  return f"{variant}, seed {seed}" if seed else variant


def held_out_difference(runs: dict, variant: str) -> tuple[int, float]:
  """Returns tokens and loss minus BF16's loss at the last shared evaluation."""
  plain = dict(runs["bf16"]["held_out"])
  step, loss = runs[variant]["held_out"][-1]
  return step * TOKENS_PER_STEP, loss - plain[step]


def draw(palette: Palette) -> Figure:
  """Draws losses and differences over tokens."""
  runs = read_runs()
  figure = Figure(figsize=(10, 6.4), layout="constrained")
  top, bottom = figure.subplots(2, 1, sharex=True)
  for variant, color in COLORS.items():
    look = dict(color=getattr(palette, color), lw=2)
    _draw_run(top, bottom, runs, variant, look)
  plain = dict(runs["bf16"]["held_out"])
  dots = [(n, loss - plain[n]) for n, loss in runs[SECOND_SEED]["held_out"]]
  steps, differences = np.array(dots).T
  bottom.plot(
    steps * TOKENS_PER_STEP / 1e6,
    differences,
    "o",
    color=palette.plain,
    label=f"{SECOND_SEED}, held out",
  )
  top.set_ylim(1.2, 3)
  bottom.set_ylim(-0.03, LARGEST)
  top.set_title("Held-out loss, nats", size=14)
  bottom.set_title("Training loss minus that of BF16, nats", size=14)
  bottom.set_xlabel("million tokens", size=12)
  for axes in (top, bottom):
    axes.legend(
      frameon=False, fontsize=12, labelcolor=palette.text, loc="upper right"
    )
  bottom.axhline(0, color=palette.faint, lw=0.8, zorder=0)
  for axes in (top, bottom):
    style_axes(axes, palette)
  return figure


def _draw_run(top: Axes, bottom: Axes, runs: dict, variant: str, look: dict):
  run = runs[variant]
  steps, losses = np.array(run["held_out"]).T
  top.plot(steps * TOKENS_PER_STEP / 1e6, losses, label=variant, **look)
  if variant == "bf16":
    return
  losses = np.array(run["losses"])
  width = run["mean_of_steps"] * TOKENS_PER_STEP / 1e6
  plain = np.array(runs["bf16"]["losses"])[: len(losses)]
  # A mean of five windows, 200 steps.
  smooth = np.convolve(losses - plain, np.ones(5) / 5, "valid")
  bottom.plot((np.arange(len(smooth)) + 2.5) * width, smooth, **look)


if __name__ == "__main__":
  main("long", draw)
