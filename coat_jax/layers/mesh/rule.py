# SPDX-License-Identifier: Apache-2.0
"""Functions with a gradient of their own that run on each device's shards.

XLA cannot partition a kernel: it would gather the kernel's arguments first. So
a forward and its backward run inside `jax.shard_map` over all axes of the mesh
and write out what they move between devices (`layers.mesh.collectives`).
Nothing is differentiated through `shard_map`, and what is saved for the
backward pass stays on the device that made it.

Between blocks arrays are sharded as `MeshAxes` says: tokens over its axes, a
weight's rows over fsdp. XLA moves arrays that are sharded otherwise. Without
recipe.axes XLA partitions all of it (`ops.explicit` where axes are explicit).
Without a mesh, and inside a caller's own `shard_map`, forward and backward run
as they are.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, P
from jax.sharding import NamedSharding

from coat_jax.layers.residuals import protect_codes
from coat_jax.ops import Operand
from coat_jax.ops.explicit import (
  axes_in,
  inferred,
  partitioned,
  spec_of,
  varying,
)
from coat_jax.recipe import MeshAxes


class _Specs(NamedTuple):
  """A tree of specs, hashable."""

  leaves: tuple[P, ...]
  tree: Any

  @classmethod
  def of(cls, specs) -> "_Specs":
    leaves, tree = jax.tree.flatten(specs)
    return cls(tuple(leaves), tree)

  def specs(self) -> Any:
    return self.tree.unflatten(self.leaves)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["inputs", "own"],
  meta_fields=["input_specs", "result_specs", "cotangent_specs"],
)
@dataclasses.dataclass(frozen=True)
class _Saved:
  """What a forward on a mesh saves for its backward.

  Attributes:
    inputs: the arguments that the backward reads, which are alive anyway.
    own: what the forward made, all devices' shards in a row along axis 0.
    input_specs, result_specs, cotangent_specs: of `inputs`, of the forward's
      results and of what the backward returns.
  """

  inputs: tuple
  own: Any
  input_specs: _Specs
  result_specs: _Specs
  cotangent_specs: _Specs


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["inputs", "own"],
  meta_fields=["cotangent_specs"],
)
@dataclasses.dataclass(frozen=True)
class _Typed:
  """What a forward on explicit axes saves; as in `_Saved`."""

  inputs: tuple
  own: Any
  cotangent_specs: _Specs


class _Scalar(NamedTuple):
  """A scalar that each device has one of, as [1]: in a row they are [P]."""

  value: Array


def rule(
  fwd: Callable,
  bwd: Callable,
  specs: Callable,
  *,
  reads: tuple[int, ...] = (),
  result_spec: Callable | None = None,
) -> Callable:
  """A function with a gradient of its own, run by each device on its shards.

  Args:
    fwd: `fwd(*arrays, *static, recipe)` returns its results and a tree of what
      it made for the backward.
    bwd: `bwd(*static, recipe, inputs, own, g)` returns a cotangent for each of
      the arrays; None for integers and for caches (`Operand`s). `inputs` are
      the arguments that `reads` names, `own` is the tree that `fwd` made.
    specs: `specs(*arrays, *static, recipe)`, how arrays and results are
      sharded: a tuple of trees of `PartitionSpec`, one for each array (a spec
      can stand for a whole tree), and the same for the results.
    reads: places of the arguments that the backward reads too: weights, which
      are alive anyway.
    result_spec: `result_spec(*arrays)`, how the result is sharded on explicit
      axes without recipe.axes; None for `ops.explicit.inferred`.

  Returns:
    `f(arrays, *static, recipe)`, differentiable in its tuple of arrays.
  """

  @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
  def apply(arrays, static):
    return forward(arrays, static)[0]

  def forward(arrays, static):
    inputs = tuple(arrays[i] for i in reads)
    if _is_explicit(static[-1].axes):
      return partitioned_forward(arrays, inputs, static)
    if _is_local(static[-1].axes):
      results, own = fwd(*arrays, *static)
      return results, protect_codes((inputs, own))
    in_specs, out_specs = specs(*arrays, *static)
    in_specs = jax.tree.broadcast(in_specs, arrays, is_leaf=_is_spec)

    def local(*arrays):
      results, own = fwd(*arrays, *static)
      own = jax.tree.map(lambda x: x if x.ndim else _Scalar(x.reshape(1)), own)
      return results, protect_codes(own)

    results, own = jax.shard_map(
      local,
      in_specs=in_specs,
      out_specs=(out_specs, _everywhere()),
      check_vma=False,
    )(*arrays)
    return results, _Saved(
      inputs,
      own,
      input_specs=_Specs.of(tuple(in_specs[i] for i in reads)),
      result_specs=_Specs.of(out_specs),
      cotangent_specs=_Specs.of(_cotangent_specs(in_specs, arrays)),
    )

  def partitioned_forward(arrays, inputs, static):
    def whole(*arrays):
      results, own = fwd(*arrays, *static)
      return results, protect_codes(own)

    def types(out, arrays):
      found = inferred(out, arrays)
      return found if result_spec is None else (result_spec(*arrays), found[1])

    results, own = partitioned(whole, *arrays, types=types)
    specs = _Specs.of(_cotangent_specs(jax.tree.map(spec_of, arrays), arrays))
    return results, _Typed(inputs, own, specs)

  def backward(static, saved, g):
    if isinstance(saved, _Typed):
      whole = functools.partial(bwd, *static)
      types = lambda *_: saved.cotangent_specs.specs()  # noqa: E731
      return (partitioned(whole, saved.inputs, saved.own, g, types=types),)
    if not isinstance(saved, _Saved):
      return (bwd(*static, *saved, g),)

    def local(inputs, own, g):
      own = jax.tree.map(
        lambda x: x.value[0] if isinstance(x, _Scalar) else x,
        own,
        is_leaf=lambda x: isinstance(x, _Scalar),
      )
      return bwd(*static, inputs, own, g)

    cotangents = jax.shard_map(
      local,
      in_specs=(
        saved.input_specs.specs(),
        _everywhere(),
        saved.result_specs.specs(),
      ),
      out_specs=saved.cotangent_specs.specs(),
      check_vma=False,
    )(saved.inputs, saved.own, g)
    return (cotangents,)

  apply.defvjp(forward, backward)

  def f(arrays: tuple, *static: Any) -> Any:
    if _is_explicit(static[-1].axes):
      static = _with_axes_of_types(arrays, static, specs)
    if static[-1].axes is None:
      arrays = varying(arrays)
    elif not _is_local(static[-1].axes):
      arrays = _placed(arrays, specs(*arrays, *static)[0])
    return apply(arrays, static)

  return f


def run_sharded(
  f: Callable, axes: MeshAxes | None, arrays, in_specs, out_specs
):
  """f(*arrays) on each device's shards; what it returns has no gradient.

  Args:
    f: any function of arrays.
    axes: of the mesh.
    arrays, in_specs, out_specs: as `rule` has them.
  """
  if _is_local(axes):
    return f(*arrays)
  arrays = _placed(arrays, in_specs)
  return jax.shard_map(
    f, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )(*arrays)


def run_whole(
  f: Callable, axes: MeshAxes | None, *arrays, types: Callable | None = None
):
  """f(*arrays), which is differentiated as it is written.

  As a whole on explicit axes, where `axes` does not say what they split.

  Args:
    f: any function of arrays.
    axes: of the mesh.
    *arrays, types: as of `ops.explicit.partitioned`.
  """
  if axes is not None:
    return f(*arrays)
  return partitioned(f, *arrays, types=types)


def _is_local(axes: MeshAxes | None) -> bool:
  """Whether what is traced here is one device's shards already."""
  if axes is None:
    return True
  mesh = jax.sharding.get_abstract_mesh()
  missing = [name for name in axes.tokens if name not in mesh.axis_names]
  if missing:
    raise ValueError(
      f"layers: recipe.axes names the axis {missing[0]!r} of a mesh, got "
      f"{mesh.axis_names or 'no mesh'}; call them under jax.set_mesh of a mesh "
      "with these axes, or leave axes out"
    )
  return not (mesh.auto_axes or mesh.explicit_axes)


