# SPDX-License-Identifier: Apache-2.0
"""Functions and classes that the attention kernels share.

A program owns a tile of queries and visits tiles of keys, or owns a tile of
keys and visits tiles of queries (see `attention_visits`). It computes the
results for its own tile.

One warpgroup loads the visited tiles into a ring of slots in shared memory. Two
other warpgroups compute scores, 64 rows each. Rows of scores are positions in
the program's own tile, and columns are positions in the visited tile.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.ops.types import AttentionKind
from coat_jax.pallas.mosaic import emit, wgmma
from coat_jax.pallas.mosaic.attention_visits import Visits
from coat_jax.pallas.mosaic.ring import Ring
from coat_jax.pallas.mosaic.row_ptx import elementwise
from coat_jax.pallas.mosaic.wgmma import (
  LAYOUT,
  ROWS,
  WARPGROUPS,
  swizzled_rows,
)

LOG2_E = 1.0 / math.log(2.0)
# Registers per thread, in warpgroups that compute and in the one that loads.
# Sums of 64 x 256 occupy 128 registers, and scores up to 100 more.
REGISTERS, REGISTERS_TO_LOAD = 240, 24
OF_ROWS, OF_COLUMNS = LAYOUT.reduce(1), LAYOUT.reduce(0)


@dataclasses.dataclass(frozen=True)
class Work:
  """Static parameters that all programs of a kernel share."""

  kind: AttentionKind
  length: int  # Length of both sequences.
  of_queries: bool  # Whether programs own tiles of queries, not of keys.
  own: int  # Number of positions in a program's own tile.
  step: int  # Number of positions in a visited tile.
  stages: int  # Number of slots in the ring.
  heads: int  # Number of query heads that read one key head.
  scale: float  # Factor of q k^T.
  head_dim: int  # Padded to a multiple of 16.
  has_segments: bool
  interpret: bool

  @property
  def tiles(self) -> int:
    """The number of programs per head, each with its own tile."""
    return pl.cdiv(self.length, self.own)

  def tile(self) -> Array:
    """Returns this program's tile index; tiles with most visits run first."""
    tile = lax.axis_index("tile")
    is_reversed = self.of_queries and self.kind.causal
    return self.tiles - 1 - tile if is_reversed else tile

  def visits(self, segments) -> Visits:
    """Finds the tiles to visit.

    `segments` contains the refs of segment ids and of the two results of
    `segment_bounds`. It is empty if there are no segments.
    """
    # Without the barrier, the compiler would find the tiles once for all heads,
    # and keep the bounds in registers.
    tile, bounds = lax.optimization_barrier(self.tile()), None
    if self.has_segments:
      _, first, behind = segments
      b = lax.axis_index("batch")
      bounds = first[b, tile], behind[b, tile]
    return Visits.of(
      self.kind,
      tile * self.own,
      self.own,
      self.step,
      self.length,
      of_queries=self.of_queries,
      bounds=bounds,
    )

  def part(self) -> Array:
    """Returns the index of this warpgroup's 64 rows in the program's tile."""
    return lax.axis_index("warpgroup") * (0 if self.own == ROWS else 1)

  def rows_of(self, *own_smem) -> list:
    """Returns this warpgroup's rows of each array; call it in every step."""
    # The barrier keeps the compiler from computing all of wgmma's descriptors
    # before the loop, where they would occupy up to 64 registers.
    part = lax.optimization_barrier(self.part())
    return [x.at[pl.ds(part * ROWS, ROWS)] for x in own_smem]

  @property
  def shape(self) -> tuple[int, int]:
    """The shape of the scores that a warpgroup computes at a time."""
    return ROWS, self.step


def ring(work: Work, dtype: DTypeLike, *others) -> Ring:
  """Returns a ring's types; slots hold a tile, `others` and any segment ids."""
  stages, step = work.stages, work.step
  tiles = swizzled_rows(stages, step, work.head_dim, dtype=dtype)
  slots = tiles, *others
  if work.has_segments:
    slots = *slots, plgpu.SMEM((stages, step), jnp.int32)
  return Ring.types(slots, readers=WARPGROUPS)


def load_keys(work: Work, k, v, segments, ring: Ring) -> None:
  """Loads the visited tiles into the ring, k and v in turn."""
  b, head = lax.axis_index("batch"), lax.axis_index("head")
  kv_head = lax.div(head, jnp.int32(work.heads))
  visits = work.visits(segments)

  def load(j, number):
    keys = pl.ds(j * work.step, work.step)
    ids = [x.at[b, keys] for x in segments[:1]]
    ring.load(number, k.at[b, keys, kv_head], *ids)
    ring.load(number + 1, v.at[b, keys, kv_head], *ids)
    return number + 2

  ring.drain(lax.fori_loop(visits.first, visits.behind, load, jnp.int32(0)))


# --- Matmuls -----------------------------------------------------------------


def product(a_smem, b_smem) -> Array:
  """Returns a @ b in f32, for arrays in shared memory."""

  def multiply(acc):
    plgpu.wgmma(acc, a_smem, b_smem)
    return acc[...]

  shape = a_smem.shape[0], b_smem.shape[1]
  sums = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
  return pl.run_scoped(multiply, sums)


