# SPDX-License-Identifier: Apache-2.0
"""Calls kernels on matrices that are cut into tiles, one per program.

All leading axes of an array are flattened to rows, so it is a matrix [m, n]. A
`Blocked` is an array that a kernel reads, or the shape of one that it writes,
together with the tile of it that each program gets.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import Layout
from coat_jax.pallas.triton import ptx, tiles

type Blocked = tuple[pl.BlockSpec, Array | jax.ShapeDtypeStruct]

# The largest size of a GPU's grid along its second axis.
_MAX_ACROSS = 65535


def blocked(
  spec: pl.BlockSpec, shape: tuple[int, ...], x: Array | DTypeLike | None
) -> Blocked | None:
  """Pairs a spec with an array of this shape, or with a result's dtype."""
  if x is None:
    return None
  if isinstance(x, Array):
    return spec, x.reshape(shape)
  return spec, jax.ShapeDtypeStruct(shape, x)


def scalar(x: Array) -> Blocked:
  """Gives every program the first value of a scale [] or [k]."""
  return pl.BlockSpec((1,), lambda *_: (0,)), x if x.ndim else x.reshape(1)


def vector(
  size: int, count: int, x: Array | DTypeLike | None
) -> Blocked | None:
  """Cuts a vector [count]; program i gets part i, of `size` values."""
  return blocked(pl.BlockSpec((size,), lambda i: (i,)), (count,), x)


def run(
  kernel: Callable[..., None],
  inputs: Sequence[Blocked | None],
  outputs: Sequence[Blocked | None],
  *,
  grid: tuple[int, ...],
  warps: int,
  interpret: bool,
  name: str,
) -> tuple:
  """Calls `kernel(*refs)`; if an input or output is None, so is its ref."""
  in_specs, arrays = zip(*(x or (None, None) for x in inputs), strict=True)
  out_specs, shapes = zip(*(x or (None, None) for x in outputs), strict=True)
  return pl.pallas_call(
    kernel,
    grid=grid,
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=shapes,
    compiler_params=compiler_params(warps),
    interpret=interpret,
    name=name,
  )(*arrays)


def compiler_params(warps: int, stages: int = 1) -> plt.CompilerParams:
  return plt.CompilerParams(num_warps=warps, num_stages=stages)


@dataclasses.dataclass(frozen=True)
class Tile:
  """A program's share of a matrix; rows and columns are powers of two.

  If `down`, consecutive programs go down the rows, else across the columns.
  """

  rows: int
  columns: int
  warps: int
  down: bool = True


def pick_row_tile(m: int, n: int) -> Tile:
  """Picks a tile for a kernel that reads and writes rows: 16-byte loads.

  A thread gets 16 values. The tile's width is the largest power of two that
  divides n, from 64 to 256. Consecutive programs go along the rows.
  """
  columns = max(min(n & -n, 256), 64)
  rows = 2048 // columns
  return Tile(rows, columns, 4, down=m > rows * _MAX_ACROSS)


def pick_amax_tile(m: int) -> Tile:
  """Picks a tile for a kernel that only reads: wider than it is high."""
  return Tile(4, 512, 4, down=m > 4 * _MAX_ACROSS)


def pick_tile(m: int) -> Tile:
  """Picks a tile that writes 32 bytes per column: 32 values per thread."""
  return Tile(32, 128, 4, down=m > 32 * _MAX_ACROSS)


