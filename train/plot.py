# SPDX-License-Identifier: Apache-2.0
"""Draws figures of runs from their metrics.jsonl.

  python -m train.plot RUN... [--out FIGURE.png]

The figure shows the loss curves of all runs and of their BF16 twins, and the
first run's loss minus each other run's loss at the same steps. For runs with
--report-state, it shows the relative errors of the stored moments and, with
codec coat, a histogram of the powers k of dynamic range expansion. For runs
with --watch, it shows some of the watched values.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from train.command_line import read_options
from train.options import read_path, shown
from train.run.directory import RunDirectory
from train.run.exits import exit_status
from train.run.metrics import read_metrics
from train.run.writing import save_errors

# Smoothed losses are means of this many steps, or of all steps if a run is
# shorter.
_WINDOW = 20
FORMATS = (".png", ".pdf", ".svg")
_MOMENTS = {"mu": "first moment", "nu": "second moment"}


def draw(runs: dict[str, list[dict]], out: Path) -> None:
  """Draws the figure: one panel with all runs for each kind of metric."""
  panels = [(_draw_losses, runs)]
  if _comparable(runs):
    panels.append((_draw_differences, runs))
  for draw_panel, key in (
    (_draw_powers, "powers"),
    (_draw_errors, "state"),
    (_draw_watched, "watch"),
  ):
    found = {}
    for name, rows in runs.items():
      if with_key := [row for row in rows if key in row]:
        found[name] = with_key
    if found:
      panels.append((draw_panel, found))
  figure = Figure(figsize=(6 * len(panels), 4), layout="constrained")
  axes = figure.subplots(1, len(panels), squeeze=False)[0]
  for axis, (draw_panel, rows_by_name) in zip(axes, panels, strict=True):
    draw_panel(axis, rows_by_name)
    axis.legend(fontsize="small")
  with save_errors(out):
    figure.savefig(out, dpi=150)


def check_figure(out: Path) -> None:
  """Checks, before the figure is drawn, that its file can be written."""
  if out.is_dir() or out.suffix not in FORMATS:
    folder = out if out.is_dir() else out.parent
    what = f"the folder {out}" if out.is_dir() else str(out)
    raise ValueError(
      f"out: must be a file that ends in {', '.join(FORMATS)}, got {what}; "
      f"pass for example {folder / 'figure.png'}"
    )
  try:
    with tempfile.TemporaryFile(dir=out.parent):
      pass
  except OSError as error:
    raise ValueError(
      f"out: cannot write to the folder {out.parent}: {error.strerror}; create "
      "it, or pass another one"
    ) from error


def _draw_losses(axes, runs: dict[str, list[dict]]) -> None:
  for index, (name, rows) in enumerate(runs.items()):
    color = f"C{index}"
    steps, losses = _series(rows, "loss")
    axes.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
    window = min(_WINDOW, len(losses))
    if window:
      label = f"{name}, mean of {window}"
      axes.plot(*_smoothed(steps, losses, window), color=color, label=label)
    steps, losses = _series(rows, "held_out_loss")
    axes.plot(steps, losses, "o", color=color, label=f"{name}, held out")
  axes.set(xlabel="step", ylabel="loss (nats per token)", title="Loss")


def _comparable(runs: dict[str, list[dict]]) -> list[str]:
  """Returns the names of runs that share steps with the first run."""
  first, *others = runs
  steps = _series(runs[first], "loss")[0]
  return [
    name
    for name in others
    if np.isin(_series(runs[name], "loss")[0], steps).any()
  ]


def _draw_differences(axes, runs: dict[str, list[dict]]) -> None:
  first = next(iter(runs))
  for name in _comparable(runs):
    color = f"C{list(runs).index(name)}"
    for key in ("loss", "held_out_loss"):
      steps, losses = _difference(runs[first], runs[name], key)
      if key == "held_out_loss":
        label = f"{name}, held out"
        axes.plot(steps, losses, "o", color=color, label=label)
        continue
      # Noise between steps exceeds the differences, so average over more steps.
      window = max(min(_WINDOW, len(losses)), len(losses) // 10)
      label = f"{name}, mean of {window}"
      axes.plot(*_smoothed(steps, losses, window), color=color, label=label)
  axes.axhline(0, color="gray", linewidth=0.8, zorder=0)
  axes.set(
    xlabel="step",
    ylabel="difference (nats per token)",
    title=f"Loss of {first} minus another run's",
  )


def _difference(
  rows: list[dict], others: list[dict], key: str
) -> tuple[np.ndarray, np.ndarray]:
  ours, theirs = (
    dict(zip(*_series(each, key), strict=True)) for each in (rows, others)
  )
  steps = [step for step in ours if step in theirs]
  return np.array(steps), np.array([ours[x] - theirs[x] for x in steps])


def _smoothed(
  steps: np.ndarray, values: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray]:
  """Averages over `window` steps; each mean is drawn at its last step."""
  means = np.convolve(values, np.ones(window) / window, "valid")
  return steps[window - 1 :], means


def _draw_powers(axes, runs: dict[str, list[dict]]) -> None:
  for name, rows in runs.items():
    for moment, counts in rows[-1]["powers"].items():
      powers = [int(sixteenths) / 16 for sixteenths in counts]
      shares = np.array(list(counts.values())) / max(sum(counts.values()), 1)
      label = f"{name}, {_MOMENTS[moment]}, step {rows[-1]['step']}"
      axes.step(powers, shares, where="mid", label=label)
  axes.set_xscale("log", base=2)
  axes.xaxis.set_major_formatter(ScalarFormatter())
  axes.set(xlabel="power k", ylabel="share of groups", title="Expansion")


def _draw_errors(axes, runs: dict[str, list[dict]]) -> None:
  for name, rows in runs.items():
    for moment, meaning in _MOMENTS.items():
      steps = [row["step"] for row in rows]
      errors = [_mean_error(row["state"], moment) for row in rows]
      axes.plot(steps, errors, "o-", label=f"{name}, {meaning}")
  axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
  axes.set(
    xlabel="step",
    ylabel="relative error",
    title="Stored moments, compared with f32 moments",
  )


# The panel has room for these lines only. Lines about activations show the
# layer with the largest value.
_WATCHED = {
  "activations_kurtosis": "largest kurtosis of a layer",
  "activations_amax": "largest amax of a layer",
  "activations_zeroed": "largest share of zeroed activations",
  "nu_zeroed": "share of zeroed second moments",
}


def _draw_watched(axes, runs: dict[str, list[dict]]) -> None:
  for index, (name, rows) in enumerate(runs.items()):
    for (key, meaning), style in zip(
      _WATCHED.items(), ("-", "--", "-.", ":"), strict=True
    ):
      values = [
        (row["step"], max(x for x in row["watch"][key] if x is not None))
        for row in rows
        if any(row["watch"].get(key, ()))  # A log axis has no zero.
      ]
      if values:
        label = f"{name}, {meaning}"
        steps, worst = zip(*values, strict=True)
        axes.plot(steps, worst, style, color=f"C{index}", label=label)
  axes.set_yscale("log")
  axes.set(xlabel="step", title="Watched")


def _mean_error(state: dict, moment: str) -> float:
  """Averages relative errors over all parameters of the encoded leaves."""
  leaves = [leaf for leaf in state.values() if leaf["encoded"]]
  errors = [leaf[moment]["relative_error"] for leaf in leaves]
  sizes = [leaf["parameters"] for leaf in leaves]
  return float(np.average(errors, weights=sizes)) if leaves else 0.0


def _series(rows: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns the steps and values of rows that contain a key."""
  found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
  steps, values = zip(*found, strict=True) if found else ((), ())
  return np.array(steps), np.array(values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotConfig:
  """Draws the losses of runs, and what --report-state and --watch recorded.

  Attributes:
    runs: Folders of runs.
    out: The figure to write: a .png, .pdf or .svg file.
  """

  runs: Annotated[
    tyro.conf.Positional[tuple[Path, ...]],
    shown("required", metavar="RUN [RUN ...]"),
  ]
  out: Annotated[Path | None, shown("default: plot.png in the first run")] = (
    None
  )


def load(paths: tuple[Path, ...]) -> dict[str, list[dict]]:
  """Reads the metrics of runs and their twins."""
  runs = {}
  for path in paths:
    run = RunDirectory(path)
    if not run.is_started():
      raise ValueError(
        f"plot: {path} does not contain a run that has trained a step; pass "
        "the --out of such a run"
      )
    for each in (run, *run.twins()):
      is_twin = each is not run
      name = f"{path.name} {each.path.name}" if is_twin else path.name
      runs[name] = list(read_metrics(each.metrics))
      if not runs[name]:
        raise ValueError(
          f"plot: {each.metrics} must have lines with a step, got none; "
          "restore the file, or name other runs"
        )
  return runs


def run(config: PlotConfig) -> None:
  if not config.runs:
    raise ValueError("plot: name at least one run, got none; pass its folder")
  out = RunDirectory(config.runs[0]).plot
  if config.out is not None:
    out = read_path("out", config.out)
  runs = load(config.runs)
  check_figure(out)
  draw(runs, out)
  print(out)


def main(arguments: Sequence[str] | None = None) -> int:
  config = read_options(PlotConfig, "plot", arguments)
  return exit_status(lambda: run(config), smaller="name fewer runs")


if __name__ == "__main__":
  sys.exit(main())
