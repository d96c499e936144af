# SPDX-License-Identifier: Apache-2.0
"""The GPU kernel that `grouped_product` runs: a grouped (ragged) matmul.

As in `block_kernel`, one persistent program (thread block) per multiprocessor
computes one tile after another: one warpgroup loads blocks, and the others
multiply them and add the results in f32. While one adds, another can use the
tensor cores. A block is 128 bytes long along the summed axis: 128 FP8 codes or
64 values of 16 bits. Only the GPU knows how many rows a group has, so programs
read the positions of tiles from a table (`Entry`).

FP8 codes must have the summed axis last. Operands of 16 bits may have it first,
because the tensor cores can transpose them when they read shared memory.

A group may begin at any row. But copies into swizzled shared memory must begin
at a multiple of 8 rows or, along the summed axis, at a block's edge. Therefore:

  rows times weights   A tile may begin before its group, at a multiple of 8.
                       Rows of other groups are computed but not written.
  gradients of weights The matmul sums over rows, here called tokens. In a
                       group's first and last block, tokens of other groups are
                       set to zero in one of the two operands: FP8 codes when
                       they are read, 16-bit values in shared memory.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.numerics.scaling import BLOCK
from coat_jax.pallas.mosaic.grouped_ptx import own_codes
from coat_jax.pallas.mosaic.grouped_table import Entry
from coat_jax.pallas.mosaic.wgmma import (
  LAYOUT,
  REGISTERS,
  ROWS,
  in_128_bytes,
  in_band,
  rows_of_128_bytes,
)


@dataclasses.dataclass(frozen=True)
class Tile:
  """The shape of a tile, and how a program computes it."""

  warpgroups: int  # Number of warpgroups that multiply; each computes 64 rows.
  stages: int  # Number of blocks that shared memory holds.
  # The result is written in pieces of 64 rows of 128 bytes. This is the number
  # of pieces that shared memory holds for each warpgroup.
  slots: int = 2
  band: int = 12  # See `in_band`.

  @property
  def m(self) -> int:
    """The number of rows of a tile of the result."""
    return ROWS * self.warpgroups


@dataclasses.dataclass(frozen=True)
class Work:
  """Static parameters of one matmul, the same for all of its programs."""

  tile: Tile
  is_wgrad: bool  # Whether the result is the gradient of weights.
  rows_first: bool  # Whether that gradient is [D, E, F], not [E, D, F].
  tiles_m: int  # Number of tiles along m per group, for gradients of weights.
  tiles_n: int  # Number of tiles along n.
  depth: int  # Length of a block along the summed axis k.
  a_k_first: bool  # Whether a is [k, m] instead of [m, k].
  b_k_first: bool  # Whether b is [k, n] instead of [n, k].
  programs: int
  interpret: bool

  def count(self, used: Array) -> Array:
    """Returns how many tiles this program computes."""
    each = self.tiles_n * (self.tiles_m if self.is_wgrad else 1)
    left = used * each - lax.axis_index("program") + self.programs - 1
    return lax.div(left, jnp.int32(self.programs))

  def place(self, i: Array, used: Array) -> tuple[Array, Array, Array]:
    """Returns the i-th tile's table entry, index along m and first column.

    Unless `is_wgrad`, an entry has one tile along m, so this index is 0.
    """
    number = i * self.programs + lax.axis_index("program")
    tiles_m, entry = used, jnp.int32(0)
    if self.is_wgrad:
      per_entry = jnp.int32(self.tiles_m * self.tiles_n)
      entry, number = lax.div(number, per_entry), lax.rem(number, per_entry)
      tiles_m = jnp.int32(self.tiles_m)
    tile, j = in_band(number, tiles_m, self.tiles_n, self.tile.band)
    column = j * BLOCK
    return (entry, tile, column) if self.is_wgrad else (tile, entry, column)

  def a_place(self, rows: Any, block: Any) -> tuple[Any, Any]:
    """Returns the index of a block of operand a."""
    return (block, rows) if self.a_k_first else (rows, block)

  def b_place(self, columns: Any, block: Any) -> tuple[Any, Any]:
    """Returns the index of a block of operand b."""
    return (block, columns) if self.b_k_first else (columns, block)

  def slot(self, step: Array) -> Array:
    """Returns the stage of shared memory that holds the step-th block."""
    return lax.rem(step, jnp.int32(self.tile.stages))


class Memory(NamedTuple):
  """A program's shared memory and barriers, or their types."""

  # Blocks, for each stage.
  a_smem: Any
  b_smem: Any
  out_smem: Any  # Pieces of the result, for each warpgroup.
  edge_smem: Any  # For each warpgroup, 64 rows, of which some are copied.
  loaded: Any  # A barrier per stage: completes when its copies end.
  free: Any  # A barrier per stage: completes when all warpgroups have read.


