# SPDX-License-Identifier: Apache-2.0
"""The factors of a second moment, in the form that optimizer kernels read.

A row of `codecs.factored`'s tiles is called a strip here. In kernels, a tile is
8 groups of 128 values.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from coat_jax.codecs import factored
from coat_jax.codecs.group import Encoded
from coat_jax.pallas.mosaic import registers
from coat_jax.pallas.mosaic.moment_codecs import Decoded
from coat_jax.pallas.mosaic.ptx import GROUP_SIZE, ROWS


class Sizes(NamedTuple):
  """How a factored leaf is cut into strips."""

  rows: int  # Rows of a strip.
  columns: int  # Groups of 128 values in one row of the matrix.

  @classmethod
  def of(cls, nu: Encoded) -> "Sizes":
    """Returns the sizes of a factored moment."""
    _, rows, columns = nu
    shape = factored.shape_of(rows, columns)
    row = factored.row_of(rows, columns)
    height = shape[row] // columns.shape[row]
    return cls(height, math.prod(shape[row + 1 :]) // GROUP_SIZE)

  @property
  def period(self) -> int:
    """Number of groups after which tiles contain the same columns again."""
    return math.lcm(self.columns, ROWS)

  @property
  def period_rows(self) -> int:
    return self.period // self.columns

  @property
  def periods(self) -> int:
    """The number of periods in a strip."""
    return self.rows // self.period_rows

  def why_not(self) -> str | None:
    """Returns why kernels do not support a moment of this size, or None."""
    if self.rows % self.period_rows:
      return (
        "the number of rows of a factored matrix must be a multiple of "
        f"{self.period_rows}, got {self.rows}"
      )
    return None


class Factors(NamedTuple):
  """Two arrays whose product is a moment.

  Attributes:
    rows: f32 [groups], one factor for each group.
    columns: f32 [strips * (Sizes.columns + 7), 128], one factor for each column
      of each strip. After a strip's factors comes a copy of their first 7
      groups, because a tile may begin in one row and end in the next.
  """

  rows: Array
  columns: Array

  @classmethod
  def of(cls, nu: Encoded, sizes: Sizes) -> "Factors":
    rows, columns = factored.factors(nu)
    columns = columns.reshape(-1, sizes.columns, GROUP_SIZE)
    places = jnp.arange(sizes.columns + ROWS - 1) % sizes.columns
    return cls(rows.reshape(-1), columns[:, places].reshape(-1, GROUP_SIZE))


def load(rows_gmem, columns_gmem, sizes: Sizes, start) -> Decoded:
  """Loads the moment of the tile at group `start`."""
  strip = start // (sizes.rows * sizes.columns)
  place = strip * (sizes.columns + ROWS - 1) + start % sizes.columns
  return Decoded(
    values=registers.load(registers.part(columns_gmem, place)),
    factor=registers.load(registers.part(rows_gmem, start)),
  )
