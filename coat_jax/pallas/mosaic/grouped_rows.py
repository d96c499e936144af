# SPDX-License-Identifier: Apache-2.0
"""Kernel that multiplies rows by the weights of their groups.

A tile must begin at a multiple of 8 rows, so it may begin before its group.
Rows of other groups are computed but not written.
"""

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
from coat_jax.pallas.mosaic.grouped_table import Entry
from coat_jax.pallas.mosaic.wgmma import ROWS, in_band


def _place(work: Work, arrays: Arrays, number: Array) -> tuple[Entry, Array]:
  """Returns a tile's table entry and its first column."""
  tile, column = in_band(number, arrays.used[0], work.tiles_n, work.tile.band)
  return arrays.entry(tile), column * BLOCK


def load(
  work: Work, arrays: Arrays, memory: Memory, number: Array, step: Array
) -> Array:
  """Loads the blocks of a tile; see `grouped_kernel.Part`."""
  entry, column = _place(work, arrays, number)
  rows = pl.ds(pl.multiple_of(entry.row, 8), work.tile.m)
  return load_blocks(
    work,
    rows,
    pl.ds(column, BLOCK),
    entry.first,
    entry.blocks,
    step,
    arrays.a,
    arrays.b.at[entry.group],
    memory,
  )


def compute(
  work: Work, arrays: Arrays, memory: Memory, number: Array, step: Array
) -> Array:
  """Computes and writes a tile; see `grouped_kernel.Part`."""
  entry, column = _place(work, arrays, number)

  def add_block(_, carry):
    step, total = carry
    memory.ring.wait(step)
    partial = product(work, *blocks_at(work, step, memory))
    memory.ring.release(step, work.interpret)
    return step + 1, total + partial

  step, total = lax.fori_loop(0, entry.blocks, add_block, (step, zero_sum()))
  total = total * arrays.scale[entry.group]
  _write(work, total, entry, column, memory, arrays.out)
  return step


def _write(work: Work, total, entry: Entry, column, memory: Memory, out):
  """Writes those of a warpgroup's 64 rows that belong to the tile's group."""
  row = entry.row + lax.axis_index("warpgroup") * ROWS
  begin = jnp.maximum(entry.begin, row)
  end = jnp.minimum(entry.end, row + ROWS)
  is_whole = end - begin == ROWS

  @pl.when(is_whole)
  def _():
    rows = pl.ds(pl.multiple_of(row, 8), ROWS)
    place = lambda columns: out.at[rows, columns]  # noqa: E731
    write_all(work, total, column, memory, place)

  @pl.when((begin < end) & ~is_whole)
  def _():
    _write_some(total, row, begin, end, column, memory, out)


def _write_some(total, row, begin, end, column, memory: Memory, out) -> None:
  """Writes rows [begin, end) of the 64 rows that start at `row`.

  Copies must have static sizes: 32, 16, 8, 4, 2 and 1 rows, each if needed.
  """
  smem = memory.edge_smem.at[lax.axis_index("warpgroup")]
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  smem[...] = total.astype(smem.dtype)
  plgpu.commit_smem()
  count, columns = end - begin, pl.ds(column, BLOCK)
  for size in (32, 16, 8, 4, 2, 1):
    done = count & ~(2 * size - 1)  # Rows that larger copies write.

    @pl.when(count & size != 0)
    def _(size=size, done=done):
      source = smem.at[pl.ds(begin - row + done, size)]
      plgpu.copy_smem_to_gmem(
        source, out.at[pl.ds(begin + done, size), columns]
      )
