# SPDX-License-Identifier: Apache-2.0
"""Code that the kernels of activation functions share.

Each kernel is elementwise over a matrix [m, n], with all leading axes flattened
to rows, and a program handles one tile of every array.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import Layout
from coat_jax.pallas.triton import ptx, tiles

# The largest size of a GPU's grid along its second axis.
_MAX_ACROSS = 65535


def pick_row_tile(m: int, n: int) -> tiles.Tile:
  """Picks a tile for a kernel that reads and writes rows: 16-byte loads.

  A thread gets 16 values. The tile is as wide as divides n evenly, up to 256,
  and programs go along the rows.
  """
  columns = max(min(n & -n, 256), 64)
  rows = 2048 // columns
  return tiles.Tile(rows, columns, 4, down=m > rows * _MAX_ACROSS)


def pick_amax_tile(m: int) -> tiles.Tile:
  """Picks a tile for a kernel that only reads: wider than it is high."""
  return tiles.Tile(4, 512, 4, down=m > 4 * _MAX_ACROSS)


def pick_tile(m: int) -> tiles.Tile:
  """Picks a tile that writes 32 bytes per column: 32 values per thread."""
  return tiles.Tile(32, 128, 4, down=m > 32 * _MAX_ACROSS)


@dataclasses.dataclass(frozen=True)
class Work:
  """The static parameters of a kernel.

  Attributes:
    m, n: shape of the matrix.
    group_size: size G of the 1 x G groups that are read or written.
    tile: how the matrix is cut.
    interpret: whether JAX interprets the kernel.
  """

  m: int
  n: int
  group_size: int
  tile: tiles.Tile
  interpret: bool

  # --- On the host ---

  def run(self, kernel, *args, in_specs, out_specs, out_shape, name):
    """Calls `kernel(work, *refs)` for every tile."""
    return pl.pallas_call(
      functools.partial(kernel, self),
      grid=self.tile.grid(self.m, self.n),
      in_specs=in_specs,
      out_specs=out_specs,
      out_shape=out_shape,
      compiler_params=tiles.compiler_params(self.tile.warps),
      interpret=self.interpret,
      name=name,
    )(*args)

  def matrix(self, dtype: DTypeLike) -> tuple:
    """Returns spec and shape of rows [m, n]."""
    return self.tile.matrix(), jax.ShapeDtypeStruct((self.m, self.n), dtype)

  def columns(self, dtype: DTypeLike) -> tuple:
    """Returns spec and shape of columns [n, m]."""
    spec = self.tile.spec((self.tile.columns, self.tile.rows), (1, 0))
    return spec, jax.ShapeDtypeStruct((self.n, self.m), dtype)

  def operand(self, dtype: DTypeLike, layout: Layout) -> list[tuple | None]:
    """Returns `matrix` and `columns`; None for one that the layout lacks."""
    return [
      None if layout == "columns" else self.matrix(dtype),
      None if layout == "rows" else self.columns(dtype),
    ]

  def scales(self) -> tuple:
    """Returns spec and shape of groups' scales [m, n / G]."""
    shape = self.m, self.n // self.group_size
    spec = self.tile.matrix(self.group_size)
    return spec, jax.ShapeDtypeStruct(shape, jnp.bfloat16)

  def bits(self) -> tuple:
    """Returns spec and shape of the tiles' maxima, one per program."""
    grid = self.tile.grid(self.m, self.n)
    axes = (0, 1) if self.tile.down else (1, 0)
    return self.tile.spec((1, 1), axes), jax.ShapeDtypeStruct(grid, jnp.int32)

  def sums(self) -> tuple:
    """Returns spec and shape of sums over a tile's rows, one row per tile."""
    shape = pl.cdiv(self.m, self.tile.rows), self.n
    spec = self.tile.spec((1, self.tile.columns), (0, 1))
    return spec, jax.ShapeDtypeStruct(shape, jnp.float32)

  def matrices(self, x: QTensor) -> tuple[Array, Array]:
    """Returns codes and scales as matrices of m rows."""
    return x.qvalue.reshape(self.m, -1), x.scale.reshape(self.m, -1)

  # --- In a kernel ---

  def mask(self) -> Array | None:
    tile = self.tile.rows, self.tile.columns
    return tiles.inside(tile, (self.m, self.n), self.tile.index())

  def load(self, ref) -> Array:
    """Loads a tile as f32, zeros outside the matrix."""
    return tiles.load(ref, self.mask())

  def load_groups(self, q_ref, scale_ref) -> Array:
    """Dequantizes a tile of codes, zeros outside the matrix."""
    scale = tiles.load(scale_ref, self._group_mask())
    return tiles.dequantize_groups(
      self.load(q_ref), scale, group_size=self.group_size
    )

  def store_groups(self, q_ref, scale_ref, x: Array) -> Array:
    """Quantizes and writes a tile; returns the dequantized values."""
    codes, scale = tiles.quantize_groups(
      x, group_size=self.group_size, dtype=q_ref.dtype
    )
    tiles.store(q_ref, codes, self.mask())
    tiles.store(scale_ref, scale, self._group_mask())
    return tiles.dequantize_groups(codes, scale, group_size=self.group_size)

  def _group_mask(self) -> Array | None:
    tile = self.tile.rows, self.tile.columns // self.group_size
    shape = self.m, self.n // self.group_size
    return tiles.inside(tile, shape, self.tile.index())

  def quantize(self, x: Array, scale_ref, dtype: DTypeLike) -> Array:
    """Quantizes a tile with the one scale in `scale_ref` [1]."""
    return ptx.quantize_with_scale(
      x, scale_ref[0], dtype=dtype, interpret=self.interpret
    )

  def store_sums(self, ref, x: Array) -> None:
    """Writes the sum over a tile's rows; x must be zero outside the matrix."""
    _, across = self.tile.index()
    mask = tiles.inside(ref.shape, (1, self.n), (0, across))
    tiles.store(ref, jnp.sum(x, axis=0)[None, :], mask)

  def store_operand(self, rows_ref, columns_ref, codes: Array) -> None:
    """Writes a tile of codes to the layouts whose refs are not None."""
    index, shape = self.tile.index(), (self.m, self.n)
    tiles.store_operand(rows_ref, columns_ref, codes, index, shape)


def split(outputs) -> dict[str, tuple]:
  """Turns pairs of spec and shape, or None, into arguments of `Work.run`."""
  outputs = [(None, None) if x is None else x for x in outputs]
  specs, shapes = zip(*outputs, strict=True)
  return {"out_specs": specs, "out_shape": shapes}


def why_not_values(x: QTensor) -> str | None:
  """Returns why kernels cannot read these 1 x G values, or None."""
  *leading, n = x.qvalue.shape
  group_size = x.group_size
  reason = tiles.why_not_format(
    x.qvalue.dtype, E4M3, E5M2
  ) or tiles.why_not_groups(x.qvalue.shape, group_size)
  if reason is not None or group_size is None:
    return reason
  if x.scale.shape != (*leading, n // group_size):
    return (
      f"the Triton kernel needs a scale per {group_size} values, got scales of "
      f"shape {x.scale.shape} for values of {x.qvalue.shape}"
    )
  return None
