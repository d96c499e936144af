# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes all moments of a state.

A state is any tree that holds `Moment`s. The leaves that different moments hold
for one parameter are encoded together, because they share random words.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from coat_jax.codecs.group import GroupCodec
from coat_jax.numerics import stochastic
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.optimizer.state import (
  GroupCodecs,
  Moment,
  decode,
  encode,
  in_f32,
  is_moment,
  make_moment,
  moments_in,
)

# The leaves of a tree by the keys of their paths.
Leaves = Mapping[Any, Any]


def decode_state(state: Any) -> Any:
  """Returns the state with its moments replaced by trees of f32 values."""
  found = moments_in(state)
  decoded: list[dict[Any, Any]] = [{} for _ in found]
  stored = [moment.leaves_by_path() for moment in found]
  groups = leaf_codecs(found)
  for keys, row in rows_of(stored).items():
    values = decode(groups[keys], tuple(row.values()))
    for j, x in zip(row, values, strict=True):
      decoded[j][keys] = x
  trees = iter(
    jax.tree.structure(moment.codes).unflatten([own[keys] for keys in leaves])
    for moment, leaves, own in zip(found, stored, decoded, strict=True)
  )
  return jax.tree.map(
    lambda x: next(trees) if is_moment(x) else x, state, is_leaf=is_moment
  )


def encode_state(
  op: str, name: str, like: Any, plain: Any, seed: ArrayLike, count: ArrayLike
) -> Any:
  """Inverts `decode_state`: encodes `plain` like the state `like`.

  The moments of `like` determine which leaves are encoded and by which codec;
  `seed` and `count` determine the random words. Error messages name `op` and
  its argument `name`. Raises a ValueError if `plain` has another structure, or
  moments of other shapes.
  """
  nodes, treedef, new_nodes = _flatten_both(op, name, like, plain)
  trees = [
    new for old, new in zip(nodes, new_nodes, strict=True) if is_moment(old)
  ]
  found = moments_in(like)
  codecs = [moment.codec for moment in found]
  encoded = iter(encode_trees(trees, codecs, leaf_codecs(found), seed, count))
  return treedef.unflatten(
    next(encoded) if is_moment(old) else new
    for old, new in zip(nodes, new_nodes, strict=True)
  )


def plain_moments(op: str, name: str, like: Any, plain: Any) -> list[Any]:
  """Lists the trees in `plain` that correspond to the moments of `like`.

  Raises the errors of `encode_state`.
  """
  nodes, _, new_nodes = _flatten_both(op, name, like, plain)
  return [
    new for old, new in zip(nodes, new_nodes, strict=True) if is_moment(old)
  ]


def _flatten_both(op: str, name: str, like: Any, plain: Any) -> Any:
  """Returns the nodes of `like`, its structure, and the nodes of `plain`."""
  nodes, treedef = jax.tree.flatten(like, is_leaf=is_moment)
  new_nodes = flatten_like(op, name, treedef, plain)
  got, want = [], []
  for old, new in zip(nodes, new_nodes, strict=True):
    if is_moment(old):
      got += [jnp.shape(x) for x in jax.tree.leaves(new)]
      want += [jnp.shape(x) for x in jax.tree.leaves(old.codes)]
  if got != want:
    raise ValueError(
      f"{op}: {name} must have leaves of shapes {want}, got {got}; pass a "
      "state for the same parameters"
    )
  return nodes, treedef, new_nodes


def flatten_like(op: str, name: str, treedef: Any, state: Any) -> list[Any]:
  """Lists the nodes of a state; a ValueError if it has another structure."""
  try:
    return treedef.flatten_up_to(state)
  except ValueError as error:
    raise ValueError(
      f"{op}: {name} must be the state of the optimizer that is encoded, got "
      f"another structure ({error}); pass what its init or update gave"
    ) from error


def encode_trees(
  trees: Sequence[Any],
  codecs: Sequence[GroupCodec],
  groups: Mapping[Any, GroupCodecs],
  seed: ArrayLike,
  count: ArrayLike,
) -> list[Moment]:
  """Encodes trees of values, each with its codec in `codecs`, to moments.

  `groups` maps a parameter's path to the codecs of its leaves, one per tree
  that has the parameter; `seed` and `count` determine the random words.
  """
  values = [leaves_by_path(tree) for tree in trees]
  encoded: list[dict[Any, Any]] = [{} for _ in trees]
  for i, (keys, row) in enumerate(rows_of(values).items()):
    key = stochastic.leaf_key(seed, count, i)
    own = tuple(in_f32(x) for x in row.values())
    stored = encode(groups[keys], own, LeafPart(key))
    for j, leaf in zip(row, stored, strict=True):
      encoded[j][keys] = leaf
  return [
    make_moment(tree, [own[keys] for keys in leaves], codec)
    for tree, leaves, own, codec in zip(
      trees, values, encoded, codecs, strict=True
    )
  ]


def rows_of(trees: Sequence[Leaves]) -> dict[Any, dict[int, Any]]:
  """Maps each parameter's path to its leaves, keyed by the index of their tree.

  The position of a parameter in the result determines its random words.
  """
  rows: dict[Any, dict[int, Any]] = {}
  for j, leaves in enumerate(trees):
    for keys, leaf in leaves.items():
      rows.setdefault(keys, {})[j] = leaf
  return rows


def leaf_codecs(found: Sequence[Moment]) -> dict[Any, GroupCodecs]:
  """Maps each parameter's path to the codecs of its leaves."""
  rows = rows_of([moment.leaves_by_path() for moment in found])
  return {
    keys: tuple(found[j].codec_of(leaf) for j, leaf in row.items())
    for keys, row in rows.items()
  }


def leaves_by_path(tree: Any) -> dict[Any, Any]:
  return dict(jax.tree_util.tree_leaves_with_path(tree))