def add_product(acc: Array, a: Any, b_smem, interpret: bool) -> Array:
  """Returns acc + a @ b in f32; if a is in registers, rounds a to b's dtype."""

  def multiply(acc):
    plgpu.wgmma(acc, a, b_smem)

  if isinstance(a, Array):
    a = a.astype(b_smem.dtype)
  if not interpret:
    sums: Any = plgpu.ACC.init(acc)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_state(multiply)(sums)
  # The interpreter has no `run_state`, and its wgmma reads operands only from
  # shared memory.
  if isinstance(a, Array):
    b = b_smem[...]
    return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
  return acc + product(a, b_smem)


def zeros(*shape: int) -> Array:
  """Returns f32 zeros, [rows, columns] or [rows]."""
  layout = LAYOUT if len(shape) == 2 else OF_ROWS
  return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def of_rows(x: Array, shape: tuple[int, int]) -> Array:
  """Broadcasts one value per row to `shape`."""
  return lax.broadcast_in_dim(x, shape, (0,))


def load_columns(smem, shape: tuple[int, int]) -> Array:
  """Loads and broadcasts one value per column."""
  x = plgpu.load(smem, layout=OF_COLUMNS, optimized=False)
  return lax.broadcast_in_dim(x, shape, (1,))


# --- Scores ------------------------------------------------------------------


class Scores(NamedTuple):
  """Computes and masks the attention scores of a warpgroup's rows.

  Methods represent a score by x, for which exp(score) = 2^(x * unit):

    soft cap  x                          unit
    None      q k^T                      scale * log2(e)
    cap       tanh(scale * q k^T / cap)  cap * log2(e)
  """

  work: Work
  start: Array  # Position of the first row.
  segments: Array | None  # Segment ids of the rows; None without segments.

  @classmethod
  def of_own(cls, work: Work, segments) -> "Scores":
    """Creates the scores of this warpgroup's rows."""
    start = work.tile() * work.own + work.part() * ROWS
    ids = None
    if work.has_segments:
      own = segments[0].at[lax.axis_index("batch"), pl.ds(start, ROWS)]
      ids = plgpu.load(own, layout=OF_ROWS, optimized=False)
    return cls(work, start, ids)

  @property
  def unit(self) -> float:
    cap = self.work.kind.soft_cap
    return (self.work.scale if cap is None else cap) * LOG2_E

  def of(self, products: Array) -> Array:
    """Computes x from q k^T."""
    cap = self.work.kind.soft_cap
    return (
      products if cap is None else self._tanh(products, self.work.scale / cap)
    )

  def masked(self, x: Array, hidden: float, tile: Array, ids: list) -> Array:
    """Replaces masked scores in x by `hidden`.

    `ids` contains the ref of the visited tile's segment ids, if there are any.
    """
    for seen in self._seen(tile, ids):
      x = jnp.where(seen, x, hidden)
    return x

  def exponential(self, x: Array, shift: Array) -> Array:
    """Returns exp(score) / 2^shift."""
    return jnp.exp2(x * self.unit - shift)

  def slope(self, x: Array, p: Array) -> Array:
    """Multiplies p by d(score) / d(scale * q k^T)."""
    return p if self.work.kind.soft_cap is None else p * (1 - x * x)

  def _tanh(self, x: Array, scale: float) -> Array:
    """Returns tanh(x * scale), within 2^-21, and exactly ±1 where it saturates.

    The instruction `tanh.approx` has an error of 2^-11. With a cap of 50,
    scores would be off by up to 0.02.
    """
    if self.work.interpret:
      return jnp.tanh(x * scale)
    divisor = 1 + jnp.exp2(x * (2 * LOG2_E * scale))
    return 1 - 2 * elementwise(_reciprocal, divisor, layout=LAYOUT)

  def _seen(self, tile: Array, ids: list) -> Iterator[Array]:
    """Yields masks; a query sees a key only where all masks are true."""
    work, kind, shape = self.work, self.work.kind, self.work.shape
    row, column = (
      plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT)
      for axis in (0, 1)
    )
    other = tile * work.step
    if kind.causal:
      ahead = row - column + (self.start - other)
      distance = ahead if work.of_queries else -ahead
      if kind.window is None:
        yield distance >= 0
      else:  # As unsigned integers, negative distances exceed every window.
        distance = lax.bitcast_convert_type(distance, jnp.uint32)
        yield distance < jnp.uint32(kind.window)
    elif work.of_queries and work.length % work.step:
      yield column < work.length - other
    if self.segments is not None:
      own, [others] = of_rows(self.segments, shape), ids
      yield own == load_columns(others, shape)


def _reciprocal(x):
  """Emits 1 / x, accurate to 1 ulp."""
  return emit.f32("rcp.approx.ftz.f32 $0, $1;", x)


# --- Calls -------------------------------------------------------------------


def run(work: Work, body, *args, heads: int, out, scratch, name: str) -> Any:
  """Runs a kernel with one program per tile, for each sequence and head."""
  kernel = wgmma.kernel(
    body,
    out_type=out,
    scratch_types=scratch,
    # In this order, programs that run at the same time visit the same tiles.
    grid=(heads, args[0].shape[0], work.tiles),
    grid_names=("head", "batch", "tile"),
    approx_math=True,
    interpret=work.interpret,
    kernel_name=name,
  )
  return kernel(*args)
