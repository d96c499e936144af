# SPDX-License-Identifier: Apache-2.0
"""Kernel that computes each group's weight gradient.

A group's gradient is a sum over its rows, here called tokens, which are loaded
in blocks. Blocks begin at multiples of their length, so a group's first and
last block may contain tokens of other groups. In operand a, which is x, these
tokens are set to zero: FP8 codes in registers, 16-bit values in shared memory.

A program computes the same tile for a run of consecutive groups. In FP8, groups
of a run that share a block load it only once. That matters because loads limit
the speed: 8 groups of 512 tokens need up to 5 blocks of 128 each, but together
at most 33. In 16 bits, a run is only one group, because setting tokens to zero
in shared memory destroys those of the next group.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.numerics.scaling import BLOCK
from coat_jax.pallas.mosaic.grouped_kernel import (
  Arrays,
  Memory,
  Work,
  blocks_at,
  load_blocks,
  product,
  write_all,
  zero_sum,
)
from coat_jax.pallas.mosaic.grouped_ptx import own_codes
from coat_jax.pallas.mosaic.grouped_table import Entry
from coat_jax.pallas.mosaic.wgmma import LAYOUT, ROWS, in_band


class _Place(NamedTuple):
  first: Array  # Index of the run's first group.
  last: Array  # Index of the run's last group.
  row: Array  # The tile's first row in each gradient.
  column: Array  # The tile's first column in each gradient.


def _place(work: Work, arrays: Arrays, number: Array) -> _Place:
  tiles = jnp.int32(work.tiles)
  run, number = lax.div(number, tiles), lax.rem(number, tiles)
  tile, column = in_band(
    number, jnp.int32(work.tiles // work.tiles_n), work.tiles_n, work.tile.band
  )
  first = run * work.run
  last = jnp.minimum(first + work.run, arrays.table.shape[1]) - 1
  return _Place(first, last, tile * work.tile.m, column * BLOCK)


def load(
  work: Work, arrays: Arrays, memory: Memory, number: Array, step: Array
) -> Array:
  """Loads the blocks of a run; see `grouped_kernel.Part`."""
  place = _place(work, arrays, number)
  first, last = arrays.entry(place.first), arrays.entry(place.last)
  end = lax.div(last.end + work.depth - 1, jnp.int32(work.depth))
  return load_blocks(
    work,
    pl.ds(pl.multiple_of(place.row, work.tile.m), work.tile.m),
    pl.ds(place.column, BLOCK),
    first.first,
    jnp.where(first.begin < last.end, end - first.first, 0),
    step,
    arrays.a,
    arrays.b,
    memory,
  )


def compute(
  work: Work, arrays: Arrays, memory: Memory, number: Array, step: Array
) -> Array:
  """Computes and writes the tiles of a run; see `grouped_kernel.Part`."""
  place = _place(work, arrays, number)

  def compute_group(i, carry):
    step, is_held = carry
    step, is_held, total = _sum_tokens(
      work, arrays.entry(i), step, is_held, memory
    )
    total = total * arrays.scale[i]
    _write(work, total, i, place, memory, arrays.out)
    return step, is_held

  carry = step, jnp.bool_(False)
  step, is_held = lax.fori_loop(
    place.first, place.last + 1, compute_group, carry
  )
  _release(work, step, is_held, memory)
  return step + jnp.where(is_held, 1, 0)


def _sum_tokens(
  work: Work, entry: Entry, step: Array, is_held: Array, memory: Memory
) -> tuple[Array, Array, Array]:
  """Multiplies a group's blocks, and sums the products.

  If the last block also contains tokens after the group, the block is held: it
  stays in shared memory for the next group.

  Args:
    step: the group's first step.
    is_held: whether the previous group holds the block of this step.

  Returns:
    The next group's first step, whether that step's block is held, and the sum,
    f32 [64, 128].
  """

  def add_block(j, carry):
    step, is_held, total = carry
    pl.when(~is_held)(lambda: memory.ring.wait(step))
    start = (entry.first + j) * work.depth
    partial = _product_of_own(
      work, entry.begin - start, entry.end - start, step, memory
    )
    is_held = entry.end < start + work.depth
    _release(work, step, ~is_held, memory)
    return step + jnp.where(is_held, 0, 1), is_held, total + partial

  carry = step, is_held, zero_sum()
  return lax.fori_loop(0, entry.blocks, add_block, carry)


def _release(work: Work, step: Array, condition: Array, memory: Memory) -> None:
  pl.when(condition)(lambda: memory.ring.release(step, work.interpret))


def _product_of_own(work: Work, begin, end, step, memory: Memory) -> Array:
  """Multiplies tokens [begin, end) of a step's blocks."""
  rows, columns = blocks_at(work, step, memory)
  if work.a_k_first:
    _clear_others(work, rows, begin, end)
    return product(work, rows.T, columns)
  if work.interpret:  # The interpreter cannot multiply values in registers.
    saved = plgpu.load(rows, layout=LAYOUT, optimized=False)
    _clear_others(work, rows, begin, end)
    found = product(work, rows, columns)
    rows[...] = saved
    plgpu.commit_smem()
    return found
  return lax.cond(
    (begin > 0) | (end < work.depth),
    lambda: product(work, own_codes(rows, begin, end), columns),
    lambda: product(work, rows, columns),
  )


def _clear_others(work: Work, rows_smem, begin: Array, end: Array) -> None:
  """Sets tokens of a block to zero if they are outside [begin, end)."""

  @pl.when((begin > 0) | (end < work.depth))
  def _():
    axis = 0 if work.a_k_first else 1
    token = plgpu.broadcasted_iota(
      jnp.int32, rows_smem.shape, axis, layout=LAYOUT
    )
    values = plgpu.load(rows_smem, layout=LAYOUT, optimized=False)
    # FP8 codes get here only in the interpreter, which cannot run PTX.
    bits = jnp.int8 if values.dtype.itemsize == 1 else jnp.int16
    values = lax.bitcast_convert_type(values, bits)
    is_own = (token >= begin) & (token < end)
    keep = jnp.where(is_own, jnp.int32(-1), jnp.int32(0)).astype(bits)
    rows_smem[...] = lax.bitcast_convert_type(values & keep, rows_smem.dtype)
    plgpu.commit_smem()


def _write(work: Work, total, group, place: _Place, memory, out) -> None:
  """Writes 64 rows of a group's gradient; copies omit rows past its end."""
  rows = pl.ds(place.row + lax.axis_index("warpgroup") * ROWS, ROWS)

  def where(columns):
    if work.rows_first:
      return out.at[rows, group, columns]
    return out.at[group, rows, columns]

  write_all(work, total, place.column, memory, where)