@dataclasses.dataclass(frozen=True)
class Matrix:
  """A matrix [m, n] in tiles, with 1 x `group_size` groups if it has any."""

  m: int
  n: int
  tile: Tile
  interpret: bool
  group_size: int = 1

  # --- On the host ---

  def run(self, kernel, inputs, outputs, *, name: str) -> tuple:
    """Calls `kernel(self, *refs)` for every tile."""
    return run(
      functools.partial(kernel, self),
      inputs,
      outputs,
      grid=self.grid,
      warps=self.tile.warps,
      interpret=self.interpret,
      name=name,
    )

  @property
  def grid(self) -> tuple[int, int]:
    down = pl.cdiv(self.m, self.tile.rows)
    across = pl.cdiv(self.n, self.tile.columns)
    return (down, across) if self.tile.down else (across, down)

  def spec(
    self, shape: tuple[int, ...], axes: tuple[int | None, ...]
  ) -> pl.BlockSpec:
    """Returns the spec of tiles of `shape`.

    `axes` contains, for each axis of `shape`, the tile index that moves along
    it: the tile's row (0), its column (1) or neither (None).
    """

    def index(first, second):
      place = (first, second) if self.tile.down else (second, first)
      return tuple(0 if axis is None else place[axis] for axis in axes)

    return pl.BlockSpec(shape, index)

  def values(self, x: Array | DTypeLike) -> Blocked | None:
    """Cuts [m, n] into tiles."""
    spec = self.spec((self.tile.rows, self.tile.columns), (0, 1))
    return blocked(spec, (self.m, self.n), x)

  def columns(self, dtype: DTypeLike) -> Blocked | None:
    """Cuts the transpose [n, m] into tiles."""
    spec = self.spec((self.tile.columns, self.tile.rows), (1, 0))
    return blocked(spec, (self.n, self.m), dtype)

  def operand(self, dtype: DTypeLike, layout: Layout) -> list[Blocked | None]:
    """Cuts rows and columns into tiles; None for one that `layout` omits."""
    return [
      None if layout == "columns" else self.values(dtype),
      None if layout == "rows" else self.columns(dtype),
    ]

  def scales(self, x: Array | DTypeLike) -> Blocked | None:
    """Cuts the groups' scales [m, n / group_size] into tiles."""
    tile = self.tile.rows, self.tile.columns // self.group_size
    return blocked(self.spec(tile, (0, 1)), (self.m, self._groups), x)

  def quantized(self, x: QTensor) -> list[Blocked | None]:
    """Cuts codes and scales into tiles."""
    return [self.values(x.qvalue), self.scales(x.scale)]

  def grouped(self, codes: Array, scale: Array, shape) -> QTensor:
    """Makes quantized values of this shape from their codes and scales."""
    scale = scale.reshape(*shape[:-1], self._groups)
    return QTensor(codes.reshape(shape), scale, self.group_size)

  def maxima(self) -> Blocked | None:
    """Allots one value per tile: the bits of its largest magnitude."""
    axes = (0, 1) if self.tile.down else (1, 0)
    return blocked(self.spec((1, 1), axes), self.grid, jnp.int32)

  def sums(self) -> Blocked | None:
    """Allots the sum over each tile's rows: f32 [tiles down, n]."""
    shape = pl.cdiv(self.m, self.tile.rows), self.n
    spec = self.spec((1, self.tile.columns), (0, 1))
    return blocked(spec, shape, jnp.float32)

  # --- In a kernel ---

  def index(self) -> tuple[Array, Array]:
    """Returns this program's row and column in the grid of tiles."""
    first, second = pl.program_id(0), pl.program_id(1)
    return (first, second) if self.tile.down else (second, first)

  def mask(self) -> Array | None:
    tile = self.tile.rows, self.tile.columns
    return tiles.inside(tile, (self.m, self.n), self.index())

  def load(self, ref) -> Array:
    """Loads a tile as f32, zeros outside the matrix."""
    return tiles.load(ref, self.mask())

  def load_groups(self, q_ref, scale_ref) -> Array:
    """Dequantizes a tile of codes, zeros outside the matrix."""
    scale = tiles.load(scale_ref, self.group_mask())
    return tiles.dequantize_groups(
      self.load(q_ref), scale, group_size=self.group_size
    )

  def store_groups(self, q_ref, scale_ref, x: Array) -> Array:
    """Quantizes and writes a tile; returns the dequantized values."""
    codes, scale = tiles.quantize_groups(
      x, group_size=self.group_size, dtype=q_ref.dtype
    )
    tiles.store(q_ref, codes, self.mask())
    tiles.store(scale_ref, scale, self.group_mask())
    return tiles.dequantize_groups(codes, scale, group_size=self.group_size)

  @property
  def _groups(self) -> int:
    return self.n // self.group_size

  def group_mask(self) -> Array | None:
    tile = self.tile.rows, self.tile.columns // self.group_size
    return tiles.inside(tile, (self.m, self._groups), self.index())

  def quantize(self, x: Array, scale_ref, dtype: DTypeLike) -> Array:
    """Quantizes a tile with the one scale in `scale_ref` [1]."""
    return ptx.quantize_with_scale(
      x, scale_ref[0], dtype=dtype, interpret=self.interpret
    )

  def store_sums(self, ref, x: Array) -> None:
    """Writes the sum over a tile's rows; x must be zero outside the matrix."""
    _, across = self.index()
    mask = tiles.inside(ref.shape, (1, self.n), (0, across))
    tiles.store(ref, jnp.sum(x, axis=0)[None, :], mask)

  def store_operand(self, rows_ref, columns_ref, codes: Array) -> None:
    """Writes a tile of codes to the layouts whose refs are not None."""
    mask = self.mask()
    if rows_ref is not None:
      tiles.store(rows_ref, codes, mask)
    if columns_ref is not None:
      tiles.store_transposed(columns_ref, codes, mask)


def of_values(x: QTensor, layout: Layout, interpret: bool) -> Matrix:
  """Cuts quantized values for a kernel that writes this layout."""
  n = x.qvalue.shape[-1]
  m = x.qvalue.size // n
  tile = pick_row_tile(m, n) if layout == "rows" else pick_tile(m)
  assert x.group_size is not None
  return Matrix(m, n, tile, interpret, x.group_size)


def like(rows: Array | None, x: Array) -> Array | None:
  """Gives a matrix the shape of x; None stays None."""
  return None if rows is None else rows.reshape(x.shape)
