# SPDX-License-Identifier: Apache-2.0
"""How a leaf is sharded, and whether its shards contain whole groups."""

from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from coat_jax.codecs.factored import TILE_COLUMNS, Factored, row_axis, row_tiles
from coat_jax.codecs.group import GroupCodec
from coat_jax.optimizer.masks import leaf_paths
from coat_jax.optimizer.state import Moment, MomentOptions


def check_spec(
  op: str, path: str, shape: tuple[int, ...], sharding: NamedSharding
) -> None:
  """Raises a ValueError if a leaf cannot be sharded like this."""
  try:
    sharding.shard_shape(shape)
    jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)
  except (ValueError, IndexError) as error:  # IndexError: a spec is too long.
    raise ValueError(
      f"{op}: a spec must have at most one entry per axis and split each "
      f"axis evenly, got {sharding.spec} for shape {shape} at {path!r}, "
      f"mesh {dict(sharding.mesh.shape)}; shorten the spec, shard other "
      "axes, or pad the axis"
    ) from error


def splits_groups(
  sharding: Sharding, shape: tuple[int, ...], codec: GroupCodec
) -> bool:
  """Returns whether devices would split a group or a tile of a moment."""
  if not shape:
    return False
  if isinstance(codec, Factored):
    local = sharding.shard_shape(shape)
    row = row_axis(shape)
    if row is None:
      return False
    height = shape[row] // row_tiles(shape[row])
    sizes = {row: height, len(shape) - 1: TILE_COLUMNS}
    return any(local[i] < shape[i] and local[i] % n for i, n in sizes.items())
  columns = sharding.shard_shape(shape)[-1]
  size = getattr(codec, "group_size", 1)
  return columns < shape[-1] and columns % size != 0


def shardings_of(
  options: MomentOptions, moment: Moment
) -> list[NamedSharding | None]:
  """Lists each leaf's sharding, or None if it is unknown.

  Without `options.shardings`, only shardings on explicit axes are known: the
  types of the moment's codes contain them.
  """
  codes = leaf_paths(moment.codes)
  if options.shardings is None:
    types = [jax.typeof(x).sharding for _, x in codes]
    return [t if t.mesh.explicit_axes else None for t in types]
  known = dict(leaf_paths(options.shardings))
  for where in known.values():
    if not isinstance(where, NamedSharding):
      raise TypeError(
        f"{options.op}: shardings must be NamedShardings, got {where!r}; pass "
        "jax.tree.map(lambda x: x.sharding, params)"
      )
  if missing := [path for path, _ in codes if path not in known]:
    raise ValueError(
      f"{options.op}: there must be a sharding for each parameter, got none "
      f"for {missing[0]!r}; pass a tree like the parameters"
    )
  for path, x in codes:
    check_spec(options.op, path, x.shape, known[path])
  return [known[path] for path, _ in codes]


def check_mesh(op: str, arrays: Any, known: Any) -> None:
  """Raises a ValueError if an array is on a mesh with axes of other sizes.

  XLA cannot compile such a step. If a mesh is set, the step runs on it instead.
  """
  if not jax.sharding.get_abstract_mesh().empty:
    return
  for x in jax.tree.leaves(arrays):
    actual = jax.typeof(x).sharding.mesh
    if not actual.empty and _sizes(actual) != _sizes(known):
      raise ValueError(
        f"{op}: shardings must be on the mesh of the parameters, gradients and "
        f"state, got mesh {dict(known.shape)} for an array on mesh "
        f"{dict(actual.shape)}; make the optimizer with the parameters' "
        "shardings"
      )


def _sizes(mesh: Any) -> list[int]:
  return [size for size in mesh.shape.values() if size > 1]
