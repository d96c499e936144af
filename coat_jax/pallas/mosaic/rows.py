# SPDX-License-Identifier: Apache-2.0
"""Loads, quantizes and stores groups or tiles, for memory-bound kernels.

Each program (thread block) consists of one warpgroup of 128 threads. In its
registers, values form either groups or a tile:

  groups  [count, G], with G = 16 to 128 values per group. A lane holds 8
          adjacent values (16 bytes in BF16), so at most four shuffles find a
          group's largest magnitude. A row consists of whole groups and rows are
          contiguous, so a matrix is one list of groups. In kernels that need
          whole rows (`whole_rows`), a lane may also hold 4 or 2 values.
  tile    [64, 128] or [32, 128]. In every 32 rows, a lane holds 4 adjacent rows
          of 8 columns, because four codes of a column fill a register. Codes
          are transposed with byte permutes and through shared memory, and
          written 16 bytes at a time.

Mosaic has no masked loads or stores. A program that would reach past the end of
the array starts earlier instead, so some values are written twice.

The interpreter cannot run inline PTX (`row_ptx`). With `interpret`, functions
run jnp code, which also defines the PTX's results.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.numerics.formats import qmax
from coat_jax.numerics.scaling import Layout
from coat_jax.pallas.mosaic import row_ptx
from coat_jax.pallas.mosaic.magnitudes import group_scale, magnitude_bits
from coat_jax.pallas.mosaic.row_ptx import COLUMNS, LANES, VECTOR, WARPS

STEP = WARPS * LANES * VECTOR  # Number of values per load.
_MAX_ACROSS = 65535  # The largest size of the grid's axis "across".
LOW, HIGH = 32, 64  # Tile heights.


def run(
  kernel: Callable[..., None],
  inputs: Sequence[Array | None],
  outputs: Sequence[jax.ShapeDtypeStruct | None],
  *,
  grid: tuple[int, ...],
  scratch: Sequence = (),
  interpret: bool,
  name: str,
) -> list:
  """Runs `kernel(*refs)`; returns the outputs.

  `refs` refer to the inputs, outputs and scratch arrays, in this order. If an
  input or output is None, its ref is None, and so is the returned output. The
  grid's axes are named "across" and "last", or just "last". Programs with
  consecutive indices along "last" start one after the other.
  """
  present = [x is not None for x in (*inputs, *outputs)]

  def body(*refs):
    left = iter(refs)
    kernel(
      *(next(left) if is_present else None for is_present in present), *left
    )

  found = plgpu.kernel(
    body,
    out_type=[x for x in outputs if x is not None],
    scratch_types=scratch,
    grid=grid,
    grid_names=("across", "last")[-len(grid) :],
    compiler_params=plgpu.CompilerParams(
      approx_math=True,
      # Only functions in `row_ptx` share memory between threads, and they emit
      # their own barriers.
      unsafe_no_auto_barriers=True,
    ),
    interpret=plgpu.InterpretGPUParams() if interpret else False,
    kernel_name=name,
  )(*(x for x in inputs if x is not None))
  left = iter(found)
  return [None if x is None else next(left) for x in outputs]


def store(ref, x: Array) -> None:
  """Stores x, even if its layout does not fill whole cache lines."""
  # Since JAX 0.12, an assignment rejects such a layout.
  if hasattr(plgpu, "store"):
    plgpu.store(ref, x, optimized=False)  # pyright: ignore
  else:
    ref[...] = x


def pick_size(elements: int) -> int:
  """Picks how many values a program loads: 32 per thread, 8 in small arrays."""
  return 4 * STEP if elements >= 2**20 else STEP


def part(axis: str, size: int, count: int):
  """Returns this program's slice along a grid axis; see `part_at`."""
  return part_at(lax.axis_index(axis), size, count)