def _is_explicit(axes: MeshAxes | None) -> bool:
  """Whether types say how arrays are sharded, and nothing else does."""
  return axes is None and bool(jax.sharding.get_abstract_mesh().explicit_axes)


def _with_axes_of_types(arrays: tuple, static: tuple, specs: Callable) -> tuple:
  """The static arguments, with axes where they shard arrays as types say.

  Of axes of data and of FSDP: there each device runs kernels on its own shard,
  and codes are what it gathers, without recipe.axes too.
  """
  mesh = jax.sharding.get_abstract_mesh()
  leaves = jax.tree.leaves(arrays)
  batch = axes_in(spec_of(leaves[0])[:1])
  if mesh.auto_axes or mesh.manual_axes or leaves[0].ndim < 2 or not batch:
    return static

  def fit(wanted) -> bool:
    wanted = jax.tree.broadcast(wanted, arrays, is_leaf=_is_spec)
    return all(
      NamedSharding(mesh, spec_of(x)).is_equivalent_to(
        NamedSharding(mesh, spec), x.ndim
      )
      for x, spec in zip(leaves, jax.tree.leaves(wanted), strict=True)
    )

  *others, recipe = static
  for fsdp in (None, *batch):
    axes = MeshAxes(batch=batch, fsdp=fsdp)
    candidate = (*others, dataclasses.replace(recipe, axes=axes))
    if fit(specs(*arrays, *candidate)[0]):
      return candidate
  return static


def _everywhere() -> P:
  """Of an array's first axis: a shard on each device."""
  return P(jax.sharding.get_abstract_mesh().axis_names)


def _cotangent_specs(specs, arrays):
  """None where there is no cotangent: of caches and of integers.

  And for a whole argument that has none, as its rule returns.
  """

  def of(x, spec):
    has_gradient = isinstance(x, Array) and jnp.issubdtype(
      x.dtype, jnp.floating
    )
    return spec if has_gradient else None

  found = jax.tree.map(of, arrays, specs, is_leaf=_is_cache)
  return tuple(spec if jax.tree.leaves(spec) else None for spec in found)


def _is_cache(x) -> bool:
  return isinstance(x, Operand)


def _is_spec(x) -> bool:
  return isinstance(x, P)


def _placed(arrays, specs):
  """Checks that arrays can be split so; moves them on an explicit mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  leaves, tree = jax.tree.flatten(arrays)
  specs = jax.tree.leaves(jax.tree.broadcast(specs, arrays, is_leaf=_is_spec))
  out = []
  for x, spec in zip(leaves, specs, strict=True):
    for size, names in zip(x.shape, spec, strict=False):
      names = names if isinstance(names, tuple) else (names,) if names else ()
      counts = [mesh.shape[name] for name in names]
      if any(counts) and size % math.prod(counts):
        raise ValueError(
          f"layers: an array {list(x.shape)} must be split evenly by {spec}, "
          f"got {size} for {dict(zip(names, counts, strict=True))}; change the "
          "batch, the sequence or the mesh"
        )
    out.append(jax.sharding.reshard(x, spec) if mesh.explicit_axes else x)
  return tree.unflatten(out)
