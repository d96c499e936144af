# SPDX-License-Identifier: Apache-2.0
"""Compiles whole training steps of a preset for H200s, without a GPU.

As in `train.pretrain`, a step consists of the forward and backward passes,
clipping and the optimizer's update. The state is donated.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from benchmarks import aot
from train import mesh as meshes
from train import step
from train.config import TrainConfig
from train.presets import PRESETS

_LEAN = dict(recipe="coat", params="bfloat16", optimizer_in_backward=True)
# The options that each variant sets in a run's configuration.
VARIANTS = {
  "bf16": dict(recipe="bf16"),
  "bf16_dots": dict(recipe="bf16", remat="dots"),
  "bf16_full": dict(recipe="bf16", remat="full"),
  "fp8_linear": dict(recipe="fp8_linear"),
  "block": dict(recipe="fp8_block"),
  "coat": dict(recipe="coat", residuals="coat"),
  "minimal": dict(recipe="coat"),
  "minimal_attention": dict(recipe="coat", attention="fp8"),
  "minimal_experts": dict(recipe="coat", experts="fp8"),
  "minimal_full": dict(recipe="coat", remat="full"),
  "minimal_fp8": dict(recipe="coat", remat="fp8"),
  "minimal_fp8_layer": dict(recipe="coat", remat="fp8_layer"),
  "bfloat16": dict(recipe="coat", params="bfloat16"),
  "in_backward": dict(recipe="coat", optimizer_in_backward=True),
  "lean": _LEAN,
  "leanest": _LEAN | dict(remat="fp8"),
  "leanest_lion": _LEAN | dict(remat="fp8", optimizer="coat_lion"),
  "leanest_factored": _LEAN | dict(remat="fp8", second="factored"),
}


def variants_of(preset: str, *, accumulate: int = 1) -> list[str]:
  """Lists a preset's variants that support `accumulate` microbatches."""
  unsupported = set()
  if PRESETS[preset]().model.num_experts is None:
    unsupported.add("experts")
  if accumulate > 1:
    unsupported.add("optimizer_in_backward")
  return [name for name, x in VARIANTS.items() if not unsupported & x.keys()]


def configure(
  preset: str,
  variant: str,
  *,
  batch: int,
  seq: int,
  mesh: str = "",
  **options,
) -> TrainConfig:
  """Builds a preset's configuration with the options of one of `VARIANTS`.

  Moments are f32 if the recipe is bf16 or fp8_linear, and FP8 otherwise.
  `batch` is the number of sequences per device, or per group of devices along
  the mesh axis `tensor`. `options` take precedence over the variant's options.
  They may include `optimizer`, `second` (an option of the codec), and fields of
  `TrainConfig` that no other argument sets.
  """
  config = PRESETS[preset]()
  options = VARIANTS[variant] | options
  optimizer = options.pop("optimizer", config.optim.optimizer)
  of_codec = {k: options.pop(k) for k in ("second",) if k in options}
  codec = "coat" if options["recipe"] in ("coat", "fp8_block") else "float32"
  in_backward = options.get("optimizer_in_backward", False)
  clip = "share" if in_backward else "global"
  parts = meshes.batch_devices(meshes.parse_mesh(mesh))
  return dataclasses.replace(
    config,
    batch=batch * parts,
    seq=seq,
    mesh=mesh,
    optim=config.optim.with_optimizer(
      optimizer, codec=codec, clip=clip, **of_codec
    ),
    report_state=False,
    **options,
  )


def compile_step(
  config: TrainConfig,
) -> tuple[jax.stages.Compiled, step.TrainState]:
  """Compiles a run's step for H200s; also returns the shapes of the state."""
  sizes = config.mesh_sizes
  mesh = None
  if sizes:
    devices = aot.h200_devices(math.prod(sizes.values()))
    mesh = meshes.make_mesh(sizes, devices)
  optimizer = step.build_optimizer(config, mesh)
  state = step.abstract_state(config, optimizer, mesh)
  where = meshes.batch_sharding(mesh) if mesh else None
  tokens = jax.ShapeDtypeStruct(
    (config.batch, config.seq + 1), jnp.int32, sharding=where
  )
  graph = step.build_graph(config)
  train_step = step.train_step(config, graph, optimizer, mesh)
  if mesh is None:
    compiled = aot.compile_for_h200(train_step, state, tokens, donate=(0,))
    return compiled, state
  everywhere = jax.NamedSharding(mesh, jax.P())
  compiled = aot.compile_for_h200(
    train_step,
    state,
    tokens,
    mesh=mesh,
    out_shardings=(step.shardings(state), everywhere),
    donate=(0,),
  )
  return compiled, state
