# SPDX-License-Identifier: Apache-2.0
"""Draws the losses of the longest runs minus the losses of BF16.

  python -m docs.figures.long

Each panel shows one corpus, because losses on different corpora cannot be
compared. Lines show the training loss minus that of BF16 with the same seed at
the same step, as a moving mean. Dots show the same difference for held-out
losses. Runs with the same seed start from the same weights and read the same
batches. BF16 with seed 1 is compared with seed 0. The rows are in
docs/rows/long.jsonl, from runs of `studies/long.sh`.
"""

import json

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.style import FOLDER, Palette, main, style_axes

ROWS = FOLDER.parent / "rows" / "long.jsonl"
SECOND_SEED = "bf16, seed 1"
# The number of tokens identifies a corpus.
EARLIER, LATER = 188_411_639, 188_428_388
# For each panel: variants and their palette colors, in the legend's order. All
# seeds of a variant have the same color, and one entry in the legend.
PANELS = {
  LATER: {
    "coat": "value",
    "coat, seed 1": "value",
    "coat, seed 2": "value",
    "lean": "gradient",
    "lean, seed 1": "gradient",
    "lean, seed 2": "gradient",
    SECOND_SEED: "plain",
  },
  EARLIER: {"coat": "value", "lean, attention fp8": "gradient"},
}
TOKENS_PER_STEP = 32 * 1024
# The moving mean covers 1,000 steps.
WINDOW_STEPS = 1000


def read_runs() -> dict[int, dict[str, dict]]:
  """Returns rows by corpus and variant.

  Runs with a seed other than 0 are called `VARIANT, seed SEED`.
  """
  found: dict[int, dict[str, dict]] = {}
  for row in map(json.loads, ROWS.read_text().splitlines()):
    case = row["case"]
    name, seed = case["variant"], case["seed"]
    name = f"{name}, seed {seed}" if seed else name
    found.setdefault(case["corpus_tokens"], {})[name] = row
  return found


def bf16_run(runs: dict, variant: str) -> dict:
  """Returns the row of the BF16 run that a variant is compared with."""
  if variant == SECOND_SEED:
    return runs["bf16"]
  _, comma, seed = variant.partition(", seed ")
  return runs[f"bf16{comma}{seed}"]


def held_out_differences(runs: dict, variant: str) -> dict[int, float]:
  """Returns the held-out loss minus that of BF16, by step.

  `runs` are the rows of one corpus by variant.
  """
  plain = dict(bf16_run(runs, variant)["held_out"])
  return {step: x - plain[step] for step, x in runs[variant]["held_out"]}


def draw(palette: Palette) -> Figure:
  """Draws the differences over tokens."""
  runs = read_runs()
  figure = Figure(figsize=(10, 6.8), layout="constrained")
  panels = figure.subplots(2, 1, sharex=True, sharey=True)
  for axes, (corpus, colors) in zip(panels, PANELS.items(), strict=True):
    for variant, color in colors.items():
      _draw_run(axes, runs[corpus], variant, getattr(palette, color))
    axes.axhline(0, color=palette.faint, lw=0.8, zorder=0)
    date = runs[corpus]["coat"]["date"]
    axes.set_title(
      f"Loss minus that of BF16 in nats, corpus of {date}", size=14
    )
    axes.legend(
      frameon=False,
      fontsize=12,
      labelcolor=palette.text,
      loc="upper right",
      ncols=2,
    )
    style_axes(axes, palette)
  panels[0].set_ylim(-0.035, 0.05)
  panels[1].set_xlabel("million tokens", size=12)
  return figure


def _draw_run(axes: Axes, runs: dict, variant: str, color: str) -> None:
  run = runs[variant]
  count = WINDOW_STEPS // run["mean_of_steps"]
  width = run["mean_of_steps"] * TOKENS_PER_STEP / 1e6
  losses = np.array(run["losses"])
  plain = np.array(bf16_run(runs, variant)["losses"])[: len(losses)]
  smooth = np.convolve(losses - plain, np.ones(count) / count, "valid")
  x = (np.arange(len(smooth)) + count / 2) * width
  is_first = ", seed " not in variant or variant == SECOND_SEED
  label = variant if is_first else None
  axes.plot(x, smooth, color=color, lw=2, label=label)
  steps, dots = np.array(list(held_out_differences(runs, variant).items())).T
  x = steps * TOKENS_PER_STEP / 1e6
  axes.plot(x, dots, "o", color=color)


if __name__ == "__main__":
  main("long", draw)
