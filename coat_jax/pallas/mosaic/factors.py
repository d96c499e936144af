# SPDX-License-Identifier: Apache-2.0
"""The factors of a second moment, in the form that optimizer kernels read."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from coat_jax.pallas.mosaic import registers
from coat_jax.pallas.mosaic.moment_codecs import Decoded
from coat_jax.pallas.mosaic.ptx import GROUP_SIZE, ROWS


class Sizes(NamedTuple):
  """Numbers of groups of 128 values in a factored moment."""

  columns: int  # Groups in one row of a matrix.
  matrix: int  # Groups in one matrix.

  @property
  def period(self) -> int:
    """Tiles that are this many groups apart contain the same columns."""
    return math.lcm(self.columns, ROWS)


class Factors(NamedTuple):
  """Two arrays whose product is a moment.

  Attributes:
    rows: f32 [..., R, A, 1]. A stands for any number of axes, or none.
    columns: f32 [..., 1, A, n].
  """

  rows: Array
  columns: Array

  def why_not(self) -> str | None:
    """Returns why kernels do not support these factors, or None."""
    if self.rows.shape[-1] != 1:
      return "a factored moment's columns must be its last axis"
    sizes = self.sizes()
    if sizes.matrix % sizes.period:
      rows = sizes.period // sizes.columns
      return (
        f"a factored matrix must have a multiple of {rows} rows, got "
        f"{sizes.matrix // sizes.columns}"
      )
    return None

  def in_groups(self) -> tuple["Factors", Sizes]:
    """Returns each group's row factor [groups], and column factors [..., 128].

    A tile may begin in one row and end in the next, so each matrix's column
    factors are followed by a copy of their first 7 groups.
    """
    shape, sizes = self._shape(), self.sizes()
    columns = self.columns.reshape(-1, sizes.columns, GROUP_SIZE)
    places = jnp.arange(sizes.columns + ROWS - 1) % sizes.columns
    rows = jnp.broadcast_to(self.rows, (*shape[:-1], shape[-1] // GROUP_SIZE))
    columns = columns[:, places].reshape(-1, GROUP_SIZE)
    return Factors(rows.reshape(-1), columns), sizes

  def _shape(self) -> tuple[int, ...]:
    return jnp.broadcast_shapes(self.rows.shape, self.columns.shape)

  def sizes(self) -> Sizes:
    shape = self._shape()
    row = next(i for i, n in enumerate(shape) if n > self.columns.shape[i])
    columns, matrix = math.prod(shape[row + 1 :]), math.prod(shape[row:])
    return Sizes(columns // GROUP_SIZE, matrix // GROUP_SIZE)


def load(rows_gmem, columns_gmem, sizes: Sizes, start) -> Decoded:
  """Loads the moment of the tile at group `start`."""
  matrix = start // sizes.matrix
  place = matrix * (sizes.columns + ROWS - 1) + start % sizes.columns
  return Decoded(
    values=registers.load(columns_gmem, place),
    factor=registers.load(rows_gmem, start),
  )
