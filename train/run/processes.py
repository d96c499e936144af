# SPDX-License-Identifier: Apache-2.0
"""A run of several processes, such as one on each host.

All run the same program and must call the same collective operations in the
same order. If only one of them knows something, such as a signal or unreadable
data, it tells the others before any process acts on it. The primary process
prints and writes metrics. With one process these functions return at once.
"""

import os

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

_VARIABLES = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Roughly the advertised share of a GPU's memory: 80 of 85.5 GB, 141 of 150.8.
# The rest is for CUDA, cuBLAS and NCCL.
_GPU_SHARE = "0.935"


def reserve_gpu_memory() -> None:
  """Lets JAX take as much GPU memory as `train.plan` assumes.

  Call it before JAX looks for devices. A share set in the environment stays.
  """
  names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
  if not any(name in os.environ for name in names):
    os.environ[names[0]] = _GPU_SHARE


def join() -> None:
  """Joins the other processes; call it before anything else uses JAX.

  Under SLURM and Open MPI JAX finds them by itself. Otherwise the environment
  of each must set JAX_COORDINATOR_ADDRESS (host and port of process 0),
  JAX_NUM_PROCESSES and JAX_PROCESS_ID. If process 0 does not answer within five
  minutes, JAX ends the process.
  """
  try:
    count, index = (
      int(os.environ[name]) if name in os.environ else None
      for name in _VARIABLES
    )
    # JAX's own service would handle SIGTERM instead of `signals`.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(num_processes=count, process_id=index)
  except (RuntimeError, TypeError, ValueError) as error:
    raise ValueError(
      f"distributed: could not find the other processes ({error}); start them "
      "with SLURM or Open MPI, or set JAX_COORDINATOR_ADDRESS, "
      f"{' and '.join(_VARIABLES)}; leave out --distributed for one process"
    ) from error


def is_primary() -> bool:
  """Returns whether this process prints and writes metrics."""
  return jax.process_index() == 0


def gather(value: int) -> list[int]:
  """Returns the values of all processes, which must all call this."""
  if jax.process_count() == 1:
    return [value]
  return multihost_utils.process_allgather(np.int32(value)).tolist()


def gather_arrays[Tree](tree: Tree) -> Tree:
  """Gathers sharded arrays of several processes as whole NumPy arrays."""
  if jax.process_count() == 1:
    return tree
  return multihost_utils.process_allgather(tree, tiled=True)


def own_rows(sharding: NamedSharding | None, batch: int) -> dict[str, int]:
  """Finds the part of a batch that this process reads.

  Processes whose devices share sequences read the same ones.
  """
  if sharding is None:
    return dict(process_index=0, process_count=1)
  shards = sharding.addressable_devices_indices_map((batch,)).values()
  bounds = [shard.indices(batch) for (shard,) in shards]
  first = min(start for start, _, _ in bounds)
  size = max(stop for _, stop, _ in bounds) - first
  # Each process starts where the one before it ends.
  if first % size or batch % size:
    raise ValueError(
      "mesh: processes must have sequences of their own or share all of them, "
      f"got sequences {first} to {first + size - 1} of {batch} for process "
      f"{jax.process_index()}; choose a tensor axis that divides the "
      f"{jax.local_device_count()} devices of a process"
    )
  return dict(process_index=first // size, process_count=batch // size)


def to_devices(
  rows: np.ndarray, sharding: NamedSharding | None, batch: int
) -> jax.Array | np.ndarray:
  """Puts this process's rows of a batch on the mesh."""
  if sharding is None:
    return rows
  shape = (batch, *rows.shape[1:])
  return jax.make_array_from_process_local_data(sharding, rows, shape)
