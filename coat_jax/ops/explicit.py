# SPDX-License-Identifier: Apache-2.0
"""Whole operations on a mesh with explicit axes, which `jax.make_mesh` makes.

There an array's type says how it is sharded, and JAX asks for the sharding of
what it cannot infer: a sum over tokens that are split, a reshape, the carry of
a scan. So an operation, or a layer's forward or backward, runs as a whole with
automatic axes, where XLA partitions it, and its results get their types from
those of its arguments. Where no axis is explicit it runs as it is.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import Array, P
from jax.sharding import AxisType, reshard

from coat_jax.qtensor import QTensor


def partitioned[R](
  f: Callable[..., R],
  *args: Any,
  types: Callable[[R, tuple], Any] | None = None,
) -> R:
  """f(*args), partitioned by XLA where axes of the mesh are explicit.

  Args:
    f: a function of trees of arrays, differentiable if `f` is.
    *args: what it is called with; leaves that are no arrays stay as they are.
    types: how f's results are sharded, from them and `args`: a tree of
      `PartitionSpec`, or a prefix of one. None for `inferred`.

  Returns:
    What f returns.
  """
  args = varying(args)
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.explicit_axes:
    return f(*args)
  auto = dict.fromkeys(mesh.explicit_axes, AxisType.Auto)
  with jax.sharding.use_abstract_mesh(mesh.update_axis_types(auto)):
    out = f(*jax.tree.map(_untyped, args))
  specs = (types or inferred)(out, args)
  specs = jax.tree.broadcast(specs, out, is_leaf=_is_spec)
  return jax.tree.map(reshard, out, specs)


def varying[Tree](tree: Tree) -> Tree:
  """Casts arrays to vary over the axes of a `shard_map` that any varies over.

  A gradient of one's own is each device's. Of a weight that does not vary, by
  its type, the gradient is their sum, which the transpose of this cast makes,
  in the weight's dtype. Without axes whose types are checked it does nothing.

  Args:
    tree: of arrays; other leaves stay as they are.

  Returns:
    The same tree.
  """
  arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, Array)]
  names = frozenset().union(*map(_axes_of, arrays))

  def cast(x):
    missing = tuple(sorted(names - _axes_of(x))) if isinstance(x, Array) else ()
    return jax.lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def _axes_of(x: Array) -> frozenset[str]:
  return jax.typeof(x).manual_axis_type.varying


def spec_of(x: Array) -> P:
  """How an array's type says that it is sharded: an entry for each axis."""
  spec = jax.typeof(x).sharding.spec
  return P(*spec, *(None,) * (x.ndim - len(spec)))


def product_spec(x: Array, w: Array) -> P:
  """x [..., D] times w [D, *F]: rows sharded like x's, columns like w's.

  An axis of the mesh that splits both (FSDP by columns) splits the rows.
  """
  rows, columns = spec_of(x)[:-1], spec_of(w)[1:]
  taken = axes_in(rows)
  return P(*rows, *(_entry(axes_in([c]), but=taken) for c in columns))


def inferred(out: Any, args: Any) -> Any:
  """How results are sharded, from how the arguments of an operation are.

  A result with the shape of an argument is sharded like it. Others share axes
  with the first argument, [*rows, n] or all rows in one, [n, rows], which are
  sharded like its own; the axes of the mesh that are left, those that split
  other axes of arguments, split the next one, if they can. Scales of groups are
  sharded like their codes.

  Args:
    out: a tree of arrays.
    args: a tree with arrays.

  Returns:
    A `PartitionSpec` for each array of `out`.
  """
  arrays = [x for x in jax.tree.leaves(args) if isinstance(x, Array)]
  if not arrays or not arrays[0].ndim:
    return P()
  same = {x.shape: spec_of(x) for x in reversed(arrays)}
  *shape, width = arrays[0].shape
  *rows, last = spec_of(arrays[0])
  all_rows = _entry(axes_in(rows))
  left = _entry(axes_in(*map(spec_of, arrays)), but=axes_in(rows))

  def of(x) -> Any:
    if isinstance(x, QTensor):
      codes: Any = of(x.qvalue)
      scale: Any = _fitting(codes, x.scale.shape)
      return QTensor(codes, scale)
    if x.shape in same:
      return same[x.shape]
    if list(x.shape[: len(shape)]) == shape:
      return _fitting([*rows, left], x.shape)
    if x.ndim == 2 and x.shape[1] == math.prod(shape):
      first = last if x.shape[0] == width else left
      return _fitting([first, all_rows], x.shape)
    return P()

  return jax.tree.map(of, out, is_leaf=lambda x: isinstance(x, QTensor))


def _untyped(x):
  """With automatic axes, whose names are in no type."""
  return reshard(x, P()) if isinstance(x, Array) else x


def axes_in(*specs: Iterable[Any]) -> tuple[str, ...]:
  """The mesh's axes that specs name, each once."""
  found = {}
  for entry in (entry for spec in specs for entry in spec):
    names = entry if isinstance(entry, tuple) else (entry,)
    found |= dict.fromkeys(name for name in names if name is not None)
  return tuple(found)


def _entry(names: tuple[str, ...], but: Iterable[str] = ()) -> Any:
  """An axis' entry in a spec: these axes of the mesh without some."""
  return tuple(name for name in names if name not in but) or None


def _fitting(entries: Iterable[Any], shape: tuple[int, ...]) -> P:
  """These entries, in front, as far as they split the shape evenly."""
  mesh = jax.sharding.get_abstract_mesh()

  def fits(entry, size):
    return size % math.prod(mesh.shape[name] for name in axes_in([entry])) == 0

  pairs = zip(entries, shape, strict=False)
  return P(*(entry if fits(entry, size) else None for entry, size in pairs))


def _is_spec(x) -> bool:
  return isinstance(x, P)
