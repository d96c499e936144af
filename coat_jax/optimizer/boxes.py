# SPDX-License-Identifier: Apache-2.0
"""Puts a state's arrays into flax boxes with their parameters' axis names.

Flax stores axis names in boxes around parameters: in the metadata of an
`nnx.Variable`, or in Linen's `Partitioned`. Functions such as
`nnx.get_partition_spec` shard an array by the names in its box, and replicate
arrays without a box.

Along one axis, a moment's statistics have one entry per group or per tile, so
this axis is shorter than the parameter's axis. The shorter axis keeps its name
only if the number of devices along it divides the lengths of both axes. If
several logical axis rules apply to the name, this must be true for each rule.
If the number of devices is unknown, we drop the name: replicated statistics
work on every mesh, whereas JAX raises an error for an uneven split.
"""

import contextlib
import contextvars
import math
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import P
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding

AnyMesh = Mesh | AbstractMesh

# The metadata keys under which an `nnx.Variable` stores axis names.
# `nnx.Optimizer` prefers the second key.
_NAMES = ("out_sharding", "optimizer_sharding")

# The mesh that was set when `abstract_state` was called. That function traces
# `init` under another mesh.
_CALLERS_MESH: contextvars.ContextVar[AnyMesh | None] = contextvars.ContextVar(
  "callers_mesh", default=None
)


class _Context(NamedTuple):
  """The mesh and rules that map an axis name to a number of devices."""

  mesh: AnyMesh | None
  rules: Sequence[tuple[Any, Any]]
  missing: int = 0  # The number of array axes without a name.


@contextlib.contextmanager
def callers_mesh(mesh: AnyMesh) -> Iterator[None]:
  """Makes `box_like` choose names for `mesh`, whatever mesh is set."""
  token = _CALLERS_MESH.set(mesh)
  try:
    yield
  finally:
    _CALLERS_MESH.reset(token)


def mesh_of(tree: Any) -> AnyMesh | None:
  """Returns the mesh in the types of a tree's arrays, or None."""
  for x in jax.tree.leaves(tree):
    known = jax.typeof(x) if isinstance(x, jax.Array) else x
    mesh = getattr(getattr(known, "sharding", None), "mesh", None)
    if mesh is not None and not mesh.empty:
      return mesh
  return None


def box_like(
  like: Any, arrays: Sequence[Any], mesh: AnyMesh | None = None
) -> Any:
  """Puts one array per leaf of `like` into the leaf's box.

  An array of the leaf's shape keeps all names; a scalar gets none. If no mesh
  is set, `mesh` is used for Variables that flax shards on creation.
  """
  if "flax" not in sys.modules:
    return jax.tree.structure(like).unflatten(arrays)
  from flax import nnx
  from flax.core import meta

  rest = iter(arrays)

  def rebox(node):
    leaves = jax.tree.leaves(node)
    own = [next(rest) for _ in leaves]
    if not _is_box(node):
      return own[0]
    if len(own) == 1 and leaves[0] is _value(node):
      return _box_array(node, own[0], mesh)
    return jax.tree.structure(nnx.as_pure(meta.unbox(node))).unflatten(own)

  return jax.tree.map(rebox, like, is_leaf=_is_box)


def last_names(tree: Any) -> list[Any]:
  """Lists the name of each leaf's last axis; None if the axis has no name."""
  if "flax" not in sys.modules:
    return [None] * len(jax.tree.leaves(tree))
  out = []
  for node in jax.tree.leaves(tree, is_leaf=_is_box):
    metadata = _metadata(node) if _is_box(node) else {}
    names = _entries(metadata.get("out_sharding"))
    missing = _missing_axes(metadata, names)
    for x in jax.tree.leaves(node):
      last = x.ndim - 1 - missing
      out.append(names[last] if 0 <= last < len(names) else None)
  return out


def _is_box(node: Any) -> bool:
  from flax import nnx
  from flax.core import meta

  return isinstance(node, nnx.Variable | meta.AxisMetadata)


def _is_variable(node: Any) -> bool:
  from flax import nnx

  return isinstance(node, nnx.Variable)


def _value(node: Any) -> Any:
  if _is_variable(node):
    return node.get_raw_value()
  return getattr(node, "value", None)


