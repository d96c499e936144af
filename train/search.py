# SPDX-License-Identifier: Apache-2.0
"""Which settings train a model fastest on the GPUs that there are.

Every combination that `candidates` makes is planned, at the largest batch that
fits, and ranked by an estimate of its speed. Only ratios count. A microbatch
of n tokens on a GPU takes, in units of what a token costs in BF16 layers,

  n * LAYER[recipe][remat] + STEP[params] + IN_BACKWARD

where the last two are what a step costs whatever its batch: the optimizer, and
weights that are read and quantized. They are those of Llama-2-7B on an H200,
and much the same for 13B, for both parts grow with the weights.
tests/train/test_search.py holds the estimate beside measured steps.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from coat_jax.models.config import Remat
from coat_jax.plan import fullest
from train import planning
from train.config import TrainConfig
from train.run.metrics import format_table
from train.weights import Stored

GB = 10**9
# Time of a layer, forward and backward, over BF16's 16.73 ms (docs/
# performance.md, "One decoder layer"). coat's fp8, full and fp8_layer are 1.22,
# 1.26 and 1.26 of its none. fp8_linear's full was not measured: it is its none
# and its forward.
LAYER: dict[str, dict[Remat, float]] = {
  "bf16": {"none": 1.0, "dots": 1.04, "full": 1.27},
  "fp8_linear": {"none": 0.68, "full": 0.90},
  "coat": {"none": 0.66, "fp8": 0.81, "full": 0.83, "fp8_layer": 0.83},
}
# Tokens of BF16 layers that a step costs besides. float32: steps of 2 and 4
# sequences on one H200, 304 and 491 ms. bfloat16: 20 ms of 491 less. In between
# bfloat16_low8, which was not measured.
STEP: dict[Stored, float] = {
  "float32": 1500,
  "bfloat16_low8": 1300,
  "bfloat16": 1150,
}
IN_BACKWARD = -200  # 14 ms less of 471 to 491.
# Plans are within 5 % of the compiler, and mostly within 1.
_MARGIN = 0.02
_SHOWN = 6
# fp8_layer has to be so much faster.
_ROUNDED = 1.02


class Found(NamedTuple):
  """Settings that fit.

  Attributes:
    run: The run.
    peak_bytes: Planned, of one GPU.
    cost: Of a token, in that of a token in BF16 layers.
  """

  run: TrainConfig
  peak_bytes: int
  cost: float


def candidates(
  config: TrainConfig, params: Stored | None, remat: Remat | None
) -> Iterator[TrainConfig]:
  """Makes the runs that are compared: the model in all recipes.

  BF16 layers and FP8 products are as they are usually trained, in f32 all
  else; recipe coat has all kinds of weights, and the optimizer's step behind or
  inside the backward.

  Args:
    config: The run, in recipe coat with what cannot be combined left out.
    params, remat: Only these; None for all.
  """
  for recipe in ("bf16", "fp8_linear"):
    for kept in LAYER[recipe]:
      if params in (None, "float32") and remat in (None, kept):
        yield dataclasses.replace(config, remat=kept).with_f32_moments(recipe)
  kinds = [kind for kind in STEP if params in (None, kind)]
  remats = [kept for kept in LAYER["coat"] if remat in (None, kept)]
  # Microbatches need all gradients at once.
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
  """Estimates the time of a token, in that of one in BF16 layers."""
  sequences = run.batch / planning.batch_shards(run) / run.accumulate
  fixed = STEP[run.params] + IN_BACKWARD * run.optimizer_in_backward
  return LAYER[run.recipe][run.remat] + fixed / (sequences * run.seq)


def search(
  runs: Iterable[TrainConfig], hbm_bytes: int, *, is_batch_fixed: bool
) -> tuple[list[Found], Found]:
  """Plans runs, and ranks those that fit.

  Args:
    runs: Such as of `candidates`; the batch of each is the most that it gets.
    hbm_bytes: Memory of a GPU.
    is_batch_fixed: Only that batch, in microbatches where it must be; else the
      largest that fits.

  Returns:
    What fits, the fastest first, and the run that needs the least, if that is
    too much with as few sequences as there can be.
  """
  allowed = int(hbm_bytes / (1 + _MARGIN))
  fitting, smallest = [], None
  states = planning.States()
  for run in runs:
    state = states.of(run)
    if is_batch_fixed:
      run = _in_microbatches(run, allowed, state)
    elif fullest(planning.plan(run, state))[1].total > allowed:
      shards = planning.batch_shards(run) * run.accumulate
      most = planning.largest(run, allowed, state)
      run = dataclasses.replace(run, batch=max(shards, most))
    peak = fullest(planning.plan(run, state))[1].total
    found = Found(run, peak, cost(run))
    if peak <= allowed:
      fitting.append(found)
    if smallest is None or peak < smallest.peak_bytes:
      smallest = found
  assert smallest is not None
  return sorted(fitting, key=_rank), smallest


def _rank(found: Found) -> float:
  """What settings are sorted by: cost, and a little for fp8_layer.

  It rounds the residual stream, which the others do not.
  """
  is_rounded = found.run.remat == "fp8_layer"
  return found.cost * (_ROUNDED if is_rounded else 1)


def _in_microbatches(
  run: TrainConfig, allowed: int, state: planning.AbstractState
) -> TrainConfig:
  """Splits a batch into the fewest microbatches that fit, if any do."""
  if run.optimizer_in_backward:
    return run
  sequences = run.batch // planning.batch_shards(run)
  for count in range(run.accumulate, sequences + 1):
    if sequences % count == 0:
      run = dataclasses.replace(run, accumulate=count)
      if fullest(planning.plan(run, state))[1].total <= allowed:
        break
  return run


def command(run: TrainConfig, preset: str, plain: TrainConfig) -> str:
  """Writes the command line that trains a run.

  Args:
    run: The run.
    preset: The name of its preset.
    plain: The preset as it is.
  """
  words = ["python -m train.pretrain", preset]
  for name in _PRINTED:
    value, default = (_value(config, name) for config in (run, plain))
    if value == default:
      continue
    flag = name.replace("_", "-")
    if isinstance(value, bool):
      words.append(f"--{flag}" if value else f"--no-{flag}")
    else:
      words.append(f"--{flag} {value}")
  return " ".join(words)


# Of what a plan depends on, in the order in which it is read.
_PRINTED = (
  "init_from",
  "mesh",
  "batch",
  "accumulate",
  "seq",
  "recipe",
  "attention",
  "attention_compute",
  "params",
  "optimizer_in_backward",
  "optim.clip",
  "remat",
  "weight_cache",
  "grad_reduce",
  "optim.optimizer",
  "optim.eps",
  "optim.codec",
  "optim.group_size",
  "report_state",
)


def _value(config: TrainConfig, name: str):
  value = config
  for word in name.split("."):
    value = getattr(value, word)
  return value


def describe(run: TrainConfig) -> str:
  """Names settings in some words."""
  backward = "in" if run.optimizer_in_backward else "after"
  return (
    f"recipe {run.recipe}, params {run.params}, the optimizer {backward} the "
    f"backward, remat {run.remat}, a batch of {run.batch}"
  )


def report(fitting: list[Found]) -> str:
  """Writes a table: the fastest of each recipe, weights and backward."""
  kinds: dict[tuple, Found] = {}
  for found in fitting:
    run = found.run
    kinds.setdefault((run.recipe, run.params, run.optimizer_in_backward), found)
  rows = []
  for found in list(kinds.values())[:_SHOWN]:
    run = found.run
    rows.append(
      [
        f"{run.recipe}",
        run.params,
        "in backward" if run.optimizer_in_backward else "after",
        run.remat,
        str(run.batch),
        f"{found.peak_bytes / GB:.2f}",
        f"{fitting[0].cost / found.cost:.2f}",
      ]
    )
  header = "recipe", "weights", "optimizer", "remat", "batch", "GB", "speed"
  return format_table(list(header), rows)
