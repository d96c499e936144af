# SPDX-License-Identifier: Apache-2.0
"""Cuts whole rows into loads, for kernels that need sums over a row."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.pallas.mosaic.row_ptx import LANES
from coat_jax.pallas.mosaic.rows import Load, folded

_WIDEST = 8192  # The registers of longer rows would spill.


@dataclasses.dataclass(frozen=True)
class RowPart:
  """A part of each row, in groups, that a program loads at once.

  The last part may overlap the one before it: its first `known` groups are the
  other's too.
  """

  load: Load
  first: int
  count: int
  known: int
  groups: int  # Of a whole row.

  def of_row(self, row: Array):
    """Returns where the part of a row is in a list of all rows' groups."""
    return pl.ds(row * self.groups + self.first, self.count)

  @property
  def of_vector(self):
    """Returns where the part is in a vector with one value per column."""
    return pl.ds(self.first, self.count)


def row_parts(n: int, size: int) -> list[RowPart]:
  """Cuts rows of n values in groups of `size` into loads of a program."""
  load = _pick_load(n, size)
  groups = n // size
  whole = groups // load.count * load.count
  found = [RowPart(load, 0, whole, 0, groups)]
  if whole < groups:
    first = groups - load.count
    found.append(RowPart(load, first, load.count, whole - first, groups))
  return found


def _pick_load(n: int, size: int) -> Load:
  """Picks the loads that overlap least; among those, the largest."""
  fits = [load for load in _loads(size) if load.count * size <= n]
  return min(fits, key=lambda load: pl.cdiv(n, load.count * size) * load.vector)


def _loads(size: int) -> list[Load]:
  """Returns the loads that hold whole groups in each warp, largest first."""
  vectors = (vector for vector in (8, 4, 2) if size <= LANES * vector)
  return [Load(size, vector) for vector in vectors]


def in_groups(vector: Array | None, size: int) -> Array | None:
  """Views a vector with one value per column as groups."""
  return None if vector is None else vector.reshape(-1, size)


def sum_of_row(parts: list[RowPart], values: list[Array]) -> Array:
  """Sums a row, f32 [], of which `values` are the parts, [count, G] each."""
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
  """Returns why rows in groups of `size` do not fit in a program, or None."""
  smallest = _loads(size)[-1]
  least = smallest.count * size
  if shape and not least <= shape[-1] <= _WIDEST:
    return (
      f"the kernel of Mosaic holds rows of {least} to {_WIDEST}, got "
      f"{shape[-1]}"
    )
  return None
