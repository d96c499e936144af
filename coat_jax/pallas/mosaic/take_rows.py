# SPDX-License-Identifier: Apache-2.0
"""Copies rows by index: `ops.take_rows`.

XLA loads a few values at a time, and computes an address for each load. This
kernel copies whole rows through shared memory, with asynchronous copies. Each
program copies `_ROWS` rows. While it writes a row, it already loads the next
rows.

The interpreter does not copy asynchronously, so only a test on a GPU can find a
missing wait.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.ops.dispatch import kernel
from coat_jax.pallas.mosaic import device, rows

_ROWS = 32
_WIDTH = 128  # A row is copied as an array [n / _WIDTH, _WIDTH].
_MAX_SLOTS = 8  # Number of rows that shared memory holds at once.
_MAX_BYTES = 64 * 1024  # Of shared memory.


def _why_not(x, index, **_) -> str | None:
  if x.shape[-1] % _WIDTH or not 0 < _row_bytes(x) <= _MAX_BYTES // 2:
    return (
      f"the Mosaic kernel copies rows of a multiple of {_WIDTH} values and at "
      f"most {_MAX_BYTES // 2} bytes, got {x.dtype}{[*x.shape]}"
    )
  if len(index) < _ROWS:
    return f"the Mosaic kernel copies at least {_ROWS} rows, got {len(index)}"
  return device.why_not_hopper()


def _row_bytes(x) -> int:
  return x.shape[-1] * x.dtype.itemsize


@kernel(_why_not)
@jax.jit(static_argnames="interpret")
def take_rows(x: Array, index: Array, *, interpret: bool = False) -> Array:
  """Computes `ops.take_rows`."""
  m, row = len(index), (x.shape[1] // _WIDTH, _WIDTH)
  slots = min(_MAX_SLOTS, _MAX_BYTES // _row_bytes(x))
  [taken] = rows.run(
    _kernel,
    [x.reshape(-1, *row), index],
    [jax.ShapeDtypeStruct((m, *row), x.dtype)],
    grid=(pl.cdiv(m, _ROWS),),
    scratch_types=[
      plgpu.SMEM((slots, *row), x.dtype),
      plgpu.Barrier(num_barriers=slots),
    ],
    interpret=interpret,
    kernel_name="take_rows",
  )
  return taken.reshape(m, -1)


def _kernel(x_gmem, index_gmem, out_gmem, smem, loaded):
  first = rows.part("last", _ROWS, index_gmem.shape[0]).start
  slots = smem.shape[0]
  writes = slots // 2  # Number of pending writes that may still read `smem`.

  def load(i):
    source = x_gmem.at[index_gmem[first + i]]
    slot = lax.rem(i, jnp.int32(slots))
    plgpu.copy_gmem_to_smem(source, smem.at[slot], loaded.at[slot])

  def copy(i, _):
    slot = lax.rem(i, jnp.int32(slots))
    plgpu.barrier_wait(loaded.at[slot])
    plgpu.copy_smem_to_gmem(smem.at[slot], out_gmem.at[first + i])
    plgpu.wait_smem_to_gmem(writes, wait_read_only=True)
    following = i - writes + slots
    pl.when((i >= writes) & (following < _ROWS))(lambda: load(following))

  lax.fori_loop(jnp.int32(0), slots, lambda i, _: load(i), None)
  lax.fori_loop(jnp.int32(0), _ROWS, copy, None)
  plgpu.wait_smem_to_gmem(0)
