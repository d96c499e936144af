# SPDX-License-Identifier: Apache-2.0
"""Splits a row into parts to load, for kernels that sum over a row."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.pallas.mosaic.row_ptx import LANES
from coat_jax.pallas.mosaic.rows import Load, folded

_WIDEST = 8192  # For longer rows, registers would spill.


@dataclasses.dataclass(frozen=True)
class RowPart:
  """Consecutive groups of a row that a program loads together."""

  load: Load
  first: int  # Index of the first group in the row.
  count: int  # Number of groups in this part.
  # Number of leading groups that the previous part also contains. The last part
  # begins early if fewer groups are left than a load reads.
  known: int
  groups: int  # Number of groups in the row.

  def of_row(self, row: Array):
    """Returns the slice of this part in the list of all rows' groups."""
    return pl.ds(row * self.groups + self.first, self.count)

  @property
  def of_vector(self):
    """The slice of this part in a vector from `in_groups`."""
    return pl.ds(self.first, self.count)


def row_parts(n: int, size: int) -> list[RowPart]:
  """Splits a row of n values, in groups of `size`, into parts to load."""
  load = _pick_load(n, size)
  groups = n // size
  whole = groups // load.count * load.count
  found = [RowPart(load, 0, whole, 0, groups)]
  if whole < groups:
    first = groups - load.count
    found.append(RowPart(load, first, load.count, whole - first, groups))
  return found


def _pick_load(n: int, size: int) -> Load:
  """Picks the largest load among those that read the fewest values twice."""
  fits = [load for load in _loads(size) if load.count * size <= n]
  return min(fits, key=lambda load: pl.cdiv(n, load.count * size) * load.vector)


def _loads(size: int) -> list[Load]:
  """Returns the loads in which each warp holds whole groups, largest first."""
  vectors = (vector for vector in (8, 4, 2) if size <= LANES * vector)
  return [Load(size, vector) for vector in vectors]


def in_groups(vector: Array | None, size: int) -> Array | None:
  """Reshapes a vector with one value per column to groups [n / size, size]."""
  return None if vector is None else vector.reshape(-1, size)


def sum_of_row(parts: list[RowPart], values: list[Array]) -> Array:
  """Returns the sum of a row, f32 []; `values` are [count, G] for each part."""
  total = jnp.float32(0)
  for part, x in zip(parts, values, strict=True):
    if part.known:
      layout = part.load.layout
      group = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
      x = jnp.where(group < part.known, 0.0, x)
    total = total + jnp.sum(
      jnp.sum(folded(jnp.add, x, part.load.count), axis=1)
    )
  return total


def why_not_row(shape: tuple[int, ...], size: int) -> str | None:
  """Returns why a program cannot load a row in groups of `size`, or None."""
  smallest = _loads(size)[-1]
  least = smallest.count * size
  if not least <= shape[-1] <= _WIDEST:
    return (
      f"the Mosaic kernel supports rows of {least} to {_WIDEST} values, got "
      f"{shape[-1]}"
    )
  return None
