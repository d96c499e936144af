# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of a run on each GPU, before there is one.

  python -m train.plan llama2_7b --mesh fsdp=4 --batch 8 --seq 2048
  python -m train.plan llama2_13b --mesh fsdp=8 --hbm 141GB

Options are as of `train.pretrain`. The table has a column for each of the usual
ways to train, with f32 moments where at most products are in FP8; GB are 10^9
bytes. Nothing is compiled and no device is used. docs/plan.md says what is
counted.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence

import jax
import tyro
from jax.sharding import AbstractMesh, AxisType

from coat_jax.layers import vocabulary
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.ranges import Count, Width, check_numbers
from coat_jax.plan import (
  DecoderShape,
  Load,
  Memory,
  fullest,
  largest_batch,
  plan_step,
)
from coat_jax.recipe import GradDtype, Kept, Residuals, WeightCache
from train import mesh as meshes
from train import step
from train.config import TrainConfig
from train.optim_config import Codec, OptimConfig
from train.presets import PRESETS
from train.run.metrics import format_table

GB = 10**9
_LARGEST_HBM = 10**6
COLUMNS: dict[str, Callable[[TrainConfig], TrainConfig]] = {
  "BF16": lambda run: run.with_f32_moments("bf16"),
  "FP8 linears": lambda run: run.with_f32_moments("fp8_linear"),
  "COAT": lambda run: _coat(run, "coat"),
  "COAT minimal": lambda run: _coat(run, "minimal"),
}
_Preset = tyro.extras.literal_type_from_choices(PRESETS)


def _coat(config: TrainConfig, residuals: Residuals) -> TrainConfig:
  return dataclasses.replace(config, recipe="coat", residuals=residuals)


def shape_of(model: ModelConfig) -> DecoderShape:
  """Returns the sizes of a model that its memory depends on."""
  return DecoderShape(
    num_layers=model.num_layers,
    d_model=model.d_model,
    d_ff=model.d_ff,
    num_heads=model.num_heads,
    num_kv_heads=model.num_kv_heads,
    vocab_size=model.vocab_size,
    is_layer_norm=model.choices.norm == "layer",
    norm_has_scale=model.choices.norm_has_scale,
  )


def plan(config: TrainConfig) -> dict[str, Memory]:
  """Plans a run's memory on one of its GPUs.

  Args:
    config: The run.

  Returns:
    By moment of a step, as `coat_jax.plan.plan_step`.

  Raises:
    ValueError: a device would have a part of a group of moments.
  """
  return _plan(config, *_state(config))


def largest(config: TrainConfig, memory_bytes: int) -> int:
  """Finds the most sequences a step for which a run fits its GPUs.

  Args:
    config: The run, of any batch.
    memory_bytes: Memory of a GPU.

  Returns:
    The batch; 0 where nothing fits.
  """
  return _largest(config, _state(config), memory_bytes)


def _largest(config: TrainConfig, state, memory_bytes: int) -> int:
  shards = _batch_shards(config) * config.accumulate

  def peak(batch: int) -> Memory:
    run = dataclasses.replace(config, batch=batch * shards)
    return fullest(_plan(run, *state))[1]

  return shards * largest_batch(peak, memory_bytes)


def _state(config: TrainConfig):
  """Builds abstract parameters and moments, with shardings on a mesh."""
  mesh = None
  if sizes := config.mesh_sizes:
    mesh = AbstractMesh(
      tuple(sizes.values()),
      tuple(sizes),
      axis_types=(AxisType.Auto,) * len(sizes),
    )
  state = step.abstract_state(config, step.build_optimizer(config), mesh)
  return state.params, (state.optimizer, state.exact)


def _batch_shards(config: TrainConfig) -> int:
  """Counts the devices that sequences are split over."""
  sizes = config.mesh_sizes
  return sizes.get("data", 1) * sizes.get("fsdp", 1)


def _plan(config: TrainConfig, params, optimizer) -> dict[str, Memory]:
  sizes, model = config.mesh_sizes, config.model
  tensor = sizes.get("tensor", 1)
  batch = config.batch // _batch_shards(config) // config.accumulate
  load = Load(
    batch=batch,
    seq=config.seq,
    fsdp=sizes.get("fsdp", 1),
    tensor=tensor,
    is_on_mesh=math.prod(sizes.values()) > 1,
    accumulate=config.accumulate,
    loss_positions=vocabulary.loss_positions(
      batch, config.seq, model.vocab_size // tensor
    ),
    remat=config.remat,
  )
  return plan_step(
    shape_of(model),
    config.coat_recipe(),
    load,
    params=params,
    optimizer_state=optimizer,
  )


