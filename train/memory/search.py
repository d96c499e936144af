# SPDX-License-Identifier: Apache-2.0
"""Finds the settings that train a model fastest on a given number of GPUs.

We estimate the memory of every run that `candidates` yields, and rank the runs
that fit by estimated speed. Only ratios of speeds matter. The unit of time is
the time that BF16 layers take per token. In this unit, a microbatch of n tokens
on a GPU takes

  n * LAYER[recipe][remat] + STEP[params] + IN_BACKWARD

IN_BACKWARD is added only if the optimizer runs in the backward pass. The last
two terms are the fixed cost of a step: running the optimizer, and reading and
quantizing the weights. Each microbatch is charged the full cost, although the
optimizer runs only once per step. We measured this cost with Llama-2-7B on an
H200. In our unit of time, the cost is about the same for 13B, because the time
per token grows with the weights too.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from coat_jax.models.config import Remat
from train.config import TrainConfig
from train.memory.step import largest, peak_bytes
from train.mesh import batch_devices
from train.run.metrics import format_table
from train.weights import Stored

GB = 10**9
# Time of a layer's forward and backward pass, relative to BF16 with remat none
# (16.73 ms). docs/performance.md, "One decoder layer", has newer times. We did
# not measure fp8_linear with remat full: the value is the time with none plus a
# forward pass.
LAYER: dict[str, dict[Remat, float]] = {
  "bf16": {"none": 1.0, "dots": 1.04, "full": 1.27},
  "fp8_linear": {"none": 0.68, "full": 0.90},
  "coat": {"none": 0.66, "fp8": 0.81, "full": 0.83, "fp8_layer": 0.83},
}
# The fixed cost of a step, by the format of the weights. These values reproduce
# the ratios of the following times, measured on one H200 with sequences of
# 2,048 tokens, within 2 %:
#   float32, 2 sequences   304 ms
#   float32, 4 sequences   491 ms
#   bfloat16, 4 sequences  471 ms
# bfloat16_low8 was not measured; we chose a value in between.
STEP: dict[Stored, float] = {
  "float32": 1500,
  "bfloat16_low8": 1300,
  "bfloat16": 1150,
}
# Running the optimizer in the backward pass saves 14 ms of 471 to 491 ms.
IN_BACKWARD = -200
# The share of memory left free, because planned peaks are not exact. They are
# within 5 % of the compiler's peak, and mostly within 1 %.
_MARGIN = 0.02
_SHOWN = 6
# Remat fp8_layer rounds the residual stream, so a run with fp8_layer is ranked
# first only if it is faster by more than this factor.
_ROUNDED = 1.02


class Found(NamedTuple):
  """A planned run."""

  run: TrainConfig
  peak_bytes: int  # The planned peak on one GPU.
  cost: float  # The estimated time per token, relative to BF16 layers.


def candidates(
  config: TrainConfig, params: Stored | None, remat: Remat | None
) -> Iterator[TrainConfig]:
  """Yields the runs to compare, with recipes bf16, fp8_linear and coat.

  Recipes bf16 and fp8_linear store weights and moments in f32, as is usual.
  `params` and `remat` restrict the runs to those with the given values; None
  allows all values. `config` is a run with the `coat` recipe, from which all
  runs get their other options.
  """
  for recipe in ("bf16", "fp8_linear"):
    for kept in LAYER[recipe]:
      if params in (None, "float32") and remat in (None, kept):
        yield dataclasses.replace(config, remat=kept).with_f32_moments(recipe)
  kinds = [kind for kind in STEP if params in (None, kind)]
  remats = [kept for kept in LAYER["coat"] if remat in (None, kept)]
  # With microbatches, the optimizer cannot run in the backward pass, because
  # gradients must be summed first.
  where = (False, True) if config.accumulate == 1 else (False,)
  for kind, in_backward, kept in itertools.product(kinds, where, remats):
    clip = "share" if in_backward else config.optim.clip
    yield dataclasses.replace(
      config,
      params=kind,
      remat=kept,
      optimizer_in_backward=in_backward,
      optim=dataclasses.replace(config.optim, clip=clip),
    )


def cost(run: TrainConfig) -> float:
  """Estimates the time per token, relative to BF16 layers."""
  sequences = run.batch / batch_devices(run.mesh_sizes) / run.accumulate
  fixed = STEP[run.params] + IN_BACKWARD * run.optimizer_in_backward
  return LAYER[run.recipe][run.remat] + fixed / (sequences * run.seq)


def search(
  runs: Iterable[TrainConfig], hbm_bytes: int, *, is_batch_fixed: bool
) -> tuple[list[Found], Found]:
  """Returns the runs that fit, fastest first, and the run with the lowest peak.

  Each run gets the largest batch that fits, but at most its configured batch.
  If `is_batch_fixed` is true, each run keeps its batch, and is split into
  microbatches if necessary. Runs with the optimizer in the backward pass are
  not split.
  """
  allowed = int(hbm_bytes / (1 + _MARGIN))
  found = []
  for run in runs:
    if is_batch_fixed:
      run = _in_microbatches(run, allowed)
    elif peak_bytes(run) > allowed:
      shards = batch_devices(run.mesh_sizes) * run.accumulate
      most = largest(run, allowed)
      run = dataclasses.replace(run, batch=max(shards, most))
    found.append(Found(run, peak_bytes(run), cost(run)))
  fitting = [each for each in found if each.peak_bytes <= allowed]
  smallest = min(found, key=lambda each: each.peak_bytes)
  return sorted(fitting, key=_rank), smallest


def _rank(found: Found) -> float:
  return found.cost * (_ROUNDED if found.run.remat == "fp8_layer" else 1)


def _in_microbatches(run: TrainConfig, allowed: int) -> TrainConfig:
  """Splits a batch into the fewest microbatches that fit, if any fit."""
  if run.optimizer_in_backward:
    return run
  sequences = run.batch // batch_devices(run.mesh_sizes)
  for count in range(run.accumulate, sequences + 1):
    if sequences % count == 0:
      run = dataclasses.replace(run, accumulate=count)
      if peak_bytes(run) <= allowed:
        break
  return run


def command(run: TrainConfig, preset: str, plain: TrainConfig) -> str:
  """Returns a run's command line; omits options that equal those of `plain`."""
  words = ["python -m train.pretrain", preset]
  left_out = ("out", "data", "model", "optim")
  for prefix, ours, theirs in (
    ("", run, plain),
    ("optim.", run.optim, plain.optim),
  ):
    for field in dataclasses.fields(theirs):
      value = getattr(ours, field.name)
      if field.name in left_out or value == getattr(theirs, field.name):
        continue
      flag = prefix + field.name.replace("_", "-")
      if isinstance(value, bool):
        words.append(f"--{flag}" if value else f"--no-{flag}")
      else:
        words.append(f"--{flag} {value}")
  return " ".join(words)


def report(fitting: list[Found]) -> str:
  """Formats a table: the fastest run for each recipe, params and optimizer."""
  rows: dict[tuple, list[str]] = {}
  for run, peak, cost_of_token in fitting:
    where = "in backward" if run.optimizer_in_backward else "after"
    speed = fitting[0].cost / cost_of_token
    row = [run.recipe, run.params, where, run.remat, str(run.batch)]
    row += [f"{peak / GB:.2f}", f"{speed:.2f}"]
    rows.setdefault((run.recipe, run.params, where), row)
  header = ["recipe", "weights", "optimizer", "remat", "batch", "GB", "speed"]
  return format_table(header, list(rows.values())[:_SHOWN])
