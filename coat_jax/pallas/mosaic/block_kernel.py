# SPDX-License-Identifier: Apache-2.0
"""The GPU kernel that `block_product` runs: a block-scaled FP8 matmul.

One persistent program (thread block) per multiprocessor computes one tile of
the result after another. A tile's rows are split into waves of 128. One of the
program's three warpgroups prefetches blocks of a and b (128 long along k) and
their scales into shared memory. Each of the other two warpgroups computes 64
rows of every wave. For each block and wave, it

  1. runs four wgmma of m64n128k32,
  2. multiplies the result by the scales of a and b, and
  3. adds the product in f32 to the total in its registers.

While one warpgroup scales and adds, the other uses the tensor cores, as in
DeepGEMM (arXiv:2412.19437, section 3.3.2).

In a tile of 256 rows, each block costs (compiled for an H200, jax 0.11.2)

  1024 clocks  of the tensor cores
  48 KiB       read from the L2 cache; 32 KiB if two programs share a
  221          instructions per warp, of which 128 are multiply-adds; 376
               instructions if b has one scale per row
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.numerics.scaling import BLOCK
from coat_jax.pallas.mosaic.wgmma import (
  LAYOUT,
  REGISTERS,
  ROWS,
  WARPGROUPS,
  WAVE,
  in_128_bytes,
  in_band,
  swizzled_rows,
)

# If b has one scale per 128 rows, each scale is stored this many times, because
# the size of a copy to shared memory must be a multiple of 16 bytes.
COPIES = 4
_PADDED = 32  # Number of f32 in the buffer for these copies (128 bytes).


@dataclasses.dataclass(frozen=True)
class Tile:
  """The shape of a tile, and how a program computes it."""

  waves: int = 2  # Number of waves (128 rows each) in a tile.
  stages: int = 3  # Number of blocks of k that shared memory holds.
  # The result is written in pieces of 64 rows of 128 bytes. This is the number
  # of pieces that shared memory holds for each warpgroup.
  slots: int = 4
  # Number of programs in a cluster. They compute adjacent tiles along n, and
  # share copies of a.
  cluster: int = 1
  band: int = 8  # See `in_band`.

  @property
  def m(self) -> int:
    """The number of rows of a tile of the result."""
    return WAVE * self.waves

  @property
  def n(self) -> int:
    """The number of columns that a cluster computes at a time."""
    return BLOCK * self.cluster

  def fits(self, m: int, n: int) -> bool:
    """Returns whether whole tiles cover [m, n]."""
    return m % self.m == 0 and n % self.n == 0


@dataclasses.dataclass(frozen=True)
class Work:
  """Static parameters of one matmul, the same for all of its programs."""

  tile: Tile
  tiles_m: int  # Number of tiles along m.
  tiles_n: int  # Number of tiles along n; a cluster's tiles count as one.
  blocks: int  # Number of blocks along k.
  clusters: int  # Number of clusters.
  is_b_tiled: bool  # Whether b has one scale per 128 rows, not one per row.
  interpret: bool

  def count(self) -> Array:
    """Returns how many tiles this program computes."""
    tiles = self.tiles_m * self.tiles_n
    left = tiles - lax.axis_index("program") + self.clusters - 1
    return lax.div(left, jnp.int32(self.clusters))

  def place(self, i: Array) -> tuple[Array, Array]:
    """Returns the first row and first column of this program's i-th tile."""
    number = i * self.clusters + lax.axis_index("program")
    i, j = in_band(number, self.tiles_m, self.tiles_n, self.tile.band)
    column = j * self.tile.n + lax.axis_index("cluster") * BLOCK
    return i * self.tile.m, column

  def slot(self, step: Array) -> Array:
    """Returns the stage of shared memory that holds the step-th block."""
    return lax.rem(step, jnp.int32(self.tile.stages))


class Memory(NamedTuple):
  """A program's shared memory and barriers, or their types."""

  # Blocks and their scales, for each stage.
  a_smem: Any
  b_smem: Any
  a_scale_smem: Any
  b_scale_smem: Any
  out_smem: Any  # Pieces of the result, for each warpgroup.
  loaded: Any  # A barrier per wave and stage: completes when its copies end.
  free: Any  # A barrier per stage: completes when all readers are done.


