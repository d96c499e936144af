# SPDX-License-Identifier: Apache-2.0
"""Compiles for NVIDIA GPUs on a machine without a GPU (ahead of time).

XLA's compiler for CUDA comes in two wheels, jax-cuda13-plugin and
jax-cuda13-pjrt, which `make test-aot` installs. The compiler needs neither
CUDA's libraries nor its driver. Each file in `gpus/` describes one GPU to the
compiler.

The compiled programs show which kernels and FP8 matmuls a step runs, and how
much memory it needs. On a real GPU, only the algorithms that XLA's autotuning
chooses may differ.
"""

import atexit
import dataclasses
import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import (
  AbstractDevice,
  AbstractMesh,
  Mesh,
  SingleDeviceSharding,
)

_DESCRIPTIONS = Path(__file__).parent / "gpus"
GPUS = tuple(sorted(path.stem for path in _DESCRIPTIONS.glob("*.txtpb")))
CUDNN_VERSION = 91000  # The cuDNN version in the files of `gpus/`.


@dataclasses.dataclass(frozen=True, repr=False)
class _Described(AbstractDevice):
  """An `AbstractDevice` with a compute capability.

  If the capability is missing, Mosaic assumes 9.0.
  """

  compute_capability: str


class CompilerMissing(RuntimeError):
  """Raised if XLA's compiler for CUDA is not installed."""


def available() -> bool:
  """Returns whether the compiler for CUDA is installed."""
  return importlib.util.find_spec("jax_cuda13_plugin") is not None


def only_compile() -> None:
  """Restricts JAX to the CPU in this process; call this before using JAX."""
  # Otherwise the plugin looks for libraries that are needed only to run code.
  os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  jax.config.update("jax_platforms", "cpu")


def devices(gpu: str, count: int) -> list[jax.Device]:
  """Returns `count` GPUs of one host to compile for; `gpu` is one of `GPUS`."""
  if not available():
    raise CompilerMissing(
      "devices: needs XLA's compiler for CUDA, but the module "
      "jax_cuda13_plugin is not installed; run `make test-aot`, which installs "
      "it into .venv/compiler, and set PYTHONPATH=.venv/compiler"
    )
  return _host(gpu, count)


h200_devices = functools.partial(devices, "h200")


def compile_for(
  gpu: str,
  fn: Callable,
  *specs,
  mesh: Mesh | None = None,
  out_shardings=None,
  donate: tuple[int, ...] = (),
  options: dict[str, bool | int | str] | None = None,
) -> jax.stages.Compiled:
  """Compiles `fn` for one GPU, or for a mesh of GPUs that `devices` returned.

  `specs` are trees of arrays or `jax.ShapeDtypeStruct`s. With a mesh, each
  struct must have a sharding. Without a mesh, `out_shardings` is ignored.
  `donate` lists the positions of donated specs. `options` are XLA's options.
  """
  [device] = devices(gpu, 1)
  lowered = lower_for(
    device,
    _Described(
      device.device_kind,
      device.core_count,  # pyright: ignore[reportAttributeAccessIssue]
      device.platform,
      device.compute_capability,  # pyright: ignore[reportAttributeAccessIssue]
    ),
    fn,
    *specs,
    mesh=mesh,
    out_shardings=out_shardings,
    donate=donate,
  )
  kept = {"xla_gpu_kernel_cache_file": str(kernels(gpu))}
  return lowered.compile(compiler_options=kept | (options or {}))


compile_for_h200 = functools.partial(compile_for, "h200")


def lower_for(
  device: jax.Device,
  described: AbstractDevice,
  fn: Callable,
  *specs,
  mesh: Mesh | None,
  out_shardings: Any,
  donate: tuple[int, ...],
) -> jax.stages.Lowered:
  """Lowers `fn` for `device`, or for `mesh` if it is not None.

  Without a mesh, traced code that asks for the current device gets `described`.
  """
  if mesh is None:
    out_shardings = sharding = SingleDeviceSharding(device)
    specs = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), specs
    )
    # Without this context, traced code gets the default backend's device.
    abstract = AbstractMesh((), (), abstract_device=described)
    context = jax.sharding.use_abstract_mesh(abstract)
  else:
    context = jax.set_mesh(mesh)
  with context:
    jitted = jax.jit(fn, donate_argnums=donate, out_shardings=out_shardings)
    return jitted.trace(*specs).lower()


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the temporary bytes per device, excluding arguments and results."""
  return compiled.memory_analysis().temp_size_in_bytes


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the peak bytes per device, including arguments."""
  return compiled.memory_analysis().peak_memory_in_bytes


@functools.cache
def kernels(gpu: str) -> Path:
  """Returns the file in which XLA caches this process's kernels for a GPU.

  XLA rewrites the file after each compilation, so processes must not share it.
  """
  folder = tempfile.mkdtemp(prefix="kernels.")
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  return Path(folder, "kernels")


@functools.cache
def _host(gpu: str, count: int) -> list[jax.Device]:
  _assume_cudnn()
  topology = topologies.get_topology_desc(
    platform="cuda",
    target_config=(_DESCRIPTIONS / f"{gpu}.txtpb").read_text(),
    topology=f"1x1x{count}",
  )
  return list(topology.devices)


def _assume_cudnn() -> None:
  """Makes JAX assume `CUDNN_VERSION`, since cuDNN may not be installed."""
  from jax._src.cudnn import fused_attention_stablehlo

  fused_attention_stablehlo.check_cudnn_version = lambda: CUDNN_VERSION