def table(config: TrainConfig, hbm_bytes: int) -> str:
  """Writes the plan of a run, a column for each of `COLUMNS`.

  Args:
    config: The run; each column replaces its recipe.
    hbm_bytes: Memory of a GPU.

  Returns:
    Lines of text.
  """
  lines: dict[str, list[str]] = {}
  for column in COLUMNS.values():
    run = column(config)
    state = _state(run)
    moment, memory = fullest(_plan(run, *state))
    for part, count in memory._asdict().items():
      lines.setdefault(part, []).append(f"{count / GB:.2f}")
    most = _largest(run, state, hbm_bytes)
    lines.setdefault("peak", []).append(f"{memory.total / GB:.2f}")
    lines.setdefault("it is in the", []).append(moment)
    fits = "yes" if memory.total <= hbm_bytes else "no"
    lines.setdefault(f"fits {hbm_bytes / GB:g} GB", []).append(fits)
    lines.setdefault("largest batch", []).append(str(most) if most else "none")
  rows = [[name, *cells] for name, cells in lines.items()]
  return format_table(["GB on each GPU", *COLUMNS], rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
  """Memory of a training run on each GPU, without one.

  Attributes:
    preset: The run, with its recipe replaced by each of the columns.
    hbm: Memory of a GPU, as 80GB or 74.5GiB.
    mesh: As of train.pretrain: data=2,fsdp=4,tensor=1.
    batch: Sequences a step, on all GPUs; default 1 on each.
    seq: Tokens a sequence; default the preset's.
    accumulate: As of train.pretrain.
    remat: As of train.pretrain.
    attention: As of train.pretrain.
    weight_cache: As of train.pretrain.
    grad_reduce: As of train.pretrain.
    codec: As --optim.codec of train.pretrain, in the columns of COAT.
    group_size: As --optim.group-size of train.pretrain.
  """

  preset: tyro.conf.Positional[_Preset]  # pyright: ignore
  hbm: str = "80GB"
  mesh: str = ""
  batch: Count | None = None
  seq: Count | None = None
  accumulate: Count = TrainConfig.accumulate
  remat: Remat = TrainConfig.remat
  attention: Kept = TrainConfig.attention
  weight_cache: WeightCache = TrainConfig.weight_cache
  grad_reduce: GradDtype = TrainConfig.grad_reduce
  codec: Codec = OptimConfig.codec
  group_size: Width = OptimConfig.group_size

  def run(self) -> TrainConfig:
    """Builds the configuration of the run.

    Raises:
      ValueError: `train.pretrain` would refuse it.
    """
    check_numbers(self)
    preset = PRESETS[self.preset]()
    sizes = meshes.parse_mesh(self.mesh)
    devices = sizes.get("data", 1) * sizes.get("fsdp", 1)
    one_each = devices * self.accumulate
    return dataclasses.replace(
      preset,
      mesh=self.mesh,
      batch=one_each if self.batch is None else self.batch,
      seq=preset.seq if self.seq is None else self.seq,
      accumulate=self.accumulate,
      remat=self.remat,
      attention=self.attention,
      weight_cache=self.weight_cache,
      grad_reduce=self.grad_reduce,
      optim=dataclasses.replace(
        preset.optim, codec=self.codec, group_size=self.group_size
      ),
      report_state=False,
    )


def read_bytes(text: str) -> int:
  """Reads 80GB or 74.5GiB.

  Raises:
    ValueError: it is written in another way, is 0 or absurd.
  """
  for unit, size in (("GiB", 2**30), ("GB", GB)):
    number = text.removesuffix(unit)
    if number != text and number.replace(".", "", 1).isdigit():
      if 0 < float(number) <= _LARGEST_HBM:
        return round(float(number) * size)
  raise ValueError(
    "hbm: memory is written as 80GB or 74.5GiB, above 0 and at most "
    f"{_LARGEST_HBM}GB, got {text[:40]!r}"
  )


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit status."""
  options = tyro.cli(PlanConfig, args=arguments, prog="python -m train.plan")
  # Nothing is computed, and a GPU that is in use is left alone.
  jax.config.update("jax_platforms", "cpu")
  try:
    config = options.run()
    text = table(config, read_bytes(options.hbm))
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  gpus = math.prod(config.mesh_sizes.values())
  print(
    f"{options.preset}, {gpus} GPU{'s' * (gpus > 1)}, a step of {config.batch} "
    f"sequences of {config.seq}\n{text}"
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
