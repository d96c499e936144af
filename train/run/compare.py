# SPDX-License-Identifier: Apache-2.0
"""Configures BF16 runs as baselines for a run, and prints the comparison."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from coat_jax.models.vision_language import VisionLanguageConfig
from train import plot
from train.config import TrainConfig
from train.memory.count import residual_bytes
from train.run import report
from train.run.directory import RunDirectory
from train.run.metrics import format_table, read_metrics

# Training losses are noisy, so tables show a mean over the last steps. This is
# the maximum number of these steps.
_LAST = 50
# Rows of the table: key, label, number format.
_ROWS = (
  ("train_loss", "training loss, mean of last {} steps", ".4f"),
  ("held_out_loss", "held-out loss", ".4f"),
  ("held_out_accuracy", "held-out accuracy", ".4f"),
  ("perplexity", "held-out perplexity", ".3f"),
  ("state", "optimizer state, bytes/parameter", ".2f"),
  ("residuals", "saved for backward, bytes/token/layer", ",.0f"),
  ("tokens_per_s", "tokens/s", ",.0f"),
  ("step_megabytes", "memory of a step, MB per device", ",.0f"),
)


def twins[Config: TrainConfig](config: Config) -> list[Config]:
  """Configures a run's BF16 baselines; the first has the run's own seed."""
  found = []
  count = config.compare_seeds if config.compare else 0
  for seed in range(config.seed, config.seed + count):
    run = RunDirectory(config.out).twin(f"bf16_seed_{seed}")
    resume = config.resume and run.latest_step() is not None
    twin = config.bf16_twin(seed=seed, out=str(run.path))
    found.append(dataclasses.replace(twin, resume=resume, overwrite=not resume))
  return found


def finish(runs: Sequence[TrainConfig]) -> None:
  """Prints a table that compares finished runs, and draws their losses."""
  folders = [RunDirectory(config.out) for config in runs]
  names = [_name(config, runs[0]) for config in runs]
  read = [list(read_metrics(folder.metrics)) for folder in folders]
  counts = [sum("loss" in row for row in rows) for rows in read]
  last = min([_LAST, *filter(None, counts)])
  results = []
  for config, rows in zip(runs, read, strict=True):
    result = summarize(rows, last)
    result["state"] = report.state_bytes_per_param(config)
    shape = config.model
    if isinstance(shape, VisionLanguageConfig):
      shape = shape.text
    residuals = residual_bytes(
      shape,
      config.coat_recipe(),
      tokens=config.seq,
      saves_copies=config.mesh_sizes.get("expert", 1) == 1,
    )
    result["residuals"] = residuals["total"]
    results.append(result)
  plot.draw(dict(zip(names, read, strict=True)), folders[0].plot)
  print(_table(names, results, last))
  print(f"\nloss curves: {folders[0].plot}")


def summarize(rows: list[dict], last: int = _LAST) -> dict[str, float]:
  """Computes a run's values for the comparison table."""

  def values(key: str) -> list[float]:
    return [row[key] for row in rows if key in row]

  summary = {}
  if losses := values("loss"):
    summary["train_loss"] = statistics.fmean(losses[-last:])
  if speeds := values("tokens_per_s"):
    summary["tokens_per_s"] = statistics.median(speeds)
  if held_out := values("held_out_loss"):
    summary["held_out_loss"] = held_out[-1]
  if shares := values("held_out_accuracy"):
    summary["held_out_accuracy"] = shares[-1]
  elif held_out:
    summary["perplexity"] = math.exp(min(held_out[-1], 700.0))
  if sizes := values("step_bytes"):
    summary["step_megabytes"] = sizes[-1] / 1e6
  return summary


def _table(names: list[str], results: list[dict[str, float]], last: int) -> str:
  """Formats a column for each run, and columns that compare the runs."""
  header, has_twin, has_spread = [*names], len(names) > 1, len(names) > 2
  if has_twin:
    header.append("difference")
  if has_spread:
    header.append("spread of bf16")
  rows = []
  for key, words, form in _ROWS:
    # Subtract rounded values, so that the figures in the table add up.
    values = [_rounded(form, result.get(key)) for result in results]
    if all(value is None for value in values):
      continue
    row = [words.format(last), *(_cell(form, value) for value in values)]
    if has_twin:
      difference = None if None in values[:2] else values[0] - values[1]
      row.append(_cell("+" + form, difference))
    if has_spread:
      twins = values[1:]
      row.append(
        _cell(form, None if None in twins else max(twins) - min(twins))
      )
    rows.append(row)
  return format_table(["", *header], rows)


def _rounded(form: str, value: float | None) -> float | None:
  """Rounds a value to the decimals of a number format like ",.2f"."""
  return None if value is None else round(value, int(form[-2]))


def _cell(form: str, value: float | None) -> str:
  if value is None:
    return "none"
  if abs(value) >= 1e12:  # For example, the perplexity of a diverged run.
    form = "+.4g" if form.startswith("+") else ".4g"
  return format(value, form)


def _name(config: TrainConfig, first: TrainConfig) -> str:
  """Names a run by its recipe, plus its codec or seed if they are unusual."""
  name, usual = config.recipe, {"coat": "coat", "bf16": "float32"}
  if config.optim.codec != usual.get(config.recipe):
    name += f"/{config.optim.codec}"
  return name + (f" seed {config.seed}" if config.seed != first.seed else "")
