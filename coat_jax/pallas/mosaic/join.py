# SPDX-License-Identifier: Apache-2.0
"""Concatenates columns gathered from several devices: `ops.join_columns`.

Each device holds k values of every column; the result [f, P k] concatenates the
devices' parts [P, f, k]. XLA's own transpose moves single codes and takes twice
as long.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.ops.dispatch import kernel
from coat_jax.pallas import supported
from coat_jax.pallas.mosaic import row_ptx, rows

_WIDTH = 64  # Codes that a program copies of each of 128 columns.


def _why_not(parts, **_) -> str | None:
  if parts.dtype.itemsize != 1:
    return f"the kernel of Mosaic copies FP8 codes, got {parts.dtype}"
  fits = parts.ndim == 3 and parts.shape[1] >= row_ptx.COLUMNS
  if not fits or parts.shape[2] % 16 or parts.shape[2] < _WIDTH:
    return (
      f"the kernel of Mosaic needs [P, f, k] with f >= {row_ptx.COLUMNS} and k "
      f">= {_WIDTH} a multiple of 16, got {parts.shape}"
    )
  return supported.why_not_shape(parts.shape)


@kernel(_why_not)
@jax.jit(static_argnames="interpret")
def join_columns(parts: Array, *, interpret: bool = False) -> Array:
  """`ops.join_columns`."""
  count, f, k = parts.shape
  [joined] = rows.run(
    _kernel,
    [parts],
    [jax.ShapeDtypeStruct((f, count * k), parts.dtype)],
    grid=(pl.cdiv(f, row_ptx.COLUMNS), count * pl.cdiv(k, _WIDTH)),
    interpret=interpret,
    name="join_columns",
  )
  return joined


def _kernel(parts_gmem, joined_gmem):
  _, f, k = parts_gmem.shape
  number = lax.axis_index("last")
  across = jnp.int32(pl.cdiv(k, _WIDTH))
  device, place = lax.div(number, across), lax.rem(number, across)
  column = rows.part("across", row_ptx.COLUMNS, f)
  row = rows.part_at(place, _WIDTH, k)
  codes = plgpu.load(
    parts_gmem.at[device, column, row],
    layout=row_ptx.columns_layout(_WIDTH),
    optimized=False,
  )
  to = pl.ds(device * k + row.start, _WIDTH)
  rows.store(joined_gmem.at[column, to], codes)
