# SPDX-License-Identifier: Apache-2.0
"""Replaces the embeddings of some tokens with features of images."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, P

from coat_jax.mesh import run_on_shards, run_whole, spec_of
from coat_jax.recipes import MeshAxes


class Placed(NamedTuple):
  """Features that replace tokens' embeddings.

  Attributes:
    features: [B, M, D], M features for each sequence.
    rows: int32 [B, T], the index of the feature that replaces each token;
      negative for tokens that keep their embedding.
  """

  features: Array
  rows: Array


def place_features(x: Array, placed: Placed, *, axes: MeshAxes | None) -> Array:
  """Replaces the embeddings of some tokens in x [B, T, D]."""

  def put(x, features, rows):
    taken = jnp.maximum(rows, 0)[..., None]
    found = jnp.take_along_axis(features, taken, axis=1).astype(x.dtype)
    return jnp.where(rows[..., None] >= 0, found, x)

  if axes is None:
    return run_whole(put, x, *placed, out_specs=spec_of(x))
  where = P(axes.batch, axes.tensor)
  return run_on_shards(
    put,
    x,
    *placed,
    in_specs=(where, P(axes.batch), where),
    out_specs=where,
    check_vma=True,
  )


def token_rows(tokens: Array, token: int, count: int) -> Array:
  """Returns `Placed.rows` for a sequence's first `count` copies of `token`."""
  is_placed = tokens == token
  row = jnp.cumsum(is_placed, axis=1, dtype=jnp.int32) - 1
  return jnp.where(is_placed & (row < count), row, -1)
