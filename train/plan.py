# SPDX-License-Identifier: Apache-2.0
"""Says what a run takes on each GPU before there is one.

  python -m train.plan llama2_7b --mesh fsdp=4 --batch 8 --seq 2048
  python -m train.plan llama2_13b --mesh fsdp=8 --hbm 141GB

Options are those of `train.pretrain`. The table has a column for each of the
usual ways to train, with f32 moments where nothing but products is in FP8; GB
are 10^9 bytes. Nothing is compiled and no device is touched. docs/plan.md says
what is counted.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import get_args

import jax
from jax.sharding import AbstractMesh, AxisType

from coat_jax.layers import vocabulary
from coat_jax.plan import (
  DecoderShape,
  Load,
  Memory,
  fullest,
  largest_batch,
  plan_step,
)
from train import mesh as meshes
from train import step
from train.config import ModelConfig, OptimConfig, TrainConfig
from train.presets import PRESETS
from train.run.metrics import format_table

GB = 10**9
COLUMNS = {
  "BF16": dict(recipe="bf16"),
  "FP8 linears": dict(recipe="fp8_linear"),
  "COAT": dict(recipe="coat", residuals="coat"),
  "COAT minimal": dict(recipe="coat"),
}


def shape_of(model: ModelConfig) -> DecoderShape:
  """What of a model its memory depends on."""
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
    config: the run.

  Returns:
    By moment, as `coat_jax.plan.plan_step`.

  Raises:
    ValueError: a device would have part of a group of moments.
  """
  return _plan(config, *_state(config))


def largest(config: TrainConfig, memory_bytes: int) -> int:
  """Finds the most sequences a step for which a run fits its GPUs.

  Args:
    config: the run, of any batch.
    memory_bytes: of a GPU.

  Returns:
    The batch; 0 where nothing fits.
  """
  return _largest(config, _state(config), memory_bytes)


def _largest(config: TrainConfig, state, memory_bytes: int) -> int:
  parts = _parts(config) * config.accumulate

  def peak(batch: int) -> Memory:
    run = dataclasses.replace(config, batch=batch * parts)
    return fullest(_plan(run, *state))[1]

  return parts * largest_batch(peak, memory_bytes)


def _state(config: TrainConfig):
  """Abstract parameters and moments, where they lie on a mesh."""
  mesh = None
  if sizes := config.mesh_sizes:
    mesh = AbstractMesh(
      tuple(sizes.values()),
      tuple(sizes),
      axis_types=(AxisType.Auto,) * len(sizes),
    )
  state = step.abstract_state(config, step.build_optimizer(config), mesh)
  return state.params, (state.optimizer, state.exact)


def _parts(config: TrainConfig) -> int:
  """Among how many devices sequences are split."""
  sizes = config.mesh_sizes
  return sizes.get("data", 1) * sizes.get("fsdp", 1)


def _plan(config: TrainConfig, params, optimizer) -> dict[str, Memory]:
  sizes, model = config.mesh_sizes, config.model
  tensor = sizes.get("tensor", 1)
  batch = config.batch // _parts(config) // config.accumulate
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
    config: the run; its recipe is replaced.
    hbm_bytes: memory of a GPU.

  Returns:
    Lines of text.
  """
  lines: dict[str, list[str]] = {}
  for options in COLUMNS.values():
    run = _variant(config, **options)
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


def _variant(config: TrainConfig, *, recipe: str, **options) -> TrainConfig:
  """The run in another recipe; moments are f32 outside of COAT."""
  if recipe != "coat":
    optim = dataclasses.replace(
      config.optim, codec="float32", rounding="stochastic", group_size=128
    )
    options |= dict(optim=optim, attention="bf16")
  if recipe == "bf16":
    options |= dict(weight_cache="scale")
  return dataclasses.replace(config, recipe=recipe, **options)


def configure(options: argparse.Namespace) -> TrainConfig:
  """The run that the command line describes."""
  preset = PRESETS[options.preset]()
  sizes = meshes.parse_mesh(options.mesh)
  devices = sizes.get("data", 1) * sizes.get("fsdp", 1)
  parts = devices * max(options.accumulate, 1)  # 0 is refused below.
  return dataclasses.replace(
    preset,
    mesh=options.mesh,
    batch=parts if options.batch is None else options.batch,
    seq=preset.seq if options.seq is None else options.seq,
    accumulate=options.accumulate,
    remat=options.remat,
    attention=options.attention,
    weight_cache=options.weight_cache,
    grad_reduce=options.grad_reduce,
    optim=dataclasses.replace(
      preset.optim, codec=options.codec, group_size=options.group_size
    ),
    report_state=False,
  )


def read_bytes(text: str) -> int:
  """Reads 80GB or 74.5GiB."""
  for unit, size in (("GiB", 2**30), ("GB", GB)):
    number = text.removesuffix(unit)
    if number != text and number.replace(".", "", 1).isdigit():
      if float(number) > 0:
        return round(float(number) * size)
  raise argparse.ArgumentTypeError(
    f"memory is written as 80GB or 74.5GiB, got {text!r}"
  )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  """Reads the command line."""
  parser = argparse.ArgumentParser(
    prog="python -m train.plan",
    description="Memory of a training run on each GPU, without one.",
  )
  parser.add_argument("preset", choices=PRESETS)
  parser.add_argument(
    "--mesh", default="", help="as of train.pretrain: data=2,fsdp=4,tensor=1"
  )
  parser.add_argument(
    "--batch", type=int, help="sequences a step, on all GPUs; default 1 on each"
  )
  parser.add_argument("--seq", type=int, help="default: the preset's")
  parser.add_argument("--accumulate", type=int, default=1)
  parser.add_argument("--hbm", type=read_bytes, default="80GB")
  for name in ("remat", "attention", "weight_cache", "grad_reduce"):
    field = next(f for f in dataclasses.fields(TrainConfig) if f.name == name)
    parser.add_argument(
      f"--{name.replace('_', '-')}",
      choices=get_args(field.type),
      default=field.default,
    )
  of_optim = {f.name: f for f in dataclasses.fields(OptimConfig)}
  codecs, group_size = of_optim["codec"], of_optim["group_size"]
  parser.add_argument(
    "--codec", choices=get_args(codecs.type), default=codecs.default
  )
  parser.add_argument("--group-size", type=int, default=group_size.default)
  return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit status."""
  options = parse(arguments)
  # Nothing is computed, and a GPU that is in use is left alone.
  jax.config.update("jax_platforms", "cpu")
  try:
    config = configure(options)
    text = table(config, options.hbm)
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
