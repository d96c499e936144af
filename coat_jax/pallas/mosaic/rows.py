# SPDX-License-Identifier: Apache-2.0
"""Runs kernels on rows of values, and defines the operations that they share.

A program is one warpgroup. It loads all of its values before it uses any, and
keeps them in registers. It holds them in one of two ways:

  groups  [count, G], G = 16 to 128. A lane holds 8 adjacent values, 16 bytes of
          BF16, so a group's largest magnitude takes at most four shuffles. Rows
          are contiguous and consist of whole groups, so a matrix is one list of
          groups. Kernels that need whole rows (`whole_rows`) may also hold 4 or
          2 values per lane.
  tiles   [64, 128], or 32 rows of a low matrix. A lane holds 8 values of each
          of 4 rows, because four codes of a column fill a register. Codes are
          transposed with byte permutes and through shared memory, and written
          16 bytes at a time.

Mosaic has no masks. So where programs would reach past the end, the last one
starts earlier, and writes some values that another program writes too.

The interpreter cannot run inlined PTX (`row_ptx`): with `interpret`, functions
use their jnp version, which is also their definition.
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

STEP = WARPS * LANES * VECTOR  # The values of one load of a program.
# The largest size of a GPU's grid along any axis but its last.
_MAX_ACROSS = 65535
_LOW, _HIGH = 32, 64  # The heights of tiles.
TILE_ROWS = 32  # The rows of a tile that a program loads at a time.


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
  """Calls `kernel(*refs)`; if an input or output is None, so is its ref.

  `scratch` is shared memory, for which refs follow those of the outputs. The
  axis of the grid along which programs are consecutive is "last"; if there are
  two, the other one is "across".
  """
  present = [x is not None for x in (*inputs, *outputs)]

  def body(*refs):
    left = iter(refs)
    kernel(*(next(left) if there else None for there in present), *left)

  found = plgpu.kernel(
    body,
    out_type=[x for x in outputs if x is not None],
    scratch_types=scratch,
    grid=grid,
    grid_names=("across", "last")[-len(grid) :],
    compiler_params=plgpu.CompilerParams(
      approx_math=True,
      # What shares memory between threads (`row_ptx`) has its own barriers.
      unsafe_no_auto_barriers=True,
    ),
    interpret=plgpu.InterpretGPUParams() if interpret else False,
    kernel_name=name,
  )(*(x for x in inputs if x is not None))
  left = iter(found)
  return [None if x is None else next(left) for x in outputs]


def store(ref, x: Array) -> None:
  """Stores x, in transfers that need not be whole lines of the cache."""
  if hasattr(plgpu, "store"):  # Since JAX 0.12, which refuses them otherwise.
    plgpu.store(ref, x, optimized=False)  # pyright: ignore
  else:
    ref[...] = x


def pick_size(elements: int) -> int:
  """Picks a program's values: 32 per thread, or 8 if an array is small."""
  return 4 * STEP if elements >= 2**20 else STEP


def part(axis: str, size: int, count: int):
  """Returns this program's part, of `size`, of an axis of `count` >= size."""
  return part_at(lax.axis_index(axis), size, count)


def part_at(index: Array, size: int, count: int):
  """Returns part `index`, of `size`, of an axis of `count` >= size."""
  start = index * size
  if count % size:
    start = jnp.minimum(start, count - size)
  return pl.ds(start, size)


def why_not_list(shape: tuple[int, ...]) -> str | None:
  """Returns why no program fits into an array of this shape, or None."""
  size = math.prod(shape)
  if size < STEP:
    return f"the kernel of Mosaic takes at least {STEP} values, got {size}"
  return None


def why_not_tiles(shape: tuple[int, ...]) -> str | None:
  """Returns why no tile fits into a matrix of this shape, or None."""
  n = shape[-1]
  m = math.prod(shape[:-1])
  if n > COLUMNS * _MAX_ACROSS:
    return f"the kernel of Mosaic takes at most {_MAX_ACROSS} tiles across"
  if m < _LOW or n < COLUMNS:
    return (
      f"the kernel of Mosaic works in tiles of {_LOW} x {COLUMNS}, got a "
      f"matrix [{m}, {n}]"
    )
  return None


# --- Groups ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Load:
  """One load of a program: whole groups of `size`, `vector` values per lane."""

  size: int
  vector: int = VECTOR

  @property
  def count(self) -> int:
    """The number of groups."""
    return WARPS * LANES * self.vector // self.size

  @property
  def layout(self):
    """The layout of groups [count, size]; `.reduce(1)` is a statistic's."""
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


ANY = Load(16)  # For values whose groups do not matter.


def load_groups(ref, load: Load) -> Array:
  """Loads groups [count, ...] as f32; `count` is a multiple of the load's."""
  x = plgpu.load(ref, layout=load.layout, optimized=False)
  return x.astype(jnp.float32)


def amax_bits(x: Array, count: int) -> Array:
  """Returns the f32 bits of the largest magnitude, as int32 [].

  `count` is the number of rows of x that a program loads at a time.
  """
  # Maxima of f32, which keep NaN, take one instruction; of bits, two.
  bits = magnitude_bits(folded(jnp.maximum, jnp.abs(x), count))
  while bits.ndim:
    bits = jnp.max(bits, axis=-1)
  return bits


def folded(op: Callable, x: Array, count: int) -> Array:
  """Combines loads of `count` rows in each lane, to one load."""
  loads = [x[i : i + count] for i in range(0, len(x), count)]
  return functools.reduce(op, loads)


