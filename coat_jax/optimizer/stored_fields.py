# SPDX-License-Identifier: Apache-2.0
"""The encoded fields of a state, leaf by leaf: encoded, decoded, replaced.

A leaf's moments are here what they are for Adam (`optimizer.moments`): a tuple
with one `Encoded` for each field that has the leaf.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from coat_jax import stochastic
from coat_jax.codecs import MomentCodec
from coat_jax.codecs.group import Encoded, Plain
from coat_jax.optimizer import moments
from coat_jax.optimizer.fields import (
  FIELDS,
  EncodedMu,
  EncodedNu,
  Kind,
  is_field,
  path_of,
)
from coat_jax.optimizer.moments import GroupCodecs, Stored
from coat_jax.optimizer.state import MomentState


def groups_of(
  kinds: Sequence[Kind], values: Sequence[Any], codec: MomentCodec | None
) -> GroupCodecs:
  """The group codecs of a leaf's fields: `codec`'s, or f32 for None."""
  if codec is None:
    return tuple(
      Plain("complex64" if jnp.iscomplexobj(x) else "float32") for x in values
    )
  return tuple(codec.mu if kind == "mu" else codec.nu for kind in kinds)


def kind_of(field: EncodedMu | EncodedNu) -> Kind:
  """Which of a codec's group codecs a field is encoded by."""
  return "mu" if isinstance(field, EncodedMu) else "nu"


def rows_of(trees: Sequence[Any]) -> dict[Any, list[tuple[int, int]]]:
  """The leaves of several fields, those of one parameter together.

  Args:
    trees: fields, or their codes.

  Returns:
    By the path in a field, (number of the field, place among its leaves) for
    each field that has the leaf. A leaf's number, of which its random words
    depend, is its place here.
  """
  rows: dict[Any, list[tuple[int, int]]] = {}
  for j, tree in enumerate(trees):
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    for place, (keys, _) in enumerate(flat):
      rows.setdefault(keys, []).append((j, place))
  return rows


def encode_fields(
  kinds: Sequence[Kind],
  trees: Sequence[Any],
  groups: Sequence[GroupCodecs],
  seed: ArrayLike,
  count: ArrayLike,
) -> list[Any]:
  """Encodes fields.

  Args:
    kinds: one for each field.
    trees: the fields' values.
    groups: one for each of `rows_of(trees)`.
    seed: of the random words.
    count: of steps.

  Returns:
    An `EncodedMu` or `EncodedNu` for each field.
  """
  flat = [jax.tree.leaves(tree) for tree in trees]
  out: list[dict[int, Any]] = [{} for _ in trees]
  rows = rows_of(trees).values()
  for i, (row, chosen) in enumerate(zip(rows, groups, strict=True)):
    values = tuple(moments.in_f32(flat[j][place]) for j, place in row)
    key = stochastic.leaf_key(seed, count, i)
    stored = moments.encode(chosen, values, key)
    for (j, place), encoded in zip(row, stored, strict=True):
      out[j][place] = encoded
  fields = []
  for kind, tree, leaves in zip(kinds, trees, out, strict=True):
    stored = [(leaves[place],) for place in range(len(leaves))]
    like = moments.trees_like(tree, 1)
    fields.append(FIELDS[kind](*moments.unflatten(like, stored)))
  return fields


