# SPDX-License-Identifier: Apache-2.0
"""Draws the figure of `studies.stability`, and formats its table."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from train.run.metrics import format_table

# `_DIFFERENCE` limits the axis of differences, in nats. `_COMPARED` is the
# largest learning rate at which differences are drawn. At higher rates, all
# variants learn little, and the losses of different seeds are 0.1 nats apart.
_DIFFERENCE, _COMPARED = 0.04, 0.003
# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
_T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}


class Summary(NamedTuple):
  """The results of all runs of a variant.

  Attributes:
    rates: all learning rates, in ascending order.
    losses: for each rate, the held-out losses by seed, without failed runs.
    spikes: for each rate, the mean number of spikes.
    failed: for each rate, the number of failed runs.
    largest: the largest rate up to which no run failed, or None.
    best: the rate up to `largest` with the lowest mean loss, or None.
  """

  rates: list[float]
  losses: dict[float, dict[int, float]]
  spikes: dict[float, float]
  failed: dict[float, int]
  largest: float | None
  best: float | None


def summarize(rows: Iterable[dict]) -> Summary:
  """Summarizes the rows of one variant of one model."""
  by_rate: dict[float, list[dict]] = {}
  for row in sorted(rows, key=lambda row: row["case"]["rate"]):
    by_rate.setdefault(row["case"]["rate"], []).append(row)
  losses: dict[float, dict[int, float]] = {}
  for rate, found in by_rate.items():
    losses[rate] = {
      row["case"]["seed"]: row["held_out_loss"]
      for row in found
      if row["failed"] is None and row.get("held_out_loss") is not None
    }
  failed = {
    rate: len(found) - len(losses[rate]) for rate, found in by_rate.items()
  }
  stable = []
  for rate in by_rate:
    if failed[rate]:
      break
    stable.append(rate)
  means = {rate: np.mean(list(losses[rate].values())) for rate in stable}
  return Summary(
    rates=list(by_rate),
    losses=losses,
    spikes={
      rate: float(np.mean([row["spikes"] for row in found]))
      for rate, found in by_rate.items()
    },
    failed=failed,
    largest=stable[-1] if stable else None,
    best=min(means, key=lambda rate: means[rate]) if means else None,
  )


def best_rates(rows: Iterable[dict], variant: str, count: int) -> list[float]:
  """Returns the `count` rates at which the small model's losses are lowest."""
  found = summarize(
    row
    for row in rows
    if row["case"]["preset"] == "study" and row["case"]["variant"] == variant
  )
  whole = [
    rate
    for rate in found.rates
    if found.losses[rate] and not found.failed[rate]
  ]
  if len(whole) < count:
    raise ValueError(
      f"stability: --best {count} needs {count} rates at which no run of "
      f"{variant!r} failed, got {len(whole)}; run the small model first, or "
      "pass --rates"
    )
  whole.sort(key=lambda rate: np.mean(list(found.losses[rate].values())))
  return sorted(whole[:count])


def interval(values: Iterable[float]) -> tuple[float, float]:
  """Computes a mean and half the width of its 95 % confidence interval."""
  x = np.asarray(list(values), float)
  if len(x) < 2:
    return float(x.mean()) if len(x) else float("nan"), float("nan")
  t = _T95.get(len(x) - 1, 1.96)
  return float(x.mean()), float(t * x.std(ddof=1) / len(x) ** 0.5)


def draw(rows: Iterable[dict], preset: str, out: Path) -> str:
  """Draws the figure of a model and returns its table."""
  by_variant: dict[str, list[dict]] = {}
  for row in rows:
    if row["case"]["preset"] == preset:
      by_variant.setdefault(row["case"]["variant"], []).append(row)
  if not by_variant:
    raise ValueError(
      f"stability: the rows must include {preset}, got none; use the command "
      "`run` first"
    )
  found = {name: summarize(each) for name, each in by_variant.items()}
  figure = Figure(figsize=(15, 9), layout="constrained")
  losses, largest, differences, norms = figure.subplots(2, 2).ravel()
  ends = limits(found)
  highest = max(summary.rates[-1] for summary in found.values())
  for i, (name, summary) in enumerate(found.items()):
    style: dict[str, Any] = dict(color=f"C{i}", label=name)
    # Shift variants, so that their markers do not overlap.
    shift = 1.06 ** (i - len(found) / 2)
    _draw_losses(losses, summary, ends and ends[1], shift, **style)
    if name != "bf16" and "bf16" in found:
      shift = 1 + 0.03 * (i - len(found) / 2)
      _draw_differences(differences, summary, found["bf16"], shift, **style)
    if summary.largest is None:
      where = largest.get_yaxis_transform()
      largest.text(0.01, i, "none", va="center", transform=where)
    else:
      # Hatch the bar if this variant was not run at larger rates.
      is_open = summary.largest == summary.rates[-1] < highest
      look = dict(alpha=0.4, hatch="//") if is_open else {}
      largest.barh(i, summary.largest, **style, **look)
    _draw_norms(norms, by_variant[name], summary.best, **style)
  largest.set_yticks(range(len(found)), list(found))
  largest.set_ylim(len(found) - 0.5, -0.5)
  for axes in (losses, differences):
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
  largest.set_xscale("log")
  losses.set(
    ylabel="held-out loss (nats)",
    title="Loss; crosses: a seed failed; triangles: higher than shown",
  )
  if ends is not None:
    losses.set_ylim(*ends)
  largest.set(
    xlabel="learning rate",
    title="Largest rate that all seeds train; hatched: higher were not run",
  )
  differences.axhline(0, color="black", linewidth=0.8)
  differences.set(
    ylabel="held-out loss minus BF16's (nats)",
    title="Differences of paired runs, 95 % intervals; arrows: off the scale",
    ylim=(-_DIFFERENCE, _DIFFERENCE),
  )
  norms.set(xlabel="step", ylabel="gradient norm", title="At the best rate")
  norms.set_yscale("log")
  losses.legend(fontsize="small")
  figure.savefig(out, dpi=120)
  return _table(found)


