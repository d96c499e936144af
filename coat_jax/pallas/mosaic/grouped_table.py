# SPDX-License-Identifier: Apache-2.0
"""Computes the table that tells `grouped_kernel` which tiles to compute.

Only the GPU knows the sizes of groups, so the grid cannot depend on them.
Instead, XLA computes a table from the sizes before the kernel starts.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl


class Entry(NamedTuple):
  """Fields of the table, int32 [entries], or of one of its entries, int32 [].

  For `rows_product`, an entry describes a tile of rows. For `weights_product`,
  an entry describes a group.
  """

  group: Any  # Index of the group.
  row: Any  # The tile's first row, a multiple of 8; 0 for a group.
  # The group's rows (or tokens) are [begin, end), clipped to the tile if the
  # entry describes a tile.
  begin: Any
  end: Any
  first: Any  # Index of the first block to sum.
  blocks: Any  # Number of blocks to sum.


def tiles_of_rows(
  sizes: Array, *, m: int, tile_m: int, blocks: int
) -> tuple[Array, Array]:
  """Returns the table for `rows_product`, and the number of entries in use.

  Rows after the last group form an additional group. Its tiles sum no blocks,
  so the result is zero in these rows.
  """
  groups = len(sizes)
  sizes = jnp.append(sizes, m - jnp.sum(sizes)).astype(jnp.int32)
  ends = jnp.cumsum(sizes, dtype=jnp.int32)
  begins = ends - sizes
  aligned = begins // 8 * 8
  counts = jnp.where(sizes > 0, pl.cdiv(ends - aligned, jnp.int32(tile_m)), 0)
  last = jnp.cumsum(counts, dtype=jnp.int32)
  # An upper bound on the number of tiles: each group begins at most 7 rows
  # early, and its last tile contains at least one row.
  entries = pl.cdiv(m + 7 * (groups + 1), tile_m) + groups + 1
  tile = jnp.arange(entries, dtype=jnp.int32)
  # A binary search would launch several kernels for each step.
  group = jnp.searchsorted(last, tile, side="right", method="compare_all")
  group = group.astype(jnp.int32)
  group = jnp.minimum(group, groups)
  row = aligned[group] + (tile - (last - counts)[group]) * tile_m
  table = Entry(
    group=jnp.minimum(group, groups - 1),
    # Tiles that would reach past the last row move up.
    row=jnp.minimum(row, m - tile_m),
    begin=jnp.maximum(begins[group], row),
    end=jnp.minimum(ends[group], row + tile_m),
    first=jnp.zeros_like(tile),
    blocks=jnp.where(group < groups, jnp.int32(blocks), 0),
  )
  return jnp.stack(table), last[-1:]


def blocks_of_tokens(sizes: Array, depth: int) -> Array:
  """Returns the table for `weights_product`."""
  ends = jnp.cumsum(sizes, dtype=jnp.int32)
  begins = ends - sizes.astype(jnp.int32)
  first = begins // depth
  group = jnp.arange(len(sizes), dtype=jnp.int32)
  table = Entry(
    group=group,
    row=jnp.zeros_like(group),
    begin=begins,
    end=ends,
    first=first,
    blocks=jnp.where(sizes > 0, pl.cdiv(ends, jnp.int32(depth)) - first, 0),
  )
  return jnp.stack(table)
