# SPDX-License-Identifier: Apache-2.0
"""Loads whole rows, for kernels that sum over a row.

A program processes either one row, in parts (`RowPart`), or four rows, one in
each warp (`RowPerWarp`). With one row per warp, no warp waits for another.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.pallas.mosaic.row_ptx import LANES, VECTOR, WARPS
from coat_jax.pallas.mosaic.rows import Load, folded

_WIDEST = 8192  # For longer rows, registers would spill.
# On an H200, rows of 2048 values were faster with a program per row.
_WIDEST_PER_WARP = 1280


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


# --- One row per warp --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowPerWarp(Load):
  """Loads rows of `groups` groups as [4, groups, size], one row per warp."""

  groups: int = 0

  @property
  def at_once(self) -> int:
    """The number of groups that a warp loads at a time."""
    return LANES * self.vector // self.size

  @property
  def layout(self):
    # Mosaic supports no axis of size 1, so loading one group at a time needs
    # another layout.
    height = self.groups if self.at_once == 1 else self.at_once
    return plgpu.Layout.TILED(
      plgpu.Tiling(((WARPS, height, self.size), (self.vector,))),
      warp_dims=(-4,),
      lane_dims=(-2,) if self.at_once == 1 else (-3, -2),
      vector_dim=-1,
    )

  def combined(self, op: Callable, reduce: Callable, x: Array) -> Array:
    """Reduces each row to one value; `op` combines arrays, `reduce` an axis."""
    if self.at_once == 1:
      return reduce(reduce(x, axis=1), axis=1)
    # Each lane first combines its own values.
    parts = [
      x[:, i : i + self.at_once] for i in range(0, self.groups, self.at_once)
    ]
    return reduce(reduce(functools.reduce(op, parts), axis=2), axis=1)


def pick_per_warp(m: int, n: int, size: int) -> RowPerWarp | None:
  """Returns how warps load rows [m, n]; None if each row gets a program."""
  vector = VECTOR if n % (LANES * VECTOR) == 0 else VECTOR // 2
  # With fewer rows, `scales.maxima` needs several copies of each row's maximum.
  if m < WARPS * LANES or n > _WIDEST_PER_WARP or n % (LANES * vector):
    return None
  return RowPerWarp(size, vector, n // size)
