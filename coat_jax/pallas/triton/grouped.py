# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls: each row times the weight of its group, in Triton.

  grouped_fwd     y  = x w      [M, D] x [E, D, F] -> [M, F]
  grouped_dgrad   dx = g w^T    [M, F] x [E, D, F] -> [M, D]
  grouped_wgrad   dw = x^T g    [M, D] x [M, F] -> [E, D, F] or [D, E, F]

For the first two, rows are cut into tiles that do not cross groups. Only the
device knows how many tiles a group needs, and all groups together need at most
M / rows + E. We start that many programs; those left over find no rows.

      rows of x   | group 0      | 1 | group 2           |
      tiles       | 0    | 1     | 2 | 3     | 4    | 5  | (6: none)

For `grouped_wgrad` a program computes a tile of one group's weight and loops
over the group's rows. Inputs are BF16 or f32, sums are f32. XLA multiplies
every row with every group's weight, which takes E times the operations. These
kernels have not been measured yet.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from coat_jax.ops.dispatch import kernel
from coat_jax.pallas import supported
from coat_jax.pallas.triton import matrix, tiles


@dataclasses.dataclass(frozen=True)
class Tile:
  """A program's share of a product, and the steps in which it is summed."""

  rows: int
  columns: int
  step: int  # The length along the summed axis that is loaded at a time.
  warps: int
  stages: int  # The number of loads in flight.


def pick_tile(dtype: DTypeLike) -> Tile:
  """Picks a tile with 64 sums per thread."""
  if dtype == jnp.bfloat16:
    return Tile(128, 128, 64, 8, 3)
  return Tile(64, 64, 32, 4, 2)


def _why_not(dtype, **arrays) -> str | None:
  a, b = (arrays[name] for name in ("x", "g", "w") if name in arrays)
  if a.dtype != b.dtype:
    return (
      f"the Triton kernel multiplies values of one dtype, got {a.dtype} and "
      f"{b.dtype}"
    )
  return (
    supported.why_not_dtype(a.dtype, dtype)
    or supported.why_not_shape(a.shape)
    or supported.why_not_shape(b.shape)
  )


@kernel(_why_not)
@jax.jit(static_argnames=("dtype", "interpret"))
def grouped_fwd(
  x: Array,
  w: Array,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: bool = False,
) -> Array:
  """`ops.grouped_fwd`."""
  result = jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), dtype)
  return _rows_times(x, w, sizes, result, interpret, name="grouped_fwd")


@kernel(_why_not)
@jax.jit(static_argnames=("dtype", "interpret"))
def grouped_dgrad(
  g: Array,
  w: Array,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: bool = False,
) -> Array:
  """`ops.grouped_dgrad`."""
  result = jax.ShapeDtypeStruct((g.shape[0], w.shape[1]), dtype)
  return _rows_times(g, w, sizes, result, interpret, name="grouped_dgrad")


@kernel(_why_not)
@jax.jit(static_argnames=("dtype", "rows_first", "interpret"))
def grouped_wgrad(
  x: Array,
  g: Array,
  sizes: Array,
  *,
  dtype: DTypeLike = jnp.float32,
  rows_first: bool = False,
  interpret: bool = False,
) -> Array:
  """`ops.grouped_wgrad`."""
  tile = pick_tile(x.dtype)
  (_, d), (_, f), (e,) = x.shape, g.shape, sizes.shape
  ends = jnp.cumsum(sizes).astype(jnp.int32)
  shape = (d, e, f) if rows_first else (e, d, f)
  return pl.pallas_call(
    functools.partial(_wgrad_kernel, rows_first=rows_first, tile=tile),
    grid=(pl.cdiv(d, tile.rows), pl.cdiv(f, tile.columns), e),
    out_shape=jax.ShapeDtypeStruct(shape, dtype),
    compiler_params=matrix.compiler_params(tile.warps, tile.stages),
    interpret=interpret,
    name="grouped_wgrad",
  )(ends - sizes.astype(jnp.int32), ends, x, g)


# --- Rows times weights ------------------------------------------------------