class StoredFields(NamedTuple):
  """The encoded fields of a state.

  Attributes:
    nodes: of the state, in order; fields whole.
    treedef: puts nodes together again.
    fields: those of `nodes` that are encoded.
    leaves: by its path, what is stored of each leaf.
  """

  nodes: list[Any]
  treedef: Any
  fields: list[Any]
  leaves: dict[Any, Stored]

  @property
  def kinds(self) -> list[Kind]:
    """One for each field."""
    return [kind_of(field) for field in self.fields]

  @property
  def paths(self) -> list[str]:
    """Of the fields in the state."""
    flat = jax.tree_util.tree_flatten_with_path(
      self.treedef.unflatten(range(len(self.nodes)))
    )[0]
    return [path_of(keys) for keys, i in flat if is_field(self.nodes[i])]

  @property
  def rows(self) -> dict[Any, list[tuple[int, int]]]:
    """`rows_of` the fields."""
    return rows_of([field[0] for field in self.fields])

  def groups(self, op: str, codec: MomentCodec) -> list[GroupCodecs]:
    """The group codecs of each leaf; raises where they are not `codec`'s."""
    out = []
    for row, stored in zip(
      self.rows.values(), self.leaves.values(), strict=True
    ):
      ours = groups_of([self.kinds[j] for j, _ in row], stored, codec)
      out.append(moments.stored_groups(op, stored, ours, codec.name))
    return out

  def decode(self, groups: Sequence[GroupCodecs]) -> list[Any]:
    """The fields' values."""
    out: list[dict[int, Array]] = [{} for _ in self.fields]
    leaves = zip(self.rows.values(), self.leaves.values(), groups, strict=True)
    for row, stored, chosen in leaves:
      values = moments.decode(chosen, stored)
      for (j, place), x in zip(row, values, strict=True):
        out[j][place] = x
    return [
      jax.tree.structure(field[0]).unflatten([x[i] for i in range(len(x))])
      for field, x in zip(self.fields, out, strict=True)
    ]

  def plain_fields(self, op: str, name: str, state: Any) -> list[Any]:
    """The fields of a state that the inner optimizer made.

    Args:
      op: the public function that asks, for error messages.
      name: of its argument.
      state: of the inner optimizer.

    Raises:
      ValueError: it has another structure, or fields of other shapes.
    """
    nodes = plain_nodes(op, name, self.treedef, state)
    pairs = zip(nodes, self.nodes, strict=True)
    trees = [new for new, old in pairs if is_field(old)]
    got, want = (
      [jnp.shape(x) for tree in found for x in jax.tree.leaves(tree)]
      for found in (trees, [field[0] for field in self.fields])
    )
    if got != want:
      raise ValueError(
        f"{op}: {name} must have leaves of shapes {want}, got {got}; pass a "
        "state for the same parameters"
      )
    return trees

  def replace(self, fields: Sequence[Any], nodes: Sequence[Any] | None = None):
    """The state with others in the fields' place, and perhaps other nodes."""
    new = iter(fields)
    nodes = self.nodes if nodes is None else nodes
    return self.treedef.unflatten(
      [
        next(new) if is_field(old) else node
        for old, node in zip(self.nodes, nodes, strict=True)
      ]
    )


def plain_nodes(op: str, name: str, treedef: Any, state: Any) -> list[Any]:
  """The nodes of a state without codes; a ValueError if it has others."""
  try:
    return treedef.flatten_up_to(state)
  except ValueError as error:
    raise ValueError(
      f"{op}: {name} must be the state of the optimizer that is encoded, got "
      f"another structure ({error}); pass what its init or update gave"
    ) from error


def fields_of(state: MomentState) -> dict[Kind, EncodedMu | EncodedNu]:
  """A state's moments as `encoded` would keep them, of fields mu and nu."""
  trees, size = moments.moment_trees(state), len(Encoded._fields)
  # What is stored alone is a first moment.
  starts = range(0, len(trees), size)
  return {
    name: FIELDS[name](*trees[start : start + size])
    for name, start in zip(FIELDS, starts, strict=False)
  }


def stored_fields(inner: Any) -> StoredFields:
  """The encoded fields of `EncodedState.inner`."""
  nodes, treedef = jax.tree.flatten(inner, is_leaf=is_field)
  fields = [node for node in nodes if is_field(node)]
  flat = [moments.flatten(field) for field in fields]
  leaves = {
    keys: tuple(flat[j][place][0] for j, place in row)
    for keys, row in rows_of([field[0] for field in fields]).items()
  }
  return StoredFields(nodes, treedef, fields, leaves)
