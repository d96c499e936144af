# SPDX-License-Identifier: Apache-2.0
"""Second moments that are stored as means of rows and columns of tiles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from coat_jax.codecs.group import Encoded, Plain, divided
from coat_jax.numerics.qtensor import join_groups, split_groups

TILE_COLUMNS = 128
# If the rows are split into several tiles, each tile has at least `_LEAST_ROWS`
# rows. Kernels require a multiple of `_ROW_MULTIPLE` rows.
_LEAST_ROWS, _ROW_MULTIPLE = 192, 8
# A leaf is factored only if it has at least this many rows and columns.
_SHORTEST = 8
# If a leaf has three or more axes and the first is shorter than this, the first
# axis is assumed to be a stack of layers.
_MOST_LAYERS = 128
_PLAIN = Plain("float32")
_LARGEST = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True)
class Factored:
  """Stores a second moment v [..., n] as means of tiles' rows and columns.

  In a tile, v[i, j] decodes to rows[i] columns[j] / mean(columns), where
  rows[i] is the mean of row i, and columns[j] the mean of column j. This is
  exact if the tile has rank one. The last axis is the axis of columns, and the
  longest other axis is the axis of rows. If there are three or more axes, the
  first can be the axis of rows only if it has at least 128 entries, because a
  shorter first axis may be a stack of layers.

  A tile has 128 columns, or fewer at the end of a row. All tiles have the same
  number of rows: a multiple of 8, and at least 192. The number of tiles along
  the axis of rows is the largest power of two that allows this, or 1 if none
  does. Because it is a power of two, devices rarely split a tile.

  The fields of `Encoded` contain, for R rows:

    codes  a scalar zero
    amax   [..., R, ..., ceil(n / 128)], f32 means of the rows of each tile
    range  [..., tiles, ..., n], f32 means of the columns of each tile

  A leaf with one axis, or with fewer than 8 rows or columns, is stored by
  `Plain` in f32. A NaN makes the whole tile NaN.

  Encoding the decoded v gives the same means again, up to f32 rounding. So
  errors do not accumulate over steps if v is an average. They do accumulate if
  v is a maximum, such as `nu_max` in AMSGrad.

  Source: arXiv:1804.04235, section 3, applied to each tile.
  """

  @property
  def needs_noise(self) -> bool:
    return False

  def encode(self, x: Array, noise: Array | None) -> Encoded:
    row = row_axis(x.shape)
    if row is None:
      return _PLAIN.encode(x, noise)
    tiles = row_tiles(x.shape[row])
    return Encoded(jnp.uint8(0), *means(x, row, tiles))

  def zeros(self, shape: tuple[int, ...]) -> Encoded:
    """Returns the encoding of zeros, without allocating zeros of `shape`."""
    like = jax.eval_shape(
      lambda: self.encode(jnp.zeros(shape, jnp.float32), None)
    )
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

  def decode(self, encoded: Encoded) -> Array:
    if encoded.codes.dtype != jnp.uint8:
      return _PLAIN.decode(encoded)
    rows, columns = factors(encoded)
    row, shape = row_of(rows, columns), shape_of(rows, columns)
    rows = _spread_over_columns(rows, shape[-1])
    return product(rows, spread_over_rows(columns, row, shape[row]))


def factors(encoded: Encoded) -> tuple[Array, Array]:
  """Returns the means of rows, and column means divided by the tile's mean."""
  _, rows, columns = encoded
  mean = _spread_over_columns(_means_of_rows(columns), columns.shape[-1])
  return rows, divided(columns, mean)


def spread_over_rows(columns: Array, row: int, n: int) -> Array:
  """Repeats each column's values along the axis of rows, to length n."""
  before, after = columns.shape[:row], columns.shape[row + 1 :]
  tiles = columns.shape[row]
  x = jnp.expand_dims(columns, row + 1)
  x = jnp.broadcast_to(x, (*before, tiles, n // tiles, *after))
  return x.reshape(*before, n, *after)


def product(rows: Array, columns: Array) -> Array:
  """Multiplies the results of `factors`; clips to the largest finite f32."""
  return jnp.minimum(rows * columns, _LARGEST)


def means(x: Array, row: int, tiles: int) -> tuple[Array, Array]:
  """Returns the means of the rows and of the columns of all tiles.

  `tiles` is the number of tiles along the axis `row`.
  """
  before, after = x.shape[:row], x.shape[row + 1 :]
  height = x.shape[row] // tiles
  in_tiles = x.reshape(*before, tiles, height, *after)
  return _means_of_rows(x), jnp.sum(in_tiles * (1 / height), row + 1)


def shape_of(rows: Any, columns: Any) -> tuple[int, ...]:
  """Returns the shape of a leaf, given the arrays of its means."""
  return tuple(map(max, rows.shape, columns.shape))


def row_of(rows: Any, columns: Any) -> int:
  """Returns a leaf's axis of rows, given the arrays of its means.

  `row_axis` might return a different axis for a device's shard of the leaf.
  """
  pairs = zip(rows.shape[:-1], columns.shape, strict=False)
  return next(i for i, (n, tiles) in enumerate(pairs) if n != tiles)


def row_axis(shape: tuple[int, ...]) -> int | None:
  """Returns the axis of rows; None if a leaf is not factored."""
  if len(shape) < 2:
    return None
  is_stack = len(shape) > 2 and shape[0] < _MOST_LAYERS
  axes = range(1 if is_stack else 0, len(shape) - 1)
  row = max(axes, key=lambda i: shape[i])
  return None if min(shape[row], shape[-1]) < _SHORTEST else row


def row_tiles(rows: int) -> int:
  """Returns the number of tiles along an axis of rows; see `Factored`."""
  tiles = 1
  while rows % (2 * tiles * _ROW_MULTIPLE) == 0 and (
    rows >= 2 * tiles * _LEAST_ROWS
  ):
    tiles *= 2
  return tiles


def _means_of_rows(x: Array) -> Array:
  """Averages each row of each tile: [..., n] to [..., ceil(n / 128)]."""
  groups = split_groups(x, TILE_COLUMNS)
  begin = TILE_COLUMNS * np.arange(groups.shape[-2])
  counts = np.minimum(TILE_COLUMNS, x.shape[-1] - begin)
  counts = np.expand_dims(np.float32(counts), (*range(x.ndim - 1), x.ndim))
  # Dividing before the sum avoids an overflow.
  return jnp.sum(groups * (1 / counts), -1)


def _spread_over_columns(rows: Array, n: int) -> Array:
  """Repeats each row's values along the last axis, to length n."""
  shape = *rows.shape, TILE_COLUMNS
  return join_groups(jnp.broadcast_to(rows[..., None], shape), n)