def _rows_times(x, w, sizes, result, interpret, *, name) -> Array:
  """Multiplies rows by weights, or by their transposes for `grouped_dgrad`."""
  tile = pick_tile(x.dtype)
  m, n = result.shape
  tiles_of_rows = _row_tiles(sizes, m, tile.rows)
  is_transposed = name == "grouped_dgrad"
  return pl.pallas_call(
    functools.partial(_rows_kernel, tile=tile, is_transposed=is_transposed),
    grid=(tiles_of_rows[0].size, pl.cdiv(n, tile.columns)),
    out_shape=result,
    compiler_params=matrix.compiler_params(tile.warps, tile.stages),
    interpret=interpret,
    name=name,
  )(*tiles_of_rows, x, w)


def _row_tiles(sizes: Array, m: int, rows: int) -> tuple[Array, Array, Array]:
  """Returns each tile's group, its first row, and the end of its group."""
  num_tiles = pl.cdiv(m, rows) + sizes.size
  ends = jnp.cumsum(sizes)
  tiles_of = pl.cdiv(sizes, rows)
  tile_ends = jnp.cumsum(tiles_of)
  tile = jnp.arange(num_tiles)
  group = jnp.searchsorted(tile_ends, tile, side="right")
  is_left = group == sizes.size
  group = jnp.minimum(group, sizes.size - 1)
  within = tile - (tile_ends - tiles_of)[group]
  first = (ends - sizes)[group] + within * rows
  first = jnp.where(is_left, m, first)
  found = group, first, ends[group]
  return tuple(x.astype(jnp.int32) for x in found)  # pyright: ignore[reportReturnType]


def _rows_kernel(*refs, tile: Tile, is_transposed: bool):
  group_ref, first_ref, end_ref, x_ref, w_ref, y_ref = refs
  i, j = pl.program_id(0), pl.program_id(1)
  group, first, end = group_ref[i], first_ref[i], end_ref[i]
  row = _count(first, tile.rows)
  column = _count(j * tile.columns, tile.columns)
  depth, n = x_ref.shape[1], y_ref.shape[1]

  def add(k, total):
    inner = _count(k * tile.step, tile.step)
    a = _load(x_ref, row, inner, rows=end, columns=depth)
    if is_transposed:
      b = _load(w_ref, column, inner, group, rows=n, columns=depth)
    else:
      b = _load(w_ref, inner, column, group, rows=depth, columns=n)
    return total + _dot(a, b, (1, 1 if is_transposed else 0))

  total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
  total = jax.lax.fori_loop(0, pl.cdiv(depth, tile.step), add, total)
  at, mask = _at(y_ref, row, column, (), end, n)
  plt.store(at, total.astype(y_ref.dtype), mask=mask)


# --- Gradients of weights ----------------------------------------------------


def _wgrad_kernel(
  first_ref, end_ref, x_ref, g_ref, dw_ref, *, rows_first, tile
):
  i, j, group = (pl.program_id(axis) for axis in range(3))
  first, end = first_ref[group], end_ref[group]
  row = _count(i * tile.rows, tile.rows)
  column = _count(j * tile.columns, tile.columns)
  d, f = x_ref.shape[1], g_ref.shape[1]

  def add(k, total):
    token = _count(first + k * tile.step, tile.step)
    a = _load(x_ref, token, row, rows=end, columns=d)
    b = _load(g_ref, token, column, rows=end, columns=f)
    return total + _dot(a, b, (0, 0))

  steps = (end - first + tile.step - 1) // tile.step
  total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
  total = jax.lax.fori_loop(0, steps, add, total)
  at, mask = _at(dw_ref, row, column, (group,), d, f, rows_first)
  plt.store(at, total.astype(dw_ref.dtype), mask=mask)


# --- Loads, stores and products of tiles -------------------------------------


def _count(first, size: int) -> Array:
  return first + tiles.iota((size,), 0)


def _load(ref, row, column, *group, rows, columns) -> Array:
  """Loads ref[*group, row, column], zeros past the ends of rows or columns."""
  at, mask = _at(ref, row, column, group, rows, columns)
  return plt.load(at, mask=mask, other=jnp.zeros((), ref.dtype))


def _at(ref, row, column, group, rows, columns, rows_first=False):
  shape = (row.size, column.size)
  row = jax.lax.broadcast_in_dim(row, shape, (0,))
  column = jax.lax.broadcast_in_dim(column, shape, (1,))
  index = (row, *group, column) if rows_first else (*group, row, column)
  return ref.at[index], (row < rows) & (column < columns)


def _dot(a: Array, b: Array, summed: tuple[int, int]) -> Array:
  # f32 inputs are not rounded to TF32.
  return tiles.dot(a, b, summed, precision=jax.lax.Precision.HIGHEST)
