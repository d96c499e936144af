# SPDX-License-Identifier: Apache-2.0
"""Code that the GPU kernels for grouped matmuls share (`grouped_product`).

As in `block_kernel`, one persistent program (thread block) per multiprocessor
computes one tile of the result after another. One warpgroup loads blocks; the
others multiply them and add the products in f32. While one warpgroup adds,
another can use the tensor cores. Along the summed axis, a block is 128 bytes
long: 128 FP8 codes or 64 values of 16 bits. Only the GPU knows how many rows a
group has, so programs read the positions of tiles from a table (`Entry`).

In FP8 operands, the summed axis must be last. In 16-bit operands, it may also
be first, because tensor cores can transpose 16-bit values as they read them.

A group may begin at any row. But copies into swizzled shared memory must begin
at a multiple of 8 rows or, along the summed axis, at a multiple of a block's
length. `grouped_rows` and `grouped_gradient` describe how they solve this.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.numerics.scaling import BLOCK
from coat_jax.pallas.mosaic.grouped_table import Entry
from coat_jax.pallas.mosaic.ring import Ring
from coat_jax.pallas.mosaic.wgmma import (
  LAYOUT,
  REGISTERS,
  ROWS,
  in_128_bytes,
  swizzled_rows,
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
  tiles: int  # Number of tiles per entry of the table; in gradients, per run.
  tiles_n: int  # Number of tiles along n.
  depth: int  # Length of a block along the summed axis k.
  a_k_first: bool  # Whether a is [k, m] instead of [m, k].
  b_k_first: bool  # Whether b is [k, n] instead of [n, k].
  programs: int
  interpret: bool
  # Only for gradients of weights:
  run: int = 0  # Number of consecutive groups that a program computes in turn.
  rows_first: bool = False  # Whether the result is [D, E, F], not [E, D, F].

  def a_place(self, rows: Any, block: Any) -> tuple[Any, Any]:
    """Returns the index of a block of operand a."""
    return (block, rows) if self.a_k_first else (rows, block)

  def b_place(self, columns: Any, block: Any) -> tuple[Any, Any]:
    """Returns the index of a block of operand b."""
    return (block, columns) if self.b_k_first else (columns, block)


class Arrays(NamedTuple):
  """The kernel's arguments and its result, in the GPU's memory."""

  table: Any  # int32 [fields of `Entry`, entries]
  used: Any  # [1]: number of entries in use or, for gradients, of runs.
  scale: Any  # A factor per group, f32 [E].
  a: Any
  b: Any
  out: Any

  def entry(self, i: Array) -> Entry:
    """Reads one entry of the table."""
    return Entry(*(self.table[k, i] for k in range(len(Entry._fields))))


class Memory(NamedTuple):
  """A program's shared memory and barriers, or their types."""

  ring: Any  # Blocks of a and b.
  out_smem: Any  # Pieces of the result, for each warpgroup.
  # For each warpgroup, 64 rows of the result, if only some of them are written
  # (not used for gradients).
  edge_smem: Any


def scratch(work: Work, a: DTypeLike, b: DTypeLike, out: DTypeLike) -> Memory:
  """Returns the types of a program's memory, given dtypes of a, b and out."""
  tile, stages = work.tile, work.tile.stages
  width = in_128_bytes(out)
  a_block = work.a_place(tile.m, work.depth)
  b_block = work.b_place(BLOCK, work.depth)
  edge = (1, 1, 128) if work.run else (tile.warpgroups, ROWS, BLOCK)
  return Memory(
    ring=Ring.types(
      (
        swizzled_rows(stages, *a_block, dtype=a),
        swizzled_rows(stages, *b_block, dtype=b),
      ),
      readers=tile.warpgroups,
    ),
    out_smem=swizzled_rows(tile.warpgroups, tile.slots, ROWS, width, dtype=out),
    edge_smem=plgpu.SMEM(edge, out),
  )


# A function of (work, arrays, memory, number, step) that loads or computes tile
# `number` and returns the next step. Steps count the blocks that a program
# loads; `step` is the tile's first block.
Part = Callable[[Work, Arrays, Memory, Array, Array], Array]


def run(work: Work, load: Part, compute: Part, *refs, **scratch: Any) -> None:
  """Runs the kernel; `refs` and `scratch` hold `Arrays` and `Memory`."""
  arrays, memory = Arrays(*refs), Memory(**scratch)
  program, programs = lax.axis_index("program"), jnp.int32(work.programs)
  count = arrays.used[0] * work.tiles - program + programs - 1
  count = lax.div(count, programs)

  def for_all_tiles(part: Part) -> Array:
    one = lambda i, step: part(  # noqa: E731
      work, arrays, memory, i * programs + program, step
    )
    return lax.fori_loop(0, count, one, jnp.int32(0))

  warpgroup, warpgroups = lax.axis_index("warpgroup"), work.tile.warpgroups
  to_multiply, to_load = REGISTERS[warpgroups]

  @pl.when(warpgroup == warpgroups)
  def _():
    plgpu.set_max_registers(to_load, action="decrease")
    memory.ring.drain(for_all_tiles(load))

  @pl.when(warpgroup < warpgroups)
  def _():
    plgpu.set_max_registers(to_multiply, action="increase")
    for_all_tiles(compute)
    plgpu.wait_smem_to_gmem(0)


def load_blocks(
  work: Work, a_rows, b_columns, first, count, step, a, b, memory: Memory
) -> Array:
  """Copies `count` blocks, starting with `first`; returns the next step."""

  def load_block(j, step):
    block = pl.ds((first + j) * work.depth, work.depth)
    memory.ring.load(
      step,
      a.at[work.a_place(a_rows, block)],
      b.at[work.b_place(b_columns, block)],
    )
    return step + 1

  return lax.fori_loop(0, count, load_block, step)


def blocks_at(work: Work, step: Array, memory: Memory) -> tuple[Any, Any]:
  """Returns a step's blocks: only this warpgroup's rows of a, but all of b."""
  own = pl.ds(lax.axis_index("warpgroup") * ROWS, ROWS)
  own = work.a_place(own, pl.ds(0, work.depth))
  a, b = memory.ring.at(step)
  return a.at[*own], b


def product(work: Work, rows, columns) -> Array:
  """Multiplies two blocks on the tensor cores; returns f32 [64, 128].

  `rows` are in registers, or in shared memory as `blocks_at` returns them.
  """

  def multiply(rows, acc):
    plgpu.wgmma(acc, rows, columns if work.b_k_first else columns.T)
    return acc[...]

  zeros = plgpu.ACC((ROWS, BLOCK), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
  return pl.run_scoped(functools.partial(multiply, rows), zeros)


def zero_sum() -> Array:
  """Returns zeros, f32 [64, 128], to which products are added.

  Tensor cores accumulate with fewer bits than f32 has. So they sum only within
  a block, and the sums of blocks are added in f32.
  """
  return plgpu.layout_cast(jnp.zeros((ROWS, BLOCK), jnp.float32), LAYOUT)


def write_all(work: Work, total, column, memory: Memory, place) -> None:
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
