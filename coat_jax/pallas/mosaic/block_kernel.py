# SPDX-License-Identifier: Apache-2.0
"""The kernel of `block_product`, in Pallas for Mosaic GPU.

One program stays on each multiprocessor and goes from tile to tile. Its third
warpgroup loads blocks of a, of b and their scales into shared memory ahead of
the other two, which have 64 rows of each 128 of the tile: four wgmma of
m64n128k32 sum a block, and that sum, times its two scales, is added in f32 to
what the warpgroup holds in registers. One warpgroup does so while the other has
the tensor cores (as DeepGEMM, and arXiv:2412.19437, section 3.3.2).

    tile of out       [128 waves, 128]
    wave 0            rows 0..63 of warpgroup 0, 64..127 of warpgroup 1
    wave 1            rows 128..191 of warpgroup 0, 192..255 of warpgroup 1

A block of a tile of 256 rows takes 1024 clocks of the tensor cores and 48 KiB
from the second-level cache, or 32 where two programs share a. Compiled for an
H200 (jax 0.11.2), a warpgroup issues 221 instructions for it meanwhile, 128 of
them multiply-adds; 376 where each row of b has a scale too.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.ops.blocks import BLOCK

WARPGROUPS = 2  # That multiply; one more loads.
_ROWS = 64  # Of a wgmma.
_WAVE = WARPGROUPS * _ROWS
# 65536 are for three warpgroups of 128 threads, which start with 168 each.
_REGISTERS, _REGISTERS_TO_LOAD = 232, 40
_LAYOUT = plgpu.Layout.WGMMA
# A copy is of whole 16 bytes, so that a scale of a tile of b is there four
# times, and to a multiple of 128 bytes of shared memory.
COPIES = 4
_PADDED = 32


@dataclasses.dataclass(frozen=True)
class Tile:
  """How a program computes.

  Attributes:
    waves: of 128 rows each, that a tile has.
    stages: blocks in shared memory.
    slots: pieces of 64 rows and 128 bytes of the result in shared memory, on
      their way out, for each warpgroup.
    cluster: programs with neighbouring tiles along n, which load a together.
    band: tiles along m that are gone through before the next along n, so that
      those that are computed at a time read the same a and b.
  """

  waves: int = 2
  stages: int = 3
  slots: int = 4
  cluster: int = 1
  band: int = 8

  @property
  def m(self) -> int:
    """Rows of a tile of the result."""
    return _WAVE * self.waves

  @property
  def n(self) -> int:
    """Columns of what a cluster computes."""
    return BLOCK * self.cluster

  def fits(self, m: int, n: int) -> bool:
    """Whether [m, n] is whole tiles."""
    return m % self.m == 0 and n % self.n == 0


@dataclasses.dataclass(frozen=True)
class Work:
  """What the programs of one product share; all of it is static.

  Attributes:
    tile: how a program computes.
    tiles_m, tiles_n: of the result; along n, of a cluster.
    blocks: that are summed.
    clusters: of programs, that go through the tiles.
    of_tiles: whether b has one scale for 128 rows, in place of one for each.
    interpret: whether this runs in the interpreter.
  """

  tile: Tile
  tiles_m: int
  tiles_n: int
  blocks: int
  clusters: int
  of_tiles: bool
  interpret: bool

  def count(self) -> Array:
    """How many tiles this program computes."""
    tiles = self.tiles_m * self.tiles_n
    left = tiles - lax.axis_index("program") + self.clusters - 1
    return lax.div(left, jnp.int32(self.clusters))

  def place(self, i: Array) -> tuple[Array, Array]:
    """The first row and the first column of this program's i-th tile."""
    number = i * self.clusters + lax.axis_index("program")
    of_band = jnp.int32(self.tile.band * self.tiles_n)
    first = lax.div(number, of_band) * self.tile.band
    height = jnp.minimum(self.tiles_m - first, self.tile.band)
    within = lax.rem(number, of_band)
    row = (first + lax.rem(within, height)) * self.tile.m
    column = lax.div(within, height) * self.tile.n
    return row, column + lax.axis_index("cluster") * BLOCK

  def slot(self, step: Array) -> Array:
    """Where the step-th block of this program is in shared memory."""
    return lax.rem(step, jnp.int32(self.tile.stages))


