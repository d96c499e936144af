# SPDX-License-Identifier: Apache-2.0
"""Loads, quantizes, transposes and stores tiles [64, 128] or [32, 128].

In every 32 rows of a tile, a lane holds 4 adjacent rows of 8 columns, because
four FP8 codes of a column fill a register. Codes are transposed with byte
permutes and through shared memory, and written 16 bytes at a time.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.numerics.scaling import Layout
from coat_jax.pallas.mosaic import row_ptx, rows, turns
from coat_jax.pallas.mosaic.row_ptx import COLUMNS

MAX_ACROSS = 65535  # The largest size of a grid's axes, except the last.
LOW, HIGH = 32, 64  # Tile heights.


def why_not(shape: tuple[int, ...]) -> str | None:
  """Returns why a matrix of this shape cannot be cut into tiles, or None."""
  n = shape[-1]
  m = math.prod(shape[:-1])
  if n > COLUMNS * MAX_ACROSS:
    return (
      f"the Mosaic kernel supports at most {COLUMNS * MAX_ACROSS} columns, "
      f"got {n}"
    )
  if m < LOW or n < COLUMNS:
    return (
      f"the Mosaic kernel needs a matrix of at least {LOW} x {COLUMNS}, got "
      f"[{m}, {n}]"
    )
  return None


def pick_height(m: int) -> int:
  """Picks HIGH if possible, so that longer pieces of columns are stored."""
  return HIGH if m >= HIGH else LOW


def grid(m: int, n: int, height: int) -> tuple[int, int]:
  """Returns a grid in which consecutive programs go down the rows."""
  return pl.cdiv(n, COLUMNS), pl.cdiv(m, height)


def operand(
  m: int, n: int, dtype: DTypeLike, layout: Layout
) -> list[jax.ShapeDtypeStruct | None]:
  """Returns the types of an operand's row and column layouts.

  The row layout is [m, n], and the column layout is its transpose [n, m]. A
  layout that the kernel does not write is None.
  """
  return [
    None if layout == "columns" else jax.ShapeDtypeStruct((m, n), dtype),
    None if layout == "rows" else jax.ShapeDtypeStruct((n, m), dtype),
  ]


def like(rows: Array | None, x: Array) -> Array | None:
  """Reshapes a matrix to the shape of x; None stays None."""
  return None if rows is None else rows.reshape(x.shape)


def place_of(
  shape: tuple[int, int], height: int, index: tuple | None = None
) -> tuple[pl.Slice, pl.Slice]:
  """Returns the rows and the columns of a tile of a matrix.

  `index` is the tile's index in `grid`, by default this program's.
  """
  across, last = index or map(lax.axis_index, ("across", "last"))
  m, n = shape
  return rows.part_at(last, height, m), rows.part_at(across, COLUMNS, n)


def load(ref) -> Array:
  """Loads a tile as f32."""
  x = plgpu.load(ref, layout=row_ptx.TILE_LAYOUT, optimized=False)
  return x.astype(jnp.float32)


def load_quantized(q_gmem, scale_gmem, place, interpret: bool) -> Array:
  """Loads and dequantizes a tile; refs are [m, n] and [m, groups]."""
  size = q_gmem.shape[1] // scale_gmem.shape[1]
  row, column = place
  group = lax.div(column.start, jnp.int32(size))
  if size == COLUMNS:  # Mosaic supports no axis of size 1.
    scale = load_per_row(scale_gmem.at[:, group], place)
    return load(q_gmem.at[place]) * scale
  scale = plgpu.load(
    scale_gmem.at[row, pl.ds(group, COLUMNS // size)],
    layout=row_ptx.scales_layout(size),
    optimized=False,
  ).astype(jnp.float32)
  if interpret:
    scale = jnp.repeat(scale, size, axis=1)
  else:
    scale = row_ptx.spread_scales(scale, size)
  return load(q_gmem.at[place]) * scale


def load_per_row(ref, place) -> Array:
  """Loads one value per row and broadcasts it along the row, in f32."""
  return _load_along(ref, place, 0)


def load_per_column(ref, place) -> Array:
  """Loads one value per column and broadcasts it along the column, in f32."""
  return _load_along(ref, place, 1)


def _load_along(ref, place, axis: int) -> Array:
  layout = row_ptx.TILE_LAYOUT.reduce(1 - axis)
  x = plgpu.load(ref.at[place[axis]], layout=layout, optimized=False)
  shape = place[0].size, place[1].size
  return lax.broadcast_in_dim(x.astype(jnp.float32), shape, (axis,))


def quantize(
  x: Array, scale: Array, dtype: DTypeLike, interpret: bool
) -> Array:
  """Quantizes a tile with one scale, like `rows.quantize`."""
  return rows.quantize(x, scale, dtype, row_ptx.TILE_LAYOUT, interpret)


def put(codes: Array, smem, height: int, first: int, interpret: bool) -> None:
  """Writes rows of a tile, from row `first` on, to shared memory for `take`.

  `smem` is of the type that `row_ptx.scratch(height)` returns.
  """
  if not interpret:
    return row_ptx.put(codes, smem, height, first)
  words = lax.bitcast_convert_type(codes.reshape(-1, 4), jnp.int32)
  smem[pl.ds(first * COLUMNS // 4, words.size)] = words
  return None


def take(smem, height: int, dtype: DTypeLike, interpret: bool) -> Array:
  """Waits until all rows of a tile are `put`; returns the tile's transpose.

  Before the next `put` to the same `smem`, the kernel needs a `rows.barrier`.
  """
  if not interpret:
    return row_ptx.take(smem, height, dtype)
  words = smem[pl.ds(0, height * COLUMNS // 4)]
  return lax.bitcast_convert_type(words, dtype).reshape(height, COLUMNS).T


def store_operand(
  place, codes: Array, rows_gmem, columns_gmem, smem, interpret: bool
) -> None:
  """Writes a tile of codes to each layout whose ref is not None."""
  row, column = place
  if rows_gmem is not None:
    rows.store(rows_gmem.at[row, column], codes)
  if columns_gmem is not None:
    put(codes, smem, len(codes), 0, interpret)
    columns = take(smem, len(codes), codes.dtype, interpret)
    rows.store(columns_gmem.at[column, row], columns)


def store_sums(
  sums_gmem, x: Array, number, known, columns, smem, interpret: bool
) -> None:
  """Writes x's sums over rows to row `number` of `sums_gmem`.

  The first `known` rows of x, which the previous tile also contains, are left
  out; None stands for 0.
  """
  if known is not None:
    layout = row_ptx.TILE_LAYOUT
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
    x = jnp.where(row < known, 0.0, x)
  sums = jnp.sum(x, axis=0) if interpret else row_ptx.sum_over_rows(x, smem)
  rows.store(sums_gmem.at[number, columns], sums)


def known_rows(m: int, height: int, last: Array) -> Array | None:
  """Returns how many rows of a tile the previous tile contains; None means 0.

  `last` is the tile's index along the axis "last" of `grid`.
  """
  return jnp.maximum((last + 1) * height - m, 0) if m % height else None


def run(
  kernel: Callable[..., None],
  inputs: Sequence[Array | None],
  outputs: Sequence[jax.ShapeDtypeStruct | None],
  *,
  grid: tuple[int, int],
  warpgroups: int,
  scratch_types: Sequence,
  interpret: bool,
  **options,
) -> list:
  """Runs `kernel(index, *refs)` for all tiles of a grid, like `rows.run`.

  Use this function for kernels of which few programs would run at a time,
  because they take many registers; see `turns`. With 4 or 5 warpgroups, they
  get at most 128 or 96 registers per thread.
  """
  across, down = grid
  count = len(scratch_types)

  def body(*refs):
    refs, shared = refs[:-count], refs[-count:]
    own = [ref.at[lax.axis_index("warpgroup")] for ref in shared]

    def compute(_, tile, following):
      del following
      index = lax.div(tile, jnp.int32(down)), lax.rem(tile, jnp.int32(down))
      kernel(index, *refs, *own)
      rows.barrier(interpret)  # The next tile reuses the shared memory.

    turns.take_turns(compute, across * down, warpgroups, interpret)

  return rows.run(
    body,
    inputs,
    outputs,
    grid=(turns.programs(across * down, interpret),),
    grid_names=("program",),
    scratch_types=[
      plgpu.SMEM((warpgroups, *each.shape), each.dtype)
      for each in scratch_types
    ],
    num_threads=warpgroups,
    thread_name="warpgroup",
    interpret=interpret,
    **options,
  )