def scratch(work: Work, a: DTypeLike, b: DTypeLike, out: DTypeLike) -> Memory:
  """Returns the types of a program's memory, given dtypes of a, b and out."""
  tile, stages = work.tile, work.tile.stages
  width = in_128_bytes(out)
  b_scales = _PADDED if work.is_b_tiled else BLOCK
  return Memory(
    a_smem=swizzled_rows(stages, tile.waves, WAVE, BLOCK, dtype=a),
    b_smem=swizzled_rows(stages, BLOCK, BLOCK, dtype=b),
    a_scale_smem=plgpu.SMEM((stages, tile.m), jnp.float32),
    b_scale_smem=plgpu.SMEM((stages, b_scales), jnp.float32),
    out_smem=swizzled_rows(WARPGROUPS, tile.slots, ROWS, width, dtype=out),
    loaded=tuple(
      # The first wave's barrier also waits for b and the scales of a and b.
      plgpu.Barrier(num_arrivals=1 if wave else 4, num_barriers=stages)
      for wave in range(tile.waves)
    ),
    free=plgpu.ClusterBarrier(
      collective_axes=("cluster",),
      num_arrivals=WARPGROUPS,
      num_barriers=stages,
    )
    if tile.cluster > 1
    else plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
  )


def run(work: Work, *refs, **scratch: Any) -> None:
  """Runs the kernel.

  `refs` are a, a's scales, b, b's scales, optionally `add`, and the result. The
  scales are transposed. `scratch` holds the fields of `Memory`.
  """
  *operands, out = refs
  operands, add = operands[:4], operands[4:]
  memory = Memory(**scratch)

  to_multiply, to_load = REGISTERS[WARPGROUPS]

  @pl.when(lax.axis_index("warpgroup") == WARPGROUPS)
  def _():
    plgpu.set_max_registers(to_load, action="decrease")
    _load(work, operands, memory)

  @pl.when(lax.axis_index("warpgroup") < WARPGROUPS)
  def _():
    plgpu.set_max_registers(to_multiply, action="increase")

    def compute(i, step):
      row, column = work.place(i)
      step, totals = _sum_blocks(work, step, memory)
      _write(work, totals, (row, column), memory.out_smem, out, *add)
      return step

    lax.fori_loop(0, work.count(), compute, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _load(work: Work, operands, memory: Memory) -> None:
  """Copies the blocks of all tiles to shared memory as stages become free."""
  a, a_scale, b, b_scale = operands
  loaded, free = memory.loaded, memory.free
  tile = work.tile
  together = dict(collective_axes="cluster") if tile.cluster > 1 else {}

  def load_tile(i, step):
    row, column = work.place(i)
    b_rows = pl.ds(column, BLOCK)
    first, count = column, BLOCK
    if work.is_b_tiled:
      first, count = lax.div(column, jnp.int32(BLOCK)) * COPIES, COPIES

    def load_block(j, step):
      slot, block = work.slot(step), pl.ds(j * BLOCK, BLOCK)
      pl.when(step >= tile.stages)(lambda: plgpu.barrier_wait(free.at[slot]))

      def copy(src, dst, barrier, **how):
        plgpu.copy_gmem_to_smem(src, dst, barrier.at[slot], **how)

      copy(b.at[b_rows, block], memory.b_smem.at[slot], loaded[0])
      rows = pl.ds(row, tile.m)
      copy(a_scale.at[j, rows], memory.a_scale_smem.at[slot], loaded[0])
      of_b = memory.b_scale_smem.at[slot, pl.ds(0, count)]
      copy(b_scale.at[j, pl.ds(first, count)], of_b, loaded[0])
      for wave, barrier in enumerate(loaded):
        rows = pl.ds(row + wave * WAVE, WAVE)
        copy(
          a.at[rows, block], memory.a_smem.at[slot, wave], barrier, **together
        )
      return step + 1

    return lax.fori_loop(0, work.blocks, load_block, step)

  steps = lax.fori_loop(0, work.count(), load_tile, jnp.int32(0))

  # Wait until all blocks have been read. A program must not end while the
  # cluster's other program may still write to this program's shared memory or
  # arrive at this program's barriers.
  def wait(i, _):
    step = steps + i
    slot = work.slot(step)
    pl.when(step >= tile.stages)(lambda: plgpu.barrier_wait(free.at[slot]))

  lax.fori_loop(0, tile.stages, wait, None)


def _sum_blocks(
  work: Work, step: Array, memory: Memory
) -> tuple[Array, tuple[Array, ...]]:
  """Sums a tile's blocks; returns the next step and f32 [64, 128] per wave."""
  loaded, free = memory.loaded, memory.free
  warpgroup = lax.axis_index("warpgroup")
  shape = ROWS, BLOCK

  def multiply(slot, wave, acc):
    rows = memory.a_smem.at[slot, wave, pl.ds(warpgroup * ROWS, ROWS)]
    plgpu.wgmma(acc, rows, memory.b_smem.at[slot].T)
    return acc[...]

  def add_block(_, carry):
    step, totals = carry
    slot, new = work.slot(step), []
    for wave, total in enumerate(totals):
      # Waiting here also keeps the compiler from interleaving the instructions
      # of two waves, which would need too many registers.
      plgpu.barrier_wait(loaded[wave].at[slot])
      rows = pl.ds(wave * WAVE + warpgroup * ROWS, ROWS)
      scale = plgpu.load(
        memory.a_scale_smem.at[slot, rows],
        layout=LAYOUT.reduce(1),
        optimized=False,
      )
      if work.is_b_tiled:
        scale = scale * memory.b_scale_smem[slot, 0]
      scale = lax.broadcast_in_dim(scale, shape, (0,))
      if not work.is_b_tiled and work.tile.waves == 1:
        # With one wave, there are enough registers to multiply the scales while
        # the tensor cores work.
        scale = scale * _load_column_scales(memory.b_scale_smem, slot, shape)
      zeros = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
      partial = pl.run_scoped(functools.partial(multiply, slot, wave), zeros)
      # Tensor cores accumulate with fewer bits than f32 has. So they sum only
      # within a block, and the sums of blocks are added in f32.
      partial = partial * scale
      if not work.is_b_tiled and work.tile.waves > 1:
        partial = partial * _load_column_scales(
          memory.b_scale_smem, slot, shape
        )
      new.append(total + partial)
    if work.interpret or work.tile.cluster > 1:
      # In a cluster, one thread arrives for its whole warpgroup, so wait until
      # the other threads have read the scales. Without a cluster, this only
      # keeps the interpreter from reporting a race with the next copy.
      plgpu.commit_smem()
    plgpu.barrier_arrive(free.at[slot])
    return step + 1, tuple(new)

  zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), LAYOUT)
  carry = step, (zero,) * work.tile.waves
  return lax.fori_loop(0, work.blocks, add_block, carry)