def part_at(index: Array, size: int, count: int):
  """Cuts `count` indices into slices of `size`; returns slice number `index`.

  The last slice starts earlier if it would otherwise reach past the end, so
  `count` must be at least `size`.
  """
  start = index * size
  if count % size:
    start = jnp.minimum(start, count - size)
  return pl.ds(start, size)


def why_not_list(shape: tuple[int, ...]) -> str | None:
  """Returns why an array of this shape is too small for a program, or None."""
  size = math.prod(shape)
  if size < STEP:
    return f"the Mosaic kernel needs at least {STEP} values, got {size}"
  return None


def why_not_tiles(shape: tuple[int, ...]) -> str | None:
  """Returns why a matrix of this shape cannot be cut into tiles, or None."""
  n = shape[-1]
  m = math.prod(shape[:-1])
  if n > COLUMNS * _MAX_ACROSS:
    return (
      f"the Mosaic kernel supports at most {COLUMNS * _MAX_ACROSS} columns, "
      f"got {n}"
    )
  if m < LOW or n < COLUMNS:
    return (
      f"the Mosaic kernel needs a matrix of at least {LOW} x {COLUMNS}, got "
      f"[{m}, {n}]"
    )
  return None


# --- Groups ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Load:
  """How a program loads groups of `size` values: `vector` values per lane."""

  size: int
  vector: int = VECTOR

  @property
  def count(self) -> int:
    """The number of groups per load."""
    return WARPS * LANES * self.vector // self.size

  @property
  def layout(self):
    """The layout of groups [count, size]; scales have `layout.reduce(1)`."""
    groups = LANES * self.vector // self.size  # Per warp.
    if groups == 1:
      return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, self.size), (self.vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
      )
    return plgpu.Layout.TILED(
      plgpu.Tiling(
        ((WARPS * groups, self.size), (groups, self.size), (self.vector,))
      ),
      warp_dims=(-5,),
      lane_dims=(-3, -2),
      vector_dim=-1,
    )


ANY = Load(16)  # For arrays that are not quantized in groups.


def load_groups(ref, load: Load) -> Array:
  """Loads groups [c, G] as f32, where c is a multiple of `load.count`."""
  x = plgpu.load(ref, layout=load.layout, optimized=False)
  return x.astype(jnp.float32)


def amax_bits(x: Array, count: int) -> Array:
  """Returns the f32 bits of the largest magnitude, as int32 []."""
  # Within a lane, compare as f32, which takes one instruction and keeps NaN.
  # Comparing bits would take two.
  bits = magnitude_bits(folded(jnp.maximum, jnp.abs(x), count))
  while bits.ndim:
    bits = jnp.max(bits, axis=-1)
  return bits


def folded(op: Callable, x: Array, count: int) -> Array:
  """Reduces x to `count` rows, by combining rows i, i + count, ... with `op`.

  If a load reads `count` rows, each lane already holds the values to combine.
  """
  loads = [x[i : i + count] for i in range(0, len(x), count)]
  return functools.reduce(op, loads)


def quantize_groups(
  x: Array, dtype: DTypeLike, load: Load, interpret: bool
) -> tuple[Array, Array]:
  """Quantizes groups [..., G] to codes and f32 scales [...].

  Scales are rounded up to BF16, so quotients need no clipping.
  """
  bits = magnitude_bits(jnp.max(jnp.abs(x), axis=-1))
  scale = group_scale(bits, dtype)
  wide = spread(scale, x.shape)
  if interpret:
    return (x / wide).astype(dtype), scale
  quotient = row_ptx.quotient(x, wide, None, load.layout)
  return quotient.astype(dtype), scale


def quantize(
  x: Array, scale: Array, dtype: DTypeLike, layout, interpret: bool
) -> Array:
  """Rounds clip(x / scale, ±qmax) to nearest even; `scale` is a scalar."""
  limit = qmax(dtype)
  if interpret:
    return jnp.clip(x / scale, -limit, limit).astype(dtype)
  scale = plgpu.layout_cast(jnp.broadcast_to(scale, x.shape), layout)
  # The GPU's cast saturates at `limit`, so clipping to 2 * limit is enough.
  return row_ptx.quotient(x, scale, 2 * limit, layout).astype(dtype)


