# SPDX-License-Identifier: Apache-2.0
"""Compiles optimizer steps for TPUs on a machine without a TPU.

  make .venv/libtpu/.installed
  export PYTHONPATH=.:.venv/libtpu JAX_PLATFORMS=cpu
  python -m benchmarks.tpu --topology v5p:4x4x4 --mesh fsdp=64

The first command installs libtpu, XLA's compiler for TPUs.

The last command prints a JSON row, `tpu.optimizer`, for each of three variants:
`optax.adamw` (optax), `coat_adamw` (coat) and `fused_coat_adamw` (fused). A row
describes a step on all parameters of a preset, in f32. All bytes in a row are
per device. `state_bytes` is the size of the optimizer's state, and `peak_bytes`
is the peak memory including arguments.
"""

import argparse
import collections
import functools
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks import arguments as args
from benchmarks.aot import lower_for
from benchmarks.harness import emit, say
from benchmarks.memory import abstract_params
from coat_jax import coat_adamw
from coat_jax.models.config import ModelConfig
from coat_jax.models.params import param_shardings
from coat_jax.optimizer import fused_coat_adamw, sharding
from train import mesh as meshes
from train.presets import PRESETS

OPTIMIZERS = ("optax", "coat", "fused")


@functools.cache
def devices(topology: str) -> list[jax.Device]:
  """Returns the devices of a TPU topology, such as v6e:2x2, to compile for."""
  # Otherwise libtpu asks a server which TPU this machine has.
  os.environ["TPU_SKIP_MDS_QUERY"] = "1"
  found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
  return list(found.devices)


def compile_for_tpu(
  topology: str,
  fn: Callable,
  *specs,
  mesh: Mesh | None = None,
  out_shardings: Any = None,
  donate: tuple[int, ...] = (),
) -> jax.stages.Compiled:
  """Compiles `fn` for one device of a topology or for a mesh of its devices.

  The arguments after `topology` are explained in `aot.compile_for`.
  """
  device = devices(topology)[0]
  described: Any = Mesh([device], ("device",)).abstract_mesh.abstract_device
  lowered = lower_for(
    device,
    described,
    fn,
    *specs,
    mesh=mesh,
    out_shardings=out_shardings,
    donate=donate,
  )
  return lowered.compile()


def products(program: str) -> dict[str, int]:
  """Counts a compiled program's matmuls by the dtypes of their operands."""
  dtypes = dict(re.findall(r"%([\w.-]+) = (\w+)\[", program))
  found = re.findall(r" (?:convolution|dot)\(([^)]*)\)", program)
  counts = collections.Counter(
    " * ".join(sorted(dtypes[x] for x in re.findall(r"%([\w.-]+)", operands)))
    for operands in found
  )
  return dict(sorted(counts.items()))


def compile_optimizer(
  topology: str, config: ModelConfig, mesh_sizes: dict[str, int], name: str
) -> tuple[jax.stages.Compiled, int]:
  """Compiles a step of the optimizer `name` for f32 parameters on a mesh.

  Returns the program, and the bytes of the optimizer's state per device.
  """
  mesh = meshes.make_mesh(mesh_sizes, devices(topology))
  assert mesh is not None
  params = abstract_params(config, jnp.float32)
  where = param_shardings(mesh, params)
  optimizer: Any = {
    "optax": optax.adamw,
    "coat": functools.partial(coat_adamw, shardings=where),
    "fused": functools.partial(fused_coat_adamw, shardings=where),
  }[name](1e-3)
  params, state = sharding.abstract_state(
    lambda p: (p, optimizer.init(p)), params, where
  )

  def update(params, grads, state):
    if name == "fused":
      return optimizer.apply(grads, state, params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  places = jax.tree.map(lambda x: x.sharding, (params, state))
  program = compile_for_tpu(
    topology,
    update,
    params,
    params,
    state,
    mesh=mesh,
    out_shardings=places,
    donate=(0, 2),
  )
  return program, sum(map(bytes_on_a_device, jax.tree.leaves(state)))


def bytes_on_a_device(x: jax.ShapeDtypeStruct) -> int:
  """Returns the size in bytes of an array's shard on one device."""
  shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
  return math.prod(shape) * x.dtype.itemsize


@args.command
def main(arguments: list[str] | None = None) -> list[dict]:
  """Runs the command; returns the printed rows."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--preset", choices=PRESETS, default="llama2_7b")
  add("--topology", default="v5p:4x4x4", help="such as v6e:2x2")
  add("--mesh", default="fsdp=64", help="mesh axes, as in train.pretrain")
  add("--variants", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
  options = parser.parse_args(arguments)
  with args.checked(parser):
    sizes = meshes.parse_mesh(options.mesh)
  config = PRESETS[options.preset]().model
  case = {x: getattr(options, x) for x in ("preset", "topology", "mesh")}
  rows = []
  for variant in options.variants:
    say(f"{options.preset} for {options.topology}: {variant}")
    program, state = compile_optimizer(options.topology, config, sizes, variant)
    memory: Any = program.memory_analysis()
    rows.append(
      emit(
        "tpu.optimizer",
        case | {"variant": variant},
        state_bytes=state,
        peak_bytes=memory.peak_memory_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
      )
    )
  return rows


if __name__ == "__main__":
  main()
