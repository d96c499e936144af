# SPDX-License-Identifier: Apache-2.0
"""Cuts the arrays of a leaf into blocks, in the order in which XLA stores them.

If a kernel read an array in another order, XLA would copy the array first. On a
TPU, XLA may reorder the axes of two kinds of arrays when it stores them:

  pair    [..., D, 2, F]: two planes [D, F], such as the weights of gate and
          up. XLA stores f32 or bf16 in this order, in tiles of 2 x 128, but
          bytes as [..., 2, D, F], in tiles of 32 x 128.
  stack   [L, D, n], such as the weights of L layers. XLA stores it as
          [D, L, n] if L fills tiles and D does not.
"""

import dataclasses
from typing import Any

from jax import Array
from jax.experimental import pallas as pl

LANES = 128
_TILE_ROWS = 32  # A TPU stores bytes in tiles of 32 x 128.
# Half of the VMEM that a kernel may use by default on v5e and v5p. The other
# half is for statistics and for values that the loop computes.
_VMEM_BYTES = 8 * 2**20


def is_paired(shape: tuple[int, ...]) -> bool:
  """Returns whether an array is a pair: [..., D, 2, F]."""
  return len(shape) > 2 and shape[-2] == 2


def is_stored_by_rows(shape: tuple[int, ...]) -> bool:
  """Returns whether XLA stores [L, D, n] as [D, L, n], which pads less."""
  is_stack = len(shape) == 3 and not is_paired(shape)
  return is_stack and shape[1] % 8 > 0 and shape[0] % _TILE_ROWS == 0


def lead_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the sizes of the axes before the rows and columns of matrices."""
  return shape[:-3] if is_paired(shape) else shape[:-2]


def num_rows(shape: tuple[int, ...]) -> int:
  """Returns the number of rows, or of pairs of rows, of a matrix."""
  return shape[-3] if is_paired(shape) else shape[-2]


def _has_planes_first(x: Array) -> bool:
  """Returns whether XLA stores the planes of a pair one after the other."""
  return is_paired(x.shape) and x.dtype.itemsize == 1


def view(x: Array) -> Array:
  """Reshapes to [matrices, D, n], in the order in which XLA stores the array.

  A pair becomes [matrices, D, 2, n], or [matrices, 2, D, n] for bytes.
  """
  lead = len(lead_axes(x.shape))
  if _has_planes_first(x):
    x = x.swapaxes(-2, -3)
  return x.reshape(-1, *x.shape[lead:])


def unview(x: Array, like: Array) -> Array:
  """Inverts `view`; `like` has the original shape and dtype."""
  if _has_planes_first(like):
    x = x.swapaxes(-2, -3)
  return x.reshape(like.shape)


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The height and width of blocks. A block of a pair spans both planes."""

  height: int
  width: int

  @classmethod
  def of(cls, arrays: list[Array]) -> "Blocks":
    """Returns blocks of up to 32 rows, as wide as VMEM allows."""
    shape = arrays[0].shape
    # A block occupies twice its size, because Pallas prefetches the next one.
    column_bytes = 2 * _TILE_ROWS * sum(x.dtype.itemsize for x in arrays)
    columns = _VMEM_BYTES // (column_bytes * (2 if is_paired(shape) else 1))
    return cls(
      min(num_rows(shape), _TILE_ROWS),
      min(shape[-1], columns // LANES * LANES),
    )

  def spec(self, x: Array, in_layer: int = 0) -> pl.BlockSpec:
    """Returns the block spec of a gradient, an update, a weight or codes.

    `in_layer` is the number of matrices per layer in an array that contains all
    layers. It is 0 for gradients and updates, which may contain only one layer.
    """
    return self._spec(x, self.width, in_layer)

  def whole_rows(self, x: Array, in_layer: int) -> pl.BlockSpec:
    """Returns the block spec of a statistic, with blocks of whole rows."""
    return self._spec(x, x.shape[-1], in_layer)

  def _spec(self, x: Array, width: int, in_layer: int) -> pl.BlockSpec:
    block: list[int | None] = [None, self.height, width]
    plane = 1 if _has_planes_first(x) else 2
    if is_paired(x.shape):
      block.insert(plane, 2)

    def index(matrix, row, column, place):
      at = [
        matrix + place[1] * in_layer,
        row,
        0 if width == x.shape[-1] else column,
      ]
      if is_paired(x.shape):
        at.insert(plane, 0)
      return tuple(at)

    return pl.BlockSpec(tuple(block), index)


def index_of(ref, plane: int | None, columns: Any = slice(None)) -> tuple:
  """Returns the index of these columns in a block, or in one of its planes."""
  if plane is None:
    return slice(None), columns
  if ref.dtype.itemsize == 1:
    return plane, slice(None), columns
  return slice(None), plane, columns