def dequantize_groups(codes: Array, scale: Array) -> Array:
  """Dequantizes codes [..., G] with scales [...] to f32."""
  return codes.astype(jnp.float32) * spread(scale, codes.shape)


def spread(scale: Array, shape: tuple[int, ...]) -> Array:
  """Repeats the values of leading axes along the others."""
  return lax.broadcast_in_dim(scale, shape, range(scale.ndim))


# --- Tiles -------------------------------------------------------------------


def tile_height(m: int) -> int:
  """Picks high tiles if they fit: they store longer runs of a column."""
  return HIGH if m >= HIGH else LOW


def grid_of_tiles(m: int, n: int, height: int) -> tuple[int, int]:
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


def place_of_tile(shape: tuple[int, int], height: int):
  """Returns the rows and the columns of this program's tile of a matrix."""
  m, n = shape
  return part("last", height, m), part("across", COLUMNS, n)


def load_tile(ref) -> Array:
  """Loads a tile as f32."""
  x = plgpu.load(ref, layout=row_ptx.TILE_LAYOUT, optimized=False)
  return x.astype(jnp.float32)


def load_quantized_tile(q_gmem, scale_gmem, place, interpret: bool) -> Array:
  """Loads and dequantizes a tile; refs are [m, n] and [m, groups]."""
  size = q_gmem.shape[1] // scale_gmem.shape[1]
  row, column = place
  group = lax.div(column.start, jnp.int32(size))
  if size == COLUMNS:  # Mosaic supports no axis of size 1.
    scale = load_per_row(scale_gmem.at[:, group], place)
    return load_tile(q_gmem.at[place]) * scale
  scale = plgpu.load(
    scale_gmem.at[row, pl.ds(group, COLUMNS // size)],
    layout=row_ptx.scales_layout(size),
    optimized=False,
  ).astype(jnp.float32)
  if interpret:
    scale = jnp.repeat(scale, size, axis=1)
  else:
    scale = row_ptx.spread_scales(scale, size)
  return load_tile(q_gmem.at[place]) * scale


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


def quantize_tile(
  x: Array, scale: Array, dtype: DTypeLike, interpret: bool
) -> Array:
  """Quantizes a tile with one scale, like `quantize`."""
  return quantize(x, scale, dtype, row_ptx.TILE_LAYOUT, interpret)


def transpose(codes: Array, smem, interpret: bool) -> Array:
  """Transposes a tile of codes through shared memory (`row_ptx.scratch`).

  A program may use each `smem` only once, because a call does not wait for the
  reads of an earlier call.
  """
  return codes.T if interpret else row_ptx.transpose(codes, smem)


def store_operand(
  place, codes: Array, rows_gmem, columns_gmem, smem, interpret: bool
) -> None:
  """Writes a tile of codes to each layout whose ref is not None."""
  rows, columns = place
  if rows_gmem is not None:
    store(rows_gmem.at[rows, columns], codes)
  if columns_gmem is not None:
    transposed = transpose(codes, smem, interpret)
    store(columns_gmem.at[columns, rows], transposed)


def store_sums(
  sums_gmem, x: Array, place, m: int, smem, interpret: bool
) -> None:
  """Writes the sum over a tile's rows to `sums_gmem` [tiles, n]."""
  number, height = lax.axis_index("last"), len(x)
  if m % height:  # Leave out rows that the previous tile also contains.
    layout = row_ptx.TILE_LAYOUT
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
    known = jnp.maximum((number + 1) * height - m, 0)
    x = jnp.where(row < known, 0.0, x)
  sums = jnp.sum(x, axis=0) if interpret else row_ptx.sum_over_rows(x, smem)
  store(sums_gmem.at[number, place[1]], sums)
