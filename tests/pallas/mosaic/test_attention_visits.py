# SPDX-License-Identifier: Apache-2.0
"""Compares the tiles that attention visits with whole masks."""

import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.ops import AttentionKind
from coat_jax.pallas.mosaic.attention_visits import Visits, segment_bounds
from tests.ops.naive_attention import seen

T = 96
KINDS = [
  AttentionKind(False),
  # Windows of about 1, 16, 32, 64 and 96 keys (tiles have 16 or 32), and no
  # window.
  *(
    AttentionKind(window=window)
    for window in (1, 2, 15, 16, 17, 18, 31, 33, 34, 63, 65, 95, None)
  ),
]


def tiles_of(mask, rows, columns, of_queries):
  """Returns which tiles of a mask are seen at least partly, and which fully.

  If rows are queries (`of_queries`), padding after the last key counts as not
  seen, so no tile with such padding is fully seen. Other padding is ignored.
  """
  ends = [(0, -mask.shape[0] % rows), (0, -mask.shape[1] % columns)]
  shape = -(-mask.shape[0] // rows), rows, -1, columns
  is_seen = np.pad(mask, ends).reshape(shape).any((1, 3))
  whole = np.pad(mask, [ends[0], (0, 0)], constant_values=True)
  whole = np.pad(whole, [(0, 0), ends[1]], constant_values=not of_queries)
  return is_seen, whole.reshape(shape).all((1, 3))


@pytest.mark.parametrize("length", [T, T - 5])
@pytest.mark.parametrize("kind", KINDS)
def test_visited_and_masked_tiles_match_the_mask(kind, length):
  mask = seen(length, length, kind)[0]
  for size, step in ((32, 16), (16, 32)):
    for of_queries in (True, False):
      own_first = mask if of_queries else mask.T
      is_seen, is_whole = tiles_of(own_first, size, step, of_queries)
      tiles = zip(is_seen, is_whole, strict=True)
      for own, (seen_tiles, whole_tiles) in enumerate(tiles):
        visits = Visits.of(
          kind,
          jnp.int32(own * size),
          size,
          step,
          length,
          of_queries=of_queries,
        )
        others = np.arange(len(seen_tiles))
        visited = (others >= visits.first) & (others < visits.behind)
        unmasked = (others >= visits.whole) & (others < visits.edge)
        np.testing.assert_array_equal(visited, seen_tiles)
        # Tiles that reach past the sequence's end may be masked unnecessarily.
        assert not np.any(unmasked & ~whole_tiles)
        if length == T:
          np.testing.assert_array_equal(unmasked, whole_tiles)


def test_segments_bound_the_visited_tiles():
  segments = jnp.int32([[0] * 20 + [1] * 30 + [2] * 37])
  first, behind = segment_bounds(segments, 32, 16)
  np.testing.assert_array_equal(first, [[0, 1, 3]])
  np.testing.assert_array_equal(behind, [[4, 6, 6]])
