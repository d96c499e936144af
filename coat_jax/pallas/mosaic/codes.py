# SPDX-License-Identifier: Apache-2.0
"""Concatenates and transposes FP8 codes: `ops.join_columns`, `ops.turn_codes`.

XLA moves one code at a time, which takes at least 1.6 times as long.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.ops.dispatch import kernel
from coat_jax.pallas import supported
from coat_jax.pallas.mosaic import row_ptx, rows, tiles

# A program of `join_columns` copies a block of [128, _WIDTH] codes.
_WIDTH = 64


def _why_not_codes(x) -> str | None:
  if x.dtype.itemsize != 1:
    return f"the Mosaic kernel moves FP8 codes, got {x.dtype}"
  return supported.why_not_shape(x.shape)


def _part_of_matrix(size: int, count: int):
  """Returns this program's matrix (an index) and `size` of its `count` rows.

  In `join_columns`, a matrix is transposed: its rows are along the last axis.
  """
  number, parts = lax.axis_index("last"), jnp.int32(pl.cdiv(count, size))
  part = rows.part_at(lax.rem(number, parts), size, count)
  return lax.div(number, parts), part


# --- Concatenate -------------------------------------------------------------


def _why_not_join(parts, **_) -> str | None:
  fits = parts.ndim == 3 and parts.shape[1] >= row_ptx.COLUMNS
  if not fits or parts.shape[2] % 16 or parts.shape[2] < _WIDTH:
    return (
      f"the Mosaic kernel needs [P, f, k] with f >= {row_ptx.COLUMNS}, k >= "
      f"{_WIDTH} and k a multiple of 16, got {parts.shape}"
    )
  return _why_not_codes(parts)


@kernel(_why_not_join)
@jax.jit(static_argnames="interpret")
def join_columns(parts: Array, *, interpret: bool = False) -> Array:
  """Computes `ops.join_columns`."""
  count, f, k = parts.shape
  [joined] = rows.run(
    _join_kernel,
    [parts],
    [jax.ShapeDtypeStruct((f, count * k), parts.dtype)],
    grid=(pl.cdiv(f, row_ptx.COLUMNS), count * pl.cdiv(k, _WIDTH)),
    interpret=interpret,
    kernel_name="join_columns",
  )
  return joined


def _join_kernel(parts_gmem, joined_gmem):
  _, f, k = parts_gmem.shape
  device, row = _part_of_matrix(_WIDTH, k)
  column = rows.part("across", row_ptx.COLUMNS, f)
  codes = plgpu.load(
    parts_gmem.at[device, column, row],
    layout=row_ptx.columns_layout(_WIDTH),
    optimized=False,
  )
  to = pl.ds(device * k + row.start, _WIDTH)
  rows.store(joined_gmem.at[column, to], codes)


# --- Transpose ---------------------------------------------------------------


def _why_not_turn(codes, **_) -> str | None:
  return (
    _why_not_codes(codes)
    or supported.why_not_columns(codes.shape[-2:], "columns")
    or tiles.why_not(codes.shape[-2:])
  )


@kernel(_why_not_turn)
@jax.jit(static_argnames="interpret")
def turn_codes(codes: Array, *, interpret: bool = False) -> Array:
  """Computes `ops.turn_codes`."""
  *leading, m, n = codes.shape
  matrices = codes.reshape(-1, m, n)
  height = tiles.pick_height(m)
  across, down = tiles.grid(m, n, height)
  [turned] = rows.run(
    lambda *refs: _turn_kernel(*refs, height=height, interpret=interpret),
    [matrices],
    [jax.ShapeDtypeStruct((len(matrices), n, m), codes.dtype)],
    grid=(across, len(matrices) * down),
    scratch_types=[row_ptx.scratch(height)],
    interpret=interpret,
    kernel_name="turn_codes",
  )
  return turned.reshape(*leading, n, m)


def _turn_kernel(codes_gmem, turned_gmem, smem, *, height, interpret):
  _, m, n = codes_gmem.shape
  matrix, row = _part_of_matrix(height, m)
  column = rows.part("across", row_ptx.COLUMNS, n)
  codes = plgpu.load(
    codes_gmem.at[matrix, row, column],
    layout=row_ptx.TILE_LAYOUT,
    optimized=False,
  )
  tiles.store_operand(
    (row, column), codes, None, turned_gmem.at[matrix], smem, interpret
  )
