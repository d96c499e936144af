# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes all moments of a state: any tree that holds `Moment`s."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves_with_path
from jax.typing import ArrayLike

from coat_jax.codecs.group import GroupCodec
from coat_jax.numerics import stochastic
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.optimizer.state import Moment, is_moment, make_moment
from coat_jax.optimizer.step import decode, encode
from coat_jax.optimizer.weights import in_f32


def decode_moment(moment: Moment) -> Any:
  """Decodes a moment to a tree of f32 arrays."""
  values = [decode((moment.codec_of(x),), (x,))[0] for x in moment.leaves()]
  return jax.tree.structure(moment.codes).unflatten(values)


def decode_state(state: Any, other: Callable[[Any], Any] = lambda x: x) -> Any:
  """Decodes all moments of a state; applies `other` to its other leaves."""
  return jax.tree.map(
    lambda x: decode_moment(x) if is_moment(x) else other(x),
    state,
    is_leaf=is_moment,
  )


def encode_state(
  op: str, name: str, like: Any, plain: Any, seed: ArrayLike, count: ArrayLike
) -> Any:
  """Inverts `decode_state`: encodes `plain` like the state `like`.

  The moments of `like` determine which leaves are encoded and by which codec;
  `seed` and `count` determine the random words. Raises the errors of
  `pair_nodes`.
  """
  pairs = pair_nodes(op, name, like, plain)
  found = [(old, new) for old, new in pairs if is_moment(old)]
  moments = iter(
    encode_trees(
      [new for _, new in found],
      [old.codec for old, _ in found],
      [[old.codec_of(x) for x in old.leaves()] for old, _ in found],
      seed,
      count,
    )
  )
  return jax.tree.structure(like, is_leaf=is_moment).unflatten(
    next(moments) if is_moment(old) else new for old, new in pairs
  )


def encode_trees(
  trees: Sequence[Any],
  codecs: Sequence[GroupCodec],
  leaf_codecs: Sequence[Sequence[GroupCodec]],
  seed: ArrayLike,
  count: ArrayLike,
) -> list[Moment]:
  """Encodes trees of values to moments with these codecs.

  `leaf_codecs` lists for each tree the codecs of its leaves: the moment's, or a
  plain one. The random words of a leaf depend on `seed`, on `count`, on the
  order in which paths appear and on how many trees had the path before.
  """
  seen: dict[Any, tuple[int, int]] = {}
  moments = []
  for tree, codec, own in zip(trees, codecs, leaf_codecs, strict=True):
    stored = []
    leaves = tree_leaves_with_path(tree)
    for (keys, x), group in zip(leaves, own, strict=True):
      index, place = seen.get(keys, (len(seen), 0))
      seen[keys] = index, place + 1
      part = LeafPart(stochastic.leaf_key(seed, count, index))
      stored += encode((group,), (in_f32(x),), part, first=place)
    moments.append(make_moment(tree, stored, codec))
  return moments


def pair_nodes(
  op: str, name: str, like: Any, plain: Any
) -> list[tuple[Any, Any]]:
  """Pairs the nodes of a state, moments or other leaves, with those of `plain`.

  Raises a ValueError if `plain`, the argument `name` of `op`, has another
  structure, or moments of other shapes.
  """
  nodes, treedef = jax.tree.flatten(like, is_leaf=is_moment)
  pairs = list(zip(nodes, flatten_like(op, name, treedef, plain), strict=True))
  got, want = [], []
  for old, new in pairs:
    if is_moment(old):
      got += [jnp.shape(x) for x in jax.tree.leaves(new)]
      want += [jnp.shape(x) for x in jax.tree.leaves(old.codes)]
  if got != want:
    raise ValueError(
      f"{op}: {name} must have leaves of shapes {want}, got {got}; pass a "
      "state for the same parameters"
    )
  return pairs


def flatten_like(op: str, name: str, treedef: Any, state: Any) -> list[Any]:
  """Lists the nodes of a state; a ValueError if it has another structure."""
  try:
    return treedef.flatten_up_to(state)
  except ValueError as error:
    raise ValueError(
      f"{op}: {name} must be the state of the optimizer that is encoded, got "
      f"another structure ({error}); pass what its init or update gave"
    ) from error
