# SPDX-License-Identifier: Apache-2.0
"""Computes and masks attention scores, tile by tile."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from coat_jax.ops.types import AttentionKind
from coat_jax.pallas.mosaic.attention_tiles import LOG2_E, MASKED
from coat_jax.pallas.triton import ptx
from coat_jax.pallas.visits import Visits, segment_bounds


@dataclasses.dataclass(frozen=True)
class Tile:
  """The sizes of tiles of queries and keys, and how programs process them."""

  queries: int  # A power of two, at least 16. The same applies to `keys`.
  keys: int
  warps: int
  stages: int  # The number of loads in flight.

  @property
  def longest(self) -> int:
    """The number of which a sequence's length must be a multiple."""
    return max(self.queries, self.keys)


def segment_refs(segments: Array | None, own: int, others: int) -> tuple:
  """Returns ids [B, T] and `segment_bounds`; three None without segments."""
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

    `length` is the length of the sequence whose tiles are visited; `segments`
    are the refs of `segment_refs`.
    """
    own = pl.program_id(0)
    size, step = tile.queries, tile.keys
    if not is_of_queries:
      size, step = step, size
    elif kind.causal:
      own = pl.num_programs(0) - 1 - own  # Tiles that visit most start first.
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
    """Returns which keys the queries see in a visited tile; None for all."""
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
  """Computes and masks attention scores.

  A score is stored as x, with log2(exp(score)) = x * unit for a constant
  `unit`. Without a soft cap, x is q k^T. With a cap, x is score / cap, which is
  a tanh.
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
    """Returns p, given the log-sum-exp to base 2; 0 for masked scores."""
    return self.exponential(self.masked(x, seen), lse)

  def masked(self, x: Array, seen: Array | None) -> Array:
    """Replaces x by `MASKED` where `seen` is False; None means all are seen."""
    return x if seen is None else jnp.where(seen, x, MASKED)

  def gradient(self, x: Array, ds: Array) -> Array:
    """Returns the gradient of q k^T scale from the gradient of scores."""
    return ds if self.kind.soft_cap is None else ds * (1 - x * x)


def _iota(shape: tuple[int, ...], axis: int) -> Array:
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
