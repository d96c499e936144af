# SPDX-License-Identifier: Apache-2.0
"""Finds the tiles of attention scores that a kernel visits.

Each row below shows which tiles of keys a tile of queries visits. Each column
shows which tiles of queries a tile of keys visits:

             keys                     keys
           0 1 2 3                  0 1 2 3
         0 e                      0 e                 .  not visited
 queries 1 f e                    1 f e               e  visited (edge): masked
         2 f f e                  2 e f e             f  visited (full): no mask
         3 f f f e   causal       3 . e f e   window of two tiles

With segments, fewer tiles are visited: only those from the first to the last
whose range of segment ids overlaps the range of the visiting tile. In packed
documents, ids increase, so each visited tile shares a segment with the visiting
tile. If ids do not increase, some visited tiles may share none. The result is
still correct, because each score is masked.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from coat_jax.ops.types import AttentionKind


def segment_bounds(
  segments: Array, own: int, others: int
) -> tuple[Array, Array]:
  """Returns for each tile which tiles of the other sequence may share its ids.

  Both sequences, queries and keys, have the segment ids `segments` [B, T]. A
  tile has `own` positions, and a tile of the other sequence has `others`. The
  two results, int32 [B, tiles], are the index of the first tile that may share
  ids, and the index after the last.
  """

  def least_and_largest(size):
    missing = -segments.shape[1] % size
    of_tiles = jnp.pad(segments, [(0, 0), (0, missing)], mode="edge")
    of_tiles = of_tiles.reshape(segments.shape[0], -1, size)
    return jnp.min(of_tiles, axis=-1), jnp.max(of_tiles, axis=-1)

  least, largest = (x[:, :, None] for x in least_and_largest(own))
  low, high = (x[:, None, :] for x in least_and_largest(others))
  may_share = (least <= high) & (low <= largest)
  first = jnp.argmax(may_share, axis=-1)
  behind = may_share.shape[-1] - jnp.argmax(may_share[..., ::-1], axis=-1)
  return first.astype(jnp.int32), behind.astype(jnp.int32)


class Visits(NamedTuple):
  """The tiles of keys that a tile of queries visits, or vice versa."""

  first: Array | int  # Index of the first visited tile.
  whole: Array | int  # Index of the first tile that needs no mask.
  edge: Array | int  # Index after the last tile that needs no mask.
  behind: Array | int  # Index after the last visited tile.

  @classmethod
  def of(
    cls,
    kind: AttentionKind,
    start: Array,
    size: int,
    step: int,
    length: int,
    *,
    of_queries: bool,
    bounds: tuple[Any, Any] | None = None,
  ) -> "Visits":
    """Finds the tiles that a tile with positions [start, start + size) visits.

    The tile holds queries if `of_queries`, else keys. Visited tiles have `step`
    positions. `length` is the length of both sequences. `bounds` is the tile's
    range from `segment_bounds`. A tile of keys may visit queries past the end,
    where dout and delta must be zero.
    """
    # Position i sees positions i - back to i + ahead of the other sequence.
    # None means no limit.
    reach = None if kind.window is None else kind.window - 1
    back, ahead = reach, 0 if kind.causal else None
    if not of_queries:
      back, ahead = ahead, back
    last = start + size - 1
    first = whole = 0
    edge = behind = -(-length // step)
    if of_queries:
      edge = length // step  # Keys past the end must be masked.
    if back is not None:
      first = _quotient(jnp.maximum(start - back, 0), step)
      whole = _quotient(jnp.maximum(last - back, 0) + step - 1, step)
    if ahead is not None:
      behind = jnp.minimum(_quotient(last + ahead, step) + 1, behind)
      edge = jnp.minimum(_quotient(start + ahead + 1, step), edge)
    if bounds is not None:
      first = jnp.maximum(first, bounds[0])
      behind = jnp.minimum(behind, bounds[1])
      return cls(first, behind, behind, behind)
    # Keep ints where possible, because `run` skips a loop whose bounds are the
    # same int.
    if back is not None:
      whole = jnp.minimum(whole, behind)
    if ahead is not None or (back is not None and edge != behind):
      edge = jnp.minimum(jnp.maximum(edge, whole), behind)
    return cls(first, whole, edge, behind)

  def run(self, step, carry):
    """Runs `step(tile, carry, is_masked)` for each tile, in order."""
    for begin, end, is_masked in (
      (self.first, self.whole, True),
      (self.whole, self.edge, False),
      (self.edge, self.behind, True),
    ):
      are_ints = isinstance(begin, int) and isinstance(end, int)
      if begin is end or (are_ints and begin == end):
        continue
      each = functools.partial(step, is_masked=is_masked)
      carry = jax.lax.fori_loop(begin, end, each, carry)
    return carry


def _quotient(x: Array, by: int) -> Array:
  """Divides nonnegative numbers, rounding down."""
  return lax.div(x, jnp.int32(by))