def _metadata(node: Any) -> dict[str, Any]:
  """Returns a box's metadata with the keys of an `nnx.Variable`."""
  if _is_variable(node):
    return dict(node.get_metadata())
  if isinstance(getattr(node, "metadata", None), dict):
    # The box stands for a Variable that `nnx.bridge` stores in a Linen model.
    return dict(node.metadata)
  return {
    "out_sharding": getattr(node, "names", None),
    "mesh": getattr(node, "mesh", None),
    "sharding_rules": getattr(node, "rules", None),
  }


def _box_array(node: Any, x: Any, mesh: AnyMesh | None) -> Any:
  """Puts an array into its parameter's box, with the names that fit."""
  metadata = _metadata(node)
  shape = getattr(_value(node), "shape", ())
  for key in _NAMES:
    if key in metadata and x.shape != shape:
      names = metadata[key]
      context = _context(metadata, names, mesh)
      metadata[key] = _fit(names, shape, x.shape, context)
  if _is_variable(node):
    return type(node).from_metadata(x, metadata)
  if isinstance(getattr(node, "metadata", None), dict):
    return node.replace(value=x, metadata=metadata)
  if hasattr(node, "names"):
    return node.replace(value=x, names=metadata["out_sharding"] or ())
  # We do not know how another library's box names axes.
  return x


def _context(
  metadata: Mapping[str, Any], names: Any, mesh: AnyMesh | None
) -> _Context:
  from flax.core import spmd

  set_mesh = jax.sharding.get_abstract_mesh()
  if metadata.get("mesh") is not None:
    mesh = metadata["mesh"]
  elif metadata.get("eager_sharding"):
    mesh = mesh if set_mesh.empty else set_mesh
  else:
    callers = _CALLERS_MESH.get()
    mesh = set_mesh if callers is None else callers
  local = metadata.get("sharding_rules") or ()
  rules = (*spmd.get_logical_axis_rules(), *local)
  return _Context(mesh, rules, _missing_axes(metadata, _entries(names)))


def _missing_axes(metadata: Mapping[str, Any], names: Sequence[Any]) -> int:
  """Returns 1 if the layers' axis name is stored separately, as in MaxText."""
  added = "partition_name" in metadata
  return int(added and metadata["partition_name"] not in names)


def _entries(names: Any) -> tuple[Any, ...]:
  """Returns axis names as a tuple; flax accepts several types."""
  if isinstance(names, Format):
    names = names.sharding
  if isinstance(names, NamedSharding):
    names = names.spec
  return tuple(names) if isinstance(names, tuple | list | P) else ()


def _fit(
  names: Any,
  like: tuple[int, ...],
  shape: tuple[int, ...],
  context: _Context,
) -> Any:
  """Returns the names for a statistic of this shape, in the type of `names`.

  `like` is the shape of the parameter.
  """
  if isinstance(names, Format):
    names = names.sharding
  if isinstance(names, NamedSharding):
    spec = _fit(names.spec, like, shape, context._replace(mesh=names.mesh))
    return NamedSharding(names.mesh, spec or P())
  entries = list(_entries(names)[: len(shape)])
  if not entries:
    return None
  sizes = [*zip(like, shape, strict=False)][context.missing :]
  for axis, (old, new) in enumerate(sizes[: len(entries)]):
    counts = {1} if old == new else _device_counts(entries[axis], context)
    if not counts or any(old % count or new % count for count in counts):
      entries[axis] = None
  return P(*entries) if isinstance(names, P) else type(names)(entries)


def _device_counts(name: Any, context: _Context) -> set[int]:
  """Returns the possible numbers of devices along an axis; empty if unknown.

  `name` is an entry of a spec: None, a name, or several names.
  """
  if isinstance(name, tuple | list):
    counts = {1}
    for part in name:
      parts = _device_counts(part, context)
      counts = {count * other for count in counts for other in parts}
    return counts
  sizes = {} if context.mesh is None else context.mesh.shape
  counts = set()
  for axes in [axes for key, axes in context.rules if key == name] or [name]:
    axes = () if axes is None else axes
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    if not all(isinstance(x, Hashable) and x in sizes for x in axes):
      return set()
    counts.add(math.prod(sizes[axis] for axis in axes))
  return counts
