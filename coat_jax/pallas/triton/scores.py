# SPDX-License-Identifier: Apache-2.0
"""Attention scores by tiles: how to compute and to mask them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from coat_jax.ops.types import AttentionKind
from coat_jax.pallas.triton import ptx
from coat_jax.pallas.visits import Visits, segment_bounds

MASKED = -1e30
# The initial maximum: below every score, above every masked one. A row that
# sees nothing of a tile keeps it, and exp2(MASKED - LEAST) is 0. If the initial
# maximum were lower, such a row's would be MASKED times the unit, rounded;
# exp2's fma subtracts it from the unrounded product, which can leave 1e22.
LEAST = -1e20
LOG2_E = 1.0 / math.log(2.0)


@dataclasses.dataclass(frozen=True)
class Tile:
  """A program's share of one sequence, and its steps through the other one."""

  queries: int  # A power of two, at least 16; so is `keys`.
  keys: int
  warps: int
  stages: int  # The number of loads in flight.

  @property
  def longest(self) -> int:
    """The size that a sequence must be a multiple of."""
    return max(self.queries, self.keys)


def segment_refs(segments: Array | None, own: int, others: int) -> tuple:
  """Returns segment ids [B, T] and `segment_bounds`, or three times None."""
  if segments is None:
    return None, None, None
  segments = segments.astype(jnp.int32)
  return segments, *segment_bounds(segments, own, others)


@dataclasses.dataclass(frozen=True)
class Visit:
  """The tiles that a program visits.

  In masks, the axis of the program's own sequence comes first.
  """

  kind: AttentionKind
  tile: Tile
  is_of_queries: bool  # Whether the program's own tile holds queries.
  segments_ref: Any
  b: Array  # The index of the sequence in the batch.
  own: Array
  tiles: Visits

  @classmethod
  def begin(
    cls,
    kind: AttentionKind,
    tile: Tile,
    is_of_queries: bool,
    length: int,
    segments,
  ) -> "Visit":
    """Finds the tiles that this program visits.

    `length` is the other sequence's; `segments` are `segment_refs`.
    """
    own = pl.program_id(0)
    size, step = tile.queries, tile.keys
    if not is_of_queries:
      size, step = step, size
    elif kind.causal:
      own = pl.num_programs(0) - 1 - own  # The longest rows start first.
    segments_ref, first_ref, behind_ref = segments
    b, bounds = pl.program_id(2), None
    if segments_ref is not None:
      bounds = first_ref[b, own], behind_ref[b, own]
    tiles = Visits.of(
      kind,
      own * size,
      size,
      step,
      length,
      of_queries=is_of_queries,
      bounds=bounds,
    )
    return cls(kind, tile, is_of_queries, segments_ref, b, own, tiles)

  def run(self, step, carry):
    """Runs `step(tile, carry, is_masked)` for each tile, in order."""
    return self.tiles.run(step, carry)

  def seen(self, other: Array, is_masked: bool) -> Array | None:
    """Returns which keys of a visited tile its queries see; None for all."""
    kind, tile = self.kind, self.tile
    if not is_masked:
      return None
    if self.is_of_queries:
      queries, keys, shape = self.own, other, (tile.queries, tile.keys)
    else:
      queries, keys, shape = other, self.own, (tile.keys, tile.queries)
    query_axis = 0 if self.is_of_queries else 1
    key_axis = 1 - query_axis
    seen = None
    if kind.causal:
      query, key = _iota(shape, query_axis), _iota(shape, key_axis)
      distance = query - key + (queries * tile.queries - keys * tile.keys)
      seen = distance >= 0
      if kind.window is not None:
        seen &= distance < kind.window
    if self.segments_ref is not None:
      of_queries = pl.ds(queries * tile.queries, tile.queries)
      of_keys = pl.ds(keys * tile.keys, tile.keys)
      of_queries = plt.load(self.segments_ref.at[self.b, of_queries])
      of_keys = plt.load(self.segments_ref.at[self.b, of_keys])
      same = jnp.expand_dims(of_queries, key_axis) == jnp.expand_dims(
        of_keys, query_axis
      )
      seen = same if seen is None else same & seen
    return seen


@dataclasses.dataclass(frozen=True)
class Scores:
  """Attention scores as multiples of a constant, `unit`.

  log2(exp(score)) = x * unit, where x is q k^T, or its tanh if there is a cap.
  """

  kind: AttentionKind
  head_dim: int
  interpret: bool

  @property
  def scale(self) -> float:
    return self.kind.scale_of(self.head_dim)

  @property
  def unit(self) -> float:
    cap = self.kind.soft_cap
    return (self.scale if cap is None else cap) * LOG2_E

  def of(self, products: Array) -> Array:
    """Computes x from q k^T."""
    cap = self.kind.soft_cap
    if cap is None:
      return products
    return ptx.tanh(products, self.scale / cap, interpret=self.interpret)

  def exponential(self, x: Array, shift: Array) -> Array:
    """Returns exp(score) / 2^shift."""
    return ptx.exp2(x, self.unit, shift, interpret=self.interpret)

  def probability(self, x: Array, lse: Array, seen: Array | None) -> Array:
    """Returns p, given the log-sum-exp to base 2; 0 for keys not seen."""
    return self.exponential(self.masked(x, seen), lse)

  def masked(self, x: Array, seen: Array | None) -> Array:
    """Masks x for keys that are not seen; None means that all are seen."""
    return x if seen is None else jnp.where(seen, x, MASKED)

  def gradient(self, x: Array, ds: Array) -> Array:
    """Returns the gradient of q k^T scale from the gradient of scores."""
    return ds if self.kind.soft_cap is None else ds * (1 - x * x)


def _iota(shape: tuple[int, ...], axis: int) -> Array:
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