def scratch(work: Work, a: DTypeLike, b: DTypeLike, out: DTypeLike) -> Memory:
  """Returns the types of a program's memory, given dtypes of a, b and out."""
  tile, stages = work.tile, work.tile.stages
  width = in_128_bytes(out)
  a_block = work.a_place(tile.m, work.depth)
  b_block = work.b_place(BLOCK, work.depth)
  edge = (1, 1, 128) if work.is_wgrad else (tile.warpgroups, ROWS, BLOCK)
  return Memory(
    a_smem=rows_of_128_bytes(stages, *a_block, dtype=a),
    b_smem=rows_of_128_bytes(stages, *b_block, dtype=b),
    out_smem=rows_of_128_bytes(
      tile.warpgroups, tile.slots, ROWS, width, dtype=out
    ),
    edge_smem=plgpu.SMEM(edge, out),
    loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    free=plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=stages),
  )


def run(work: Work, *refs, **scratch: Any) -> None:
  """Runs the kernel.

  `refs` are, in order: the fields of all `Entry`s [6, entries], the number of
  entries in use [1], a factor per group [E], the operands a and b, and the
  result. `scratch` holds the fields of `Memory`.
  """
  table, used, scale, a, b, out = refs
  memory = Memory(**scratch)
  num_entries = used[0]

  def entry_of(i):
    entry, tile, column = work.place(i, num_entries)
    found = Entry(*(table[k, entry] for k in range(len(Entry._fields))))
    row = tile * work.tile.m if work.is_wgrad else found.row
    return found._replace(row=row), column

  warpgroup, warpgroups = lax.axis_index("warpgroup"), work.tile.warpgroups
  to_multiply, to_load = REGISTERS[warpgroups]

  @pl.when(warpgroup == warpgroups)
  def _():
    plgpu.set_max_registers(to_load, action="decrease")

    def load(i, step):
      return _load_tile(work, *entry_of(i), step, a, b, memory)

    steps = lax.fori_loop(0, work.count(num_entries), load, jnp.int32(0))

    # The interpreter requires a wait for every arrival.
    def wait(i, _):
      _wait_for_free(work, steps + i, memory)

    lax.fori_loop(0, work.tile.stages, wait, None)

  @pl.when(warpgroup < warpgroups)
  def _():
    plgpu.set_max_registers(to_multiply, action="increase")

    def compute(i, step):
      entry, column = entry_of(i)
      step, total = _sum_blocks(work, entry, step, memory)
      total = total * scale[entry.group]
      write = _write_gradient if work.is_wgrad else _write_rows
      write(work, total, entry, column, memory, out)
      return step

    lax.fori_loop(0, work.count(num_entries), compute, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _wait_for_free(work: Work, step: Array, memory: Memory) -> None:
  slot = work.slot(step)
  pl.when(step >= work.tile.stages)(
    lambda: plgpu.barrier_wait(memory.free.at[slot])
  )


def _load_tile(
  work: Work, entry: Entry, column, step, a, b, memory: Memory
) -> Array:
  """Copies a tile's blocks to shared memory; returns the next step."""
  row = pl.multiple_of(entry.row, work.tile.m if work.is_wgrad else 8)
  rows, columns = pl.ds(row, work.tile.m), pl.ds(column, BLOCK)

  def load_block(j, step):
    slot = work.slot(step)
    block = pl.ds((entry.first + j) * work.depth, work.depth)
    _wait_for_free(work, step, memory)
    of_group = b if work.is_wgrad else b.at[entry.group]
    for source, smem in (
      (of_group.at[work.b_place(columns, block)], memory.b_smem),
      (a.at[work.a_place(rows, block)], memory.a_smem),
    ):
      plgpu.copy_gmem_to_smem(source, smem.at[slot], memory.loaded.at[slot])
    return step + 1

  return lax.fori_loop(0, entry.blocks, load_block, step)


def _sum_blocks(
  work: Work, entry: Entry, step: Array, memory: Memory
) -> tuple[Array, Array]:
  """Sums a warpgroup's blocks; returns the next step and f32 [64, 128]."""
  own = pl.ds(lax.axis_index("warpgroup") * ROWS, ROWS)
  own = work.a_place(own, pl.ds(0, work.depth))
  shape = ROWS, BLOCK

  def multiply(rows, columns, acc):
    plgpu.wgmma(acc, rows, columns if work.b_k_first else columns.T)
    return acc[...]

  def product(rows, columns):
    zeros = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(functools.partial(multiply, rows, columns), zeros)

  def product_of_own(rows, columns, start):
    """Multiplies the group's own tokens of a block that begins at `start`."""
    begin, end = entry.begin - start, entry.end - start
    if work.a_k_first or work.interpret:
      _clear_others(work, rows, begin, end)
      return product(rows.T if work.a_k_first else rows, columns)
    return lax.cond(
      (begin > 0) | (end < work.depth),
      lambda: product(own_codes(rows, begin, end), columns),
      lambda: product(rows, columns),
    )

  def add_block(j, carry):
    step, total = carry
    slot = work.slot(step)
    plgpu.barrier_wait(memory.loaded.at[slot])
    rows, columns = memory.a_smem.at[slot, *own], memory.b_smem.at[slot]
    if work.is_wgrad:
      start = (entry.first + j) * work.depth
      partial = product_of_own(rows, columns, start)
    else:
      partial = product(rows, columns)
    plgpu.barrier_arrive(memory.free.at[slot])
    # Tensor cores accumulate with fewer bits than f32 has. So they sum only
    # within a block, and the sums of blocks are added in f32.
    return step + 1, total + partial

  zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), LAYOUT)
  return lax.fori_loop(0, entry.blocks, add_block, (step, zero))


