# SPDX-License-Identifier: Apache-2.0
"""A run of several processes, such as one on each host.

All run the same program and must call the same collective operations in the
same order. What one of them alone knows, that it was sent a signal or cannot
read its data, it tells the others before they act. One of them is_primary: it
prints and writes metrics.

With one process nothing here does anything.
"""

import os

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

_VARIABLES = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join() -> None:
  """Joins the other processes; before anything else is done with JAX.

  Who they are JAX finds out by itself under SLURM and Open MPI. Elsewhere each
  is told by JAX_COORDINATOR_ADDRESS (host and port of process 0),
  JAX_NUM_PROCESSES and JAX_PROCESS_ID.

  Raises:
    ValueError: they are not named, or do not answer.
  """
  try:
    count, index = (
      int(os.environ[name]) if name in os.environ else None
      for name in _VARIABLES
    )
    # JAX's own service would take SIGTERM from `signals`.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(num_processes=count, process_id=index)
  except (RuntimeError, TypeError, ValueError) as error:
    raise ValueError(
      "distributed: the processes must be named by SLURM, by Open MPI or by "
      f"JAX_COORDINATOR_ADDRESS, {' and '.join(_VARIABLES)}, and all be "
      f"started, got {error}; leave out --distributed for one process"
    ) from error


def is_primary() -> bool:
  """Whether this process is the one that prints and writes metrics."""
  return jax.process_index() == 0


def gather(value: int) -> list[int]:
  """The value of each process; all of them must call this."""
  if jax.process_count() == 1:
    return [value]
  return multihost_utils.process_allgather(np.int32(value)).tolist()


def gather_arrays[Tree](tree: Tree) -> Tree:
  """Whole arrays, of which a process may have a part, as NumPy's in each."""
  if jax.process_count() == 1:
    return tree
  return multihost_utils.process_allgather(tree, tiled=True)


def own_rows(sharding: NamedSharding | None, batch: int) -> dict[str, int]:
  """Which sequences of a batch this process reads.

  Args:
    sharding: Of the batch, from `train.mesh.batch_sharding`.
    batch: Sequences of the batch, of all processes.

  Returns:
    `process_index` and `process_count` for `train.data`. Processes that read
    the same sequences, for their devices share them, have the same index.

  Raises:
    ValueError: the parts of processes overlap.
  """
  if sharding is None:
    return dict(process_index=0, process_count=1)
  parts = sharding.addressable_devices_indices_map((batch,)).values()
  bounds = [part.indices(batch) for (part,) in parts]
  first = min(start for start, _, _ in bounds)
  size = max(stop for _, stop, _ in bounds) - first
  # Of the process, then of the next one.
  if first % size or batch % size:
    raise ValueError(
      "mesh: processes must have sequences of their own or share all of them, "
      f"got sequences {first} to {first + size - 1} of {batch} for process "
      f"{jax.process_index()}; let tensor divide the "
      f"{jax.local_device_count()} devices of a process"
    )
  return dict(process_index=first // size, process_count=batch // size)


def to_devices(
  rows: np.ndarray, sharding: NamedSharding | None, batch: int
) -> jax.Array | np.ndarray:
  """Puts a batch on the mesh, each process its rows [rows, ...] of it."""
  if sharding is None:
    return rows
  shape = (batch, *rows.shape[1:])
  return jax.make_array_from_process_local_data(sharding, rows, shape)