def _load_column_scales(b_scale_smem, slot, shape) -> Array:
  """Loads the scales of b's rows, which are columns of the result."""
  scale = plgpu.load(
    b_scale_smem.at[slot], layout=LAYOUT.reduce(0), optimized=False
  )
  return lax.broadcast_in_dim(scale, shape, (1,))


def _write(
  work: Work, totals: tuple[Array, ...], place, out_smem, out, add=None
) -> None:
  """Writes a tile, plus `add` if given, to `out` at `place` (row, column)."""
  (row, column), warpgroup = place, lax.axis_index("warpgroup")
  width = out_smem.shape[-1]
  pieces = [
    (wave, start)
    for wave in range(work.tile.waves)
    for start in range(0, BLOCK, width)
  ]
  # The number of slots divides the number of pieces, so all tiles use the slots
  # in the same order, and a piece always overwrites the oldest one.
  slots = math.gcd(work.tile.slots, len(pieces))
  for i, (wave, start) in enumerate(pieces):
    rows = pl.ds(row + wave * WAVE + warpgroup * ROWS, ROWS)
    columns = pl.ds(column + start, width)
    piece = totals[wave][:, start : start + width]
    if add is not None:
      added = plgpu.load(add.at[rows, columns], layout=LAYOUT, optimized=False)
      piece = piece + added.astype(jnp.float32)
    smem = out_smem.at[warpgroup, i % slots]
    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
    smem[...] = piece.astype(out.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, out.at[rows, columns])