def scratch(work: Work, a: DTypeLike, b: DTypeLike, out: DTypeLike) -> dict:
  """Shared memory and barriers; a, b and out are dtypes."""
  tile, stages = work.tile, work.tile.stages

  def rows_of_128_bytes(*shape: int, dtype: DTypeLike):
    swizzled = (
      plgpu.TilingTransform((8, shape[-1])),  # pyright: ignore[reportAbstractUsage]
      plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=swizzled)

  width = 128 // jnp.dtype(out).itemsize
  b_scales = _PADDED if work.of_tiles else BLOCK
  return dict(
    a_smem=rows_of_128_bytes(stages, tile.waves, _WAVE, BLOCK, dtype=a),
    b_smem=rows_of_128_bytes(stages, BLOCK, BLOCK, dtype=b),
    a_scale_smem=plgpu.SMEM((stages, tile.m), jnp.float32),
    b_scale_smem=plgpu.SMEM((stages, b_scales), jnp.float32),
    out_smem=rows_of_128_bytes(WARPGROUPS, tile.slots, _ROWS, width, dtype=out),
    loaded=tuple(
      # With a's first wave come b and the scales of both.
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


def run(work: Work, a, a_scale, b, b_scale, *refs, **memory: Any) -> None:
  """Arrays are in global memory: those of `product`, scales transposed."""
  *add, out = refs

  @pl.when(lax.axis_index("warpgroup") == WARPGROUPS)
  def _():
    plgpu.set_max_registers(_REGISTERS_TO_LOAD, action="decrease")
    _load(work, a, a_scale, b, b_scale, **memory)

  @pl.when(lax.axis_index("warpgroup") < WARPGROUPS)
  def _():
    plgpu.set_max_registers(_REGISTERS, action="increase")

    def compute(i, step):
      row, column = work.place(i)
      step, totals = _sum_blocks(work, step, **memory)
      _write(work, totals, row, column, out, *add, **memory)
      return step

    lax.fori_loop(0, work.count(), compute, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _load(
  work: Work,
  a,
  a_scale,
  b,
  b_scale,
  *,
  a_smem,
  b_smem,
  a_scale_smem,
  b_scale_smem,
  loaded,
  free,
  **_,
) -> None:
  """Copies blocks of all tiles of this program, as there is room for them."""
  tile = work.tile
  together = dict(collective_axes="cluster") if tile.cluster > 1 else {}

  def load_tile(i, step):
    row, column = work.place(i)
    b_rows = pl.ds(column, BLOCK)
    first, count = column, BLOCK
    if work.of_tiles:
      first, count = lax.div(column, jnp.int32(BLOCK)) * COPIES, COPIES

    def load_block(j, step):
      slot, block = work.slot(step), pl.ds(j * BLOCK, BLOCK)
      pl.when(step >= tile.stages)(lambda: plgpu.barrier_wait(free.at[slot]))

      def copy(src, dst, barrier, **how):
        plgpu.copy_gmem_to_smem(src, dst, barrier.at[slot], **how)

      copy(b.at[b_rows, block], b_smem.at[slot], loaded[0])
      rows = pl.ds(row, tile.m)
      copy(a_scale.at[j, rows], a_scale_smem.at[slot], loaded[0])
      of_b = b_scale_smem.at[slot, pl.ds(0, count)]
      copy(b_scale.at[j, pl.ds(first, count)], of_b, loaded[0])
      for wave, barrier in enumerate(loaded):
        rows = pl.ds(row + wave * _WAVE, _WAVE)
        copy(a.at[rows, block], a_smem.at[slot, wave], barrier, **together)
      return step + 1

    return lax.fori_loop(0, work.blocks, load_block, step)

  steps = lax.fori_loop(0, work.count(), load_tile, jnp.int32(0))

  # Until all is read: the cluster's other program may not end before, since
  # this one writes to its shared memory and arrives at its barriers.
  def wait(i, _):
    step = steps + i
    slot = work.slot(step)
    pl.when(step >= tile.stages)(lambda: plgpu.barrier_wait(free.at[slot]))

  lax.fori_loop(0, tile.stages, wait, None)


def _sum_blocks(
  work: Work,
  step: Array,
  *,
  a_smem,
  b_smem,
  a_scale_smem,
  b_scale_smem,
  loaded,
  free,
  **_,
) -> tuple[Array, tuple[Array, ...]]:
  """Sums the next tile: the step after it, and f32 [64, 128] of each wave."""
  warpgroup = lax.axis_index("warpgroup")
  shape = _ROWS, BLOCK

  def multiply(slot, wave, acc):
    rows = a_smem.at[slot, wave, pl.ds(warpgroup * _ROWS, _ROWS)]
    plgpu.wgmma(acc, rows, b_smem.at[slot].T)
    return acc[...]

  def add_block(_, carry):
    step, totals = carry
    slot, new = work.slot(step), []
    for wave, total in enumerate(totals):
      # Waiting also keeps the compiler from mixing the waves' instructions,
      # for which there are no registers.
      plgpu.barrier_wait(loaded[wave].at[slot])
      rows = pl.ds(wave * _WAVE + warpgroup * _ROWS, _ROWS)
      scale = plgpu.load(
        a_scale_smem.at[slot, rows], layout=_LAYOUT.reduce(1), optimized=False
      )
      if work.of_tiles:
        scale = scale * b_scale_smem[slot, 0]
      scale = lax.broadcast_in_dim(scale, shape, (0,))
      if not work.of_tiles and work.tile.waves == 1:
        # While the tensor cores multiply: there are registers for it.
        scale = scale * _of_columns(b_scale_smem, slot, shape)
      zeros = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
      partial = pl.run_scoped(functools.partial(multiply, slot, wave), zeros)
      # Tensor cores sum a block with fewer bits than f32 has; blocks are summed
      # in f32 here.
      partial = partial * scale
      if not work.of_tiles and work.tile.waves > 1:
        partial = partial * _of_columns(b_scale_smem, slot, shape)
      new.append(total + partial)
    if work.interpret or work.tile.cluster > 1:
      # At a cluster's barrier one thread arrives for all, which may be reading
      # scales yet; at a program's own each arrives, and has read them. The
      # interpreter would take the next copy for a race there.
      plgpu.commit_smem()
    plgpu.barrier_arrive(free.at[slot])
    return step + 1, tuple(new)

  zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _LAYOUT)
  carry = step, (zero,) * work.tile.waves
  return lax.fori_loop(0, work.blocks, add_block, carry)


def _of_columns(b_scale_smem, slot, shape) -> Array:
  """Scales of b's rows, beside the columns of the result."""
  scale = plgpu.load(
    b_scale_smem.at[slot], layout=_LAYOUT.reduce(0), optimized=False
  )
  return lax.broadcast_in_dim(scale, shape, (1,))


def _write(
  work: Work,
  totals: tuple[Array, ...],
  row: Array,
  column: Array,
  out,
  add=None,
  *,
  out_smem,
  **_,
) -> None:
  """Copies a tile to `out`, piece by piece."""
  warpgroup, width = lax.axis_index("warpgroup"), out_smem.shape[-1]
  pieces = [
    (wave, start)
    for wave in range(work.tile.waves)
    for start in range(0, BLOCK, width)
  ]
  # What a piece overwrites is as many pieces old, in the next tile too.
  slots = math.gcd(work.tile.slots, len(pieces))
  for i, (wave, start) in enumerate(pieces):
    rows = pl.ds(row + wave * _WAVE + warpgroup * _ROWS, _ROWS)
    columns = pl.ds(column + start, width)
    piece = totals[wave][:, start : start + width]
    if add is not None:
      added = plgpu.load(add.at[rows, columns], layout=_LAYOUT, optimized=False)
      piece = piece + added.astype(jnp.float32)
    smem = out_smem.at[warpgroup, i % slots]
    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
    smem[...] = piece.astype(out.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, out.at[rows, columns])