def quantize_groups(
  x: Array, dtype: DTypeLike, load: Load, interpret: bool
) -> tuple[Array, Array]:
  """Quantizes groups [..., G] to codes and f32 scales [...].

  Scales are BF16 values, rounded up, so no quotient needs clipping.
  """
  bits = magnitude_bits(jnp.max(jnp.abs(x), axis=-1))
  scale = group_scale(bits, dtype)
  spread = _spread(scale, x.shape)
  if interpret:
    return (x / spread).astype(dtype), scale
  quotient = row_ptx.quotient(x, spread, None, load.layout)
  return quotient.astype(dtype), scale


def quantize(
  x: Array, scale: Array, dtype: DTypeLike, layout, interpret: bool
) -> Array:
  """Quantizes x with one scale []: rne(clip(x / scale, ±qmax))."""
  limit = qmax(dtype)
  if interpret:
    return jnp.clip(x / scale, -limit, limit).astype(dtype)
  scale = plgpu.layout_cast(jnp.broadcast_to(scale, x.shape), layout)
  # The GPU's cast saturates.
  return row_ptx.quotient(x, scale, 2 * limit, layout).astype(dtype)


def dequantize_groups(codes: Array, scale: Array) -> Array:
  """Dequantizes codes [..., G] with scales [...] to f32."""
  return codes.astype(jnp.float32) * _spread(scale, codes.shape)


def _spread(scale: Array, shape: tuple[int, ...]) -> Array:
  """Repeats each group's scale for its values."""
  return lax.broadcast_in_dim(scale, shape, range(scale.ndim))


# --- Tiles -------------------------------------------------------------------


def tile_height(m: int) -> int:
  """Returns the height of tiles of a matrix with m >= 32 rows."""
  return _HIGH if m >= _HIGH else _LOW


def grid_of_tiles(m: int, n: int) -> tuple[int, int]:
  """Returns a grid whose consecutive programs go down the rows."""
  return pl.cdiv(n, COLUMNS), pl.cdiv(m, tile_height(m))


def operand(
  m: int, n: int, dtype: DTypeLike, layout: Layout
) -> list[jax.ShapeDtypeStruct | None]:
  """Returns the shapes of rows and columns; None for one that is omitted."""
  return [
    None if layout == "columns" else jax.ShapeDtypeStruct((m, n), dtype),
    None if layout == "rows" else jax.ShapeDtypeStruct((n, m), dtype),
  ]


def like(rows: Array | None, x: Array) -> Array | None:
  """Gives a matrix the shape of x; None stays None."""
  return None if rows is None else rows.reshape(x.shape)


def place_of_tile(shape: tuple[int, int]):
  """Returns the rows and the columns of this program's tile of a matrix."""
  m, n = shape
  return part("last", tile_height(m), m), part("across", COLUMNS, n)


def load_tile(ref) -> Array:
  """Loads a tile as f32."""
  x = plgpu.load(ref, layout=row_ptx.TILE_LAYOUT, optimized=False)
  return x.astype(jnp.float32)


def load_quantized_tile(q_gmem, scale_gmem, place, interpret: bool) -> Array:
  """Loads codes and scales [m, groups]; dequantizes them to f32."""
  size = q_gmem.shape[1] // scale_gmem.shape[1]
  row, column = place
  group = lax.div(column.start, jnp.int32(size))
  if size == COLUMNS:  # Mosaic wants no axis of size 1.
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
  """Loads a value per row and broadcasts it to a tile, in f32."""
  return _load_along(ref, place, 0)


def load_per_column(ref, place) -> Array:
  """Loads a value per column and broadcasts it to a tile, in f32."""
  return _load_along(ref, place, 1)


def _load_along(ref, place, axis: int) -> Array:
  layout = row_ptx.TILE_LAYOUT.reduce(1 - axis)
  x = plgpu.load(ref.at[place[axis]], layout=layout, optimized=False)
  shape = place[0].size, place[1].size
  return lax.broadcast_in_dim(x.astype(jnp.float32), shape, (axis,))


def quantize_tile(
  x: Array, scale: Array, dtype: DTypeLike, interpret: bool
) -> Array:
  """`quantize`, for a tile."""
  return quantize(x, scale, dtype, row_ptx.TILE_LAYOUT, interpret)


def transpose(codes: Array, smem, interpret: bool) -> Array:
  """Transposes a tile of codes, once per program; smem is `row_ptx.scratch`."""
  return codes.T if interpret else row_ptx.transpose(codes, smem)


def store_operand(
  place, codes: Array, rows_gmem, columns_gmem, smem, interpret: bool
) -> None:
  """Writes a tile of codes to the layouts whose refs are not None."""
  rows, columns = place
  if rows_gmem is not None:
    store(rows_gmem.at[rows, columns], codes)
  if columns_gmem is not None:
    transposed = transpose(codes, smem, interpret)
    store(columns_gmem.at[columns, rows], transposed)


def store_sums(
  sums_gmem, x: Array, place, m: int, smem, interpret: bool
) -> None:
  """Writes the sum of a tile's rows, without those that an earlier tile has.

  `sums_gmem` is [tiles, n] for tiles of a matrix with m rows.
  """
  number, height = lax.axis_index("last"), len(x)
  if m % height:
    layout = row_ptx.TILE_LAYOUT
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
    known = jnp.maximum((number + 1) * height - m, 0)
    x = jnp.where(row < known, 0.0, x)
  sums = jnp.sum(x, axis=0) if interpret else row_ptx.sum_over_rows(x, smem)
  store(sums_gmem.at[number, place[1]], sums)
