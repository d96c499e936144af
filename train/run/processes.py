# SPDX-License-Identifier: Apache-2.0
"""Coordinates the processes of a run, for example one process on each host.

All processes must call the same collective operations in the same order. If one
process receives a signal or cannot read its data, it tells the other processes
before any process reacts.
"""

import os

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

_VARIABLES = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Roughly the advertised memory of a GPU divided by its physical memory: 80 GB
# of 85.5 GB, 141 GB of 150.8 GB. CUDA, cuBLAS and NCCL use the rest.
_GPU_SHARE = "0.935"


def reserve_gpu_memory() -> None:
  """Raises JAX's default share of GPU memory; call this before using JAX."""
  names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
  if not any(name in os.environ for name in names):
    os.environ[names[0]] = _GPU_SHARE


def join() -> None:
  """Joins the other processes of a run; call this before using JAX.

  JAX finds the other processes itself under SLURM and Open MPI, or through
  environment variables. If process 0 does not answer within five minutes, JAX
  ends this process.
  """
  try:
    count, index = (
      int(os.environ[name]) if name in os.environ else None
      for name in _VARIABLES
    )
    # With this service, JAX would take over SIGTERM, which `signals` handles.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(num_processes=count, process_id=index)
  except (RuntimeError, TypeError, ValueError) as error:
    raise ValueError(
      f"distributed: could not find the other processes ({error}); start them "
      "with SLURM or Open MPI, or set JAX_COORDINATOR_ADDRESS, "
      f"{' and '.join(_VARIABLES)}; to run a single process, leave out "
      "--distributed"
    ) from error


def is_primary() -> bool:
  """Returns whether this process prints and writes metrics."""
  return jax.process_index() == 0


def gather(value: int) -> list[int]:
  """Returns the values of all processes; every process must call this."""
  if jax.process_count() == 1:
    return [value]
  return multihost_utils.process_allgather(np.int32(value)).tolist()


def gather_arrays[Tree](tree: Tree) -> Tree:
  """Gathers arrays as whole NumPy arrays if several processes hold parts."""
  if jax.process_count() == 1:
    return tree
  return multihost_utils.process_allgather(tree, tiled=True)


def own_rows(sharding: NamedSharding | None, batch: int) -> dict[str, int]:
  """Finds the part of a batch that this process reads.

  Processes whose devices work on the same sequences read the same part. Returns
  `process_index` and `process_count` for `train_batches`.
  """
  if sharding is None:
    return dict(process_index=0, process_count=1)
  shards = sharding.addressable_devices_indices_map((batch,)).values()
  bounds = [shard.indices(batch) for (shard,) in shards]
  first = min(start for start, _, _ in bounds)
  size = max(stop for _, stop, _ in bounds) - first
  # All parts must have the same size and start at multiples of it.
  if first % size or batch % size:
    raise ValueError(
      "mesh: any two processes must read either the same sequences or disjoint "
      f"ones, got sequences {first} to {first + size - 1} of {batch} for "
      f"process {jax.process_index()}; choose a tensor axis whose size divides "
      f"the number of devices per process ({jax.local_device_count()})"
    )
  return dict(process_index=first // size, process_count=batch // size)


def to_devices(
  rows: np.ndarray, sharding: NamedSharding | None, batch: int
) -> jax.Array | np.ndarray:
  """Joins the rows of all processes into one global array.

  Returns `rows` unchanged if `sharding` is None.
  """
  if sharding is None:
    return rows
  shape = (batch, *rows.shape[1:])
  return jax.make_array_from_process_local_data(sharding, rows, shape)