def _clear_others(work: Work, rows_smem, begin: Array, end: Array) -> None:
  """Sets tokens of a block to zero if they are outside [begin, end)."""

  @pl.when((begin > 0) | (end < work.depth))
  def _():
    axis = 0 if work.a_k_first else 1
    token = plgpu.broadcasted_iota(
      jnp.int32, rows_smem.shape, axis, layout=LAYOUT
    )
    values = plgpu.load(rows_smem, layout=LAYOUT, optimized=False)
    # Only the interpreter, which cannot run PTX, masks FP8 codes here.
    bits = jnp.int8 if values.dtype.itemsize == 1 else jnp.int16
    values = lax.bitcast_convert_type(values, bits)
    is_own = (token >= begin) & (token < end)
    keep = jnp.where(is_own, jnp.int32(-1), jnp.int32(0)).astype(bits)
    rows_smem[...] = lax.bitcast_convert_type(values & keep, rows_smem.dtype)
    plgpu.commit_smem()


def _write_gradient(work: Work, total, entry: Entry, column, memory, out):
  """Writes 64 rows of a group's weight gradient."""
  rows = pl.ds(entry.row + lax.axis_index("warpgroup") * ROWS, ROWS)

  def place(columns):
    if work.rows_first:
      return out.at[rows, entry.group, columns]
    return out.at[entry.group, rows, columns]

  _write_all(work, total, column, memory, place)


def _write_rows(work: Work, total, entry: Entry, column, memory, out):
  """Writes those of 64 rows that belong to the tile's group."""
  row = entry.row + lax.axis_index("warpgroup") * ROWS
  begin = jnp.maximum(entry.begin, row)
  end = jnp.minimum(entry.end, row + ROWS)
  is_whole = end - begin == ROWS

  @pl.when(is_whole)
  def _():
    rows = pl.ds(pl.multiple_of(row, 8), ROWS)
    place = lambda columns: out.at[rows, columns]  # noqa: E731
    _write_all(work, total, column, memory, place)

  @pl.when((begin < end) & ~is_whole)
  def _():
    _write_some(total, row, begin, end, column, memory, out)


def _write_all(work: Work, total, column, memory: Memory, place) -> None:
  """Writes 64 rows to `place(columns)`, in pieces that are 128 bytes wide."""
  width, slots = memory.out_smem.shape[-1], work.tile.slots
  # Slots are reused in turn, and the next call starts with slot 0 again.
  assert (BLOCK // width) % slots == 0
  for i, start in enumerate(range(0, BLOCK, width)):
    smem = memory.out_smem.at[lax.axis_index("warpgroup"), i % slots]
    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
    smem[...] = total[:, start : start + width].astype(smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, place(pl.ds(column + start, width)))


def _write_some(total, row, begin, end, column, memory: Memory, out) -> None:
  """Writes rows [begin, end) of the 64 rows that start at `row`.

  Copies must have static sizes, so it copies 32, 16, ..., 1 rows as needed.
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
