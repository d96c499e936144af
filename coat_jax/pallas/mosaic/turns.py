# SPDX-License-Identifier: Apache-2.0
"""Warpgroups that take turns: each computes one tile after another.

A multiprocessor runs one program. The compiler divides the registers of the
multiprocessor among the program's warpgroups, so more warpgroups run than if
each tile had its own program and as many registers as the compiler likes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.pallas.mosaic import device, registers, rows
from coat_jax.pallas.mosaic.ptx import TILE


def programs(count: int, interpret: bool) -> int:
  """Returns the number of programs that compute `count` tiles."""
  return min(count, 2 if interpret else device.multiprocessors())


def take_turns(
  compute: Callable[[Array, Array, Array], None],
  count: int,
  warpgroups: int,
  interpret: bool,
) -> None:
  """Calls `compute(turn, tile, next tile)` for each tile of this warpgroup.

  Tiles have numbers below `count`. If there is no next tile, its number is
  `count` or more. The kernel's axes must be "program" and "warpgroup".
  """
  workers = programs(count, interpret) * warpgroups
  first = _first_tile(count, interpret)

  def one(turn, _):
    tile = first + turn * workers
    compute(turn, tile, tile + workers)

  turns = lax.div(count - first + workers - 1, jnp.int32(workers))
  lax.fori_loop(0, turns, one, None)


def _first_tile(count: int, interpret: bool) -> Array:
  warpgroup = lax.axis_index("warpgroup")
  return warpgroup * programs(count, interpret) + lax.axis_index("program")


class Ahead(NamedTuple):
  """Shared memory into which warpgroups load their next tile."""

  # For each array: [warpgroups, 2, ROWS, GROUP_SIZE]. While a warpgroup
  # computes a tile in one of its two slots, the other slot is filled.
  slots: Sequence[Any]
  loaded: Any  # For each slot: a barrier that completes when it is filled.

  @classmethod
  def types(cls, dtypes: Sequence[DTypeLike], warpgroups: int) -> "Ahead":
    # Without transforms, Mosaic chooses a swizzle, with which it loads vectors
    # of 8 f32 values from wrong addresses.
    plain = plgpu.TilingTransform(TILE)  # pyright: ignore[reportAbstractUsage]
    shape = warpgroups, 2, *TILE
    return cls(
      [plgpu.SMEM(shape, dtype, transforms=(plain,)) for dtype in dtypes],
      plgpu.Barrier(num_arrivals=len(dtypes), num_barriers=2 * warpgroups),
    )

  def take_turns(
    self,
    compute: Callable[[Array, Callable[[Sequence], list[Array]]], None],
    parts: Callable[[Array], Sequence],
    count: int,
    interpret: bool,
  ) -> None:
    """Calls `compute(tile, load)` for each tile of this warpgroup.

    `parts(tile)` returns a tile's parts of arrays in global memory: values,
    which are loaded ahead, and statistics. `load(parts(tile))` loads both to
    registers.
    """
    warpgroup = lax.axis_index("warpgroup")

    def slot_of(turn):
      return lax.rem(turn, jnp.int32(2))

    def loaded(turn):
      return self.loaded.at[2 * warpgroup + slot_of(turn)]

    def fill(turn, tile):
      values = [part for part in parts(tile) if len(part.shape) == 2]
      for part, slots in zip(values, self.slots, strict=True):
        slot = slots.at[warpgroup, slot_of(turn)]
        plgpu.copy_gmem_to_smem(part, slot, loaded(turn))

    def fill_by_one_warp(turn, tile):
      # If all four warps ran these instructions to start one thread's copies,
      # the step would take 8 more instructions per value.
      @plgpu.warp_map
      def _(warp):
        pl.when((warp == 0) & (tile < count))(lambda: fill(turn, tile))

    def one(turn, tile, following):
      # All warps must have read the other slot before it is filled again.
      rows.barrier(interpret)
      fill_by_one_warp(turn + 1, following)

      def load(parts):
        statistics = [
          registers.load(part) for part in parts if len(part.shape) == 1
        ]
        plgpu.barrier_wait(loaded(turn))
        values = [
          registers.load(slots.at[warpgroup, slot_of(turn)])
          for slots in self.slots
        ]
        return [
          (statistics if len(part.shape) == 1 else values).pop(0)
          for part in parts
        ]

      compute(tile, load)

    fill_by_one_warp(jnp.int32(0), _first_tile(count, interpret))
    take_turns(one, count, self.slots[0].shape[0], interpret)