def limits(found: dict[str, Summary]) -> tuple[float, float] | None:
  """Returns the ends of the loss axis, or None.

  The axis starts below the lowest loss, and ends above bf16's losses at the
  rates where no run of bf16 failed. If there are no such rates, the result is
  None. Without rows of bf16, all variants take its place. Losses of diverged
  runs are hundreds of nats higher. An axis that covered these losses would
  merge all other losses into one line.
  """
  losses, whole = [], []
  for name, summary in found.items():
    for rate, own in summary.losses.items():
      losses += own.values()
      counts = "bf16" not in found or name == "bf16"
      whole += own.values() if counts and not summary.failed[rate] else []
  if not whole:
    return None
  margin = 0.08 * (max(whole) - min(losses))
  return min(losses) - margin, max(whole) + margin


def _draw_differences(
  axes, summary: Summary, plain: Summary, shift: float, **style
) -> None:
  """Draws each rate's mean difference from bf16, and its 95 % interval."""
  for rate, own in summary.losses.items():
    other = plain.losses.get(rate, {})
    pairs = [own[seed] - other[seed] for seed in own if seed in other]
    if len(pairs) < 2 or rate > _COMPARED:
      continue
    mean, half = interval(pairs)
    x, color = rate * shift, style["color"]
    if abs(mean) > _DIFFERENCE:
      _draw_at_top(axes, x, "^", color)
    else:
      axes.errorbar(x, mean, half, fmt="o", color=color, capsize=3)


def _draw_losses(
  axes, summary: Summary, top: float | None, shift: float, **style
) -> None:
  """Draws means and ranges over seeds, and crosses for failed runs.

  A mean above `top` is drawn as a triangle at the upper edge.
  """
  color = style["color"]
  whole = [rate for rate in summary.rates if summary.losses[rate]]
  means = [np.mean(list(summary.losses[rate].values())) for rate in whole]
  axes.plot(np.multiply(whole, shift), means, "o", **style)
  for rate, mean in zip(whole, means, strict=True):
    values = summary.losses[rate].values()
    x = rate * shift
    axes.plot([x, x], [min(values), max(values)], color=color)
    is_above = top is not None and mean > top
    if is_above:
      _draw_at_top(axes, x, "^", color)
    elif summary.failed[rate]:
      axes.plot(x, mean, "x", color=color, markersize=12)
    if is_above and summary.failed[rate]:
      _draw_at_top(axes, x, "x", color)
  for rate in summary.rates:
    if not summary.losses[rate]:
      _draw_at_top(axes, rate * shift, "x", color)


def _draw_at_top(axes, rate: float, marker: str, color: str) -> None:
  """Marks a rate at the upper edge of the axes."""
  # Put a triangle above a cross.
  height = {"^": 0.98, "x": 0.94}[marker]
  where = axes.get_xaxis_transform()
  axes.plot(rate, height, marker, color=color, markersize=10, transform=where)


def _draw_norms(axes, rows: list[dict], best: float | None, **style) -> None:
  """Draws median gradient norms of one seed at a variant's best rate."""
  for row in rows:
    if row["case"]["rate"] == best:
      norms = np.array(row["grad_norms"], float)
      steps = np.linspace(0, row["case"]["steps"], len(norms))
      axes.plot(steps, norms, **style)
      return


def _table(found: dict[str, Summary]) -> str:
  """Formats the table; differences are between runs with the same seed."""
  header = ["variant", "runs failed", "largest rate", "best rate", "loss"]
  header += ["spread of seeds", "minus bf16's", "95 %", "spikes"]
  lines = []
  plain = found.get("bf16")
  for name, summary in found.items():
    failed = f"{sum(summary.failed.values())}"
    line = [name, failed, f"{summary.largest or float('nan'):g}"]
    if summary.best is None:
      lines.append([*line, *["-"] * (len(header) - len(line))])
      continue
    own = summary.losses[summary.best]
    line += [f"{summary.best:g}", f"{np.mean(list(own.values())):.4f}"]
    line += [f"{max(own.values()) - min(own.values()):.4f}"]
    difference = ["-", "-"]
    if plain is not None and plain.best is not None:
      other = plain.losses[plain.best]
      mean, half = interval(own[s] - other[s] for s in own if s in other)
      difference = [f"{mean:+.4f}", f"±{half:.4f}"]
    lines.append([*line, *difference, f"{summary.spikes[summary.best]:.1f}"])
  return format_table(header, lines)
