# SPDX-License-Identifier: Apache-2.0
"""How the arrays of a block are sharded on a mesh, as `PartitionSpec`s.

        [B, T, D]            batch, tensor      tokens, between blocks
        [B, T, F]            batch, -, tensor   whole sequences, inside
weight  [D, ..., F]          fsdp, ..., tensor  its columns are split
        [F, D]               tensor and fsdp    its inputs are split
        [D, ...]             fsdp               rows alone, of drop-in layers
"""

from typing import Any, Literal

from jax import Array, P

from coat_jax.ops import BlockScales, Operand
from coat_jax.recipe import MeshAxes

# How a linear layer's kernel is split over the tensor axis: column-parallel,
# row-parallel ("inputs": its rows, with what they are multiplied by), or None,
# replicated: then devices along the axis have other tokens.
Split = Literal[None, "columns", "inputs"]


def tokens(axes: MeshAxes, x: Array) -> P:
  """[B, T, ...] between blocks; the rows of [N, D] over the same devices."""
  if x.ndim < 2:
    raise ValueError(
      "layers: on a mesh they take [..., T, D], got one token of "
      f"{x.shape[-1]}; vmap over sequences, not over tokens"
    )
  if x.ndim < 3:
    return P(axes.tokens)
  return P(axes.batch, axes.tensor)


def own_heads(axes: MeshAxes) -> P:
  """[B, T, N, H] inside a block: of whole sequences heads are split."""
  return P(axes.batch, None, axes.tensor)


def own_columns(axes: MeshAxes, ndim: int) -> P:
  """[B, T, ..., F] inside a block: of whole sequences F is split.

  Of [N, F] the rows are.
  """
  if ndim < 3:
    return P(axes.tokens)
  return P(axes.batch, *(None,) * (ndim - 2), axes.tensor)


def split_rows(axes: MeshAxes) -> P:
  """A weight [D, ...] of which no axis but the rows is split."""
  return P(axes.fsdp)


def split_columns(axes: MeshAxes, ndim: int) -> P:
  """A weight [D, ..., F] whose columns belong to devices."""
  return P(axes.fsdp, *(None,) * (ndim - 2), axes.tensor)


def split_inputs(axes: MeshAxes) -> P:
  """A weight [F, D] that reads columns which belong to devices."""
  return P(tuple(a for a in (axes.tensor, axes.fsdp) if a) or None)


def split_kernel(axes: MeshAxes, split: Split, ndim: int) -> P:
  """A linear layer's kernel [D, ..., F]."""
  if split == "columns":
    return split_columns(axes, ndim)
  return split_inputs(axes) if split == "inputs" else split_rows(axes)


def cached(cache: Operand | None, w: P) -> Any:
  """A weight's cache; None has no specs.

  Args:
    cache: what there is of it.
    w: how the weight [D, ..., F] is sharded.
  """
  if cache is None:
    return None
  return cache_specs(
    w,
    has_codes=cache.rows is not None,
    in_tiles=isinstance(cache.scale, BlockScales),
  )


def cache_specs(
  w: P, *, has_codes: bool, in_tiles: bool, num_stacked: int = 0
) -> Any:
  """Of a cache: rows [D, F] sharded like the weight, columns [F, D] turned.

  Scales of tiles are sharded like what they are of.

  Args:
    w: how the weight [D, ..., F] is sharded.
    has_codes: or the scale alone.
    in_tiles: whether scales are `BlockScales`.
    num_stacked: axes of layers in front of all of it.
  """
  stack = (None,) * num_stacked
  first, last = w[0], w[-1] if len(w) > 1 else None
  rows: Any = P(*stack, first, last)
  columns: Any = P(*stack, last, first)
  scale: Any = P()
  if in_tiles:
    scale = BlockScales(rows, columns if has_codes else None)
  if not has_codes:
    return Operand(None, None, scale)
  return Operand(rows, columns, scale)
