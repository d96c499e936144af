# SPDX-License-Identifier: Apache-2.0
"""Blocks that run on each device's part of their arrays.

A kernel cannot be partitioned by XLA, which would gather its arguments first.
So the two rules of a block, forward and backward, run inside `jax.shard_map`
over all axes of the mesh and write out what they move between devices
(`layers.mesh.collectives`). Nothing is differentiated through `shard_map`, and
what
a block remembers stays on the device that made it.

Between blocks arrays lie as `MeshAxes` says: tokens are split over its axes, a
weight's rows over fsdp. Where they lie otherwise XLA moves them. Without a mesh
(recipe.axes None) and inside a caller's own `shard_map` the rules run as they
are.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, P

from coat_jax.layers.residuals import protect_codes
from coat_jax.ops import Operand
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


class _Layout(NamedTuple):
  """How to take apart what a forward handed over; all of it is static.

  Attributes:
    structure: of what the rules hand over.
    places: of each of its leaves: whether it is one of the block's arguments.
    scalars: of each other leaf: whether a device has one number.
    inputs: specs of the arguments that are handed over.
    results: specs of the block's results.
    cotangents: specs of what the backward returns.
  """

  structure: Any
  places: tuple[bool, ...]
  scalars: tuple[bool, ...]
  inputs: tuple[P, ...]
  results: _Specs
  cotangents: _Specs


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["inputs", "own"],
  meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True)
class _Kept:
  """What a forward on a mesh hands to its backward.

  Attributes:
    inputs: arguments of the block, which are alive anyway.
    own: other arrays, the parts of all devices in a row along axis 0.
    layout: how they belong together.
  """

  inputs: list[Array]
  own: list[Array]
  layout: _Layout


def block(fwd: Callable, bwd: Callable, specs: Callable) -> Callable:
  """A function with a gradient of its own, run by each device on its part.

  Args:
    fwd: `fwd(*arrays, *static, recipe)`, its results and what it hands over.
    bwd: `bwd(*static, recipe, handed_over, g)`, a cotangent for each array;
      None for integers and for caches (`Operand`s).
    specs: `specs(axes, *arrays)`, where arrays and results lie: a tuple of
      trees of `PartitionSpec`, one for each array (a spec can stand for a whole
      tree), and the same for the results.

  Returns:
    `f(arrays, *static, recipe)`, differentiable in its tuple of arrays.
  """

  @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
  def rule(arrays, static):
    return forward(arrays, static)[0]

  def forward(arrays, static):
    axes = static[-1].axes
    if _is_local(axes):
      results, kept = fwd(*arrays, *static)
      return results, protect_codes(kept)
    inputs, tree = jax.tree.flatten(arrays)
    in_specs, out_specs = specs(axes, *arrays)
    input_specs = _for_leaves(in_specs, arrays)
    found = []

    def local(*inputs):
      results, kept = fwd(*tree.unflatten(inputs), *static)
      leaves, structure = jax.tree.flatten(kept)
      places = [_place(x, inputs) for x in leaves]
      own = [x for x, at in zip(leaves, places, strict=True) if at is None]
      found.append((structure, places, tuple(x.ndim == 0 for x in own)))
      return results, protect_codes([x.reshape(x.shape or (1,)) for x in own])

    results, own = jax.shard_map(
      local,
      in_specs=tuple(input_specs),
      out_specs=(out_specs, _everywhere()),
      check_vma=False,
    )(*inputs)
    structure, places, scalars = found[-1]
    again = [at for at in places if at is not None]
    layout = _Layout(
      structure=structure,
      places=tuple(at is not None for at in places),
      scalars=scalars,
      inputs=tuple(input_specs[at] for at in again),
      results=_Specs.of(out_specs),
      cotangents=_Specs.of(_of_cotangents(in_specs, arrays)),
    )
    return results, _Kept([inputs[at] for at in again], own, layout)

  def backward(static, kept, g):
    if not isinstance(kept, _Kept):
      return (bwd(*static, kept, g),)
    layout = kept.layout

    def local(inputs, own, g):
      own = [
        x[0] if is_scalar else x
        for x, is_scalar in zip(own, layout.scalars, strict=True)
      ]
      inputs, own = iter(inputs), iter(own)
      leaves = [next(inputs if at else own) for at in layout.places]
      return bwd(*static, layout.structure.unflatten(leaves), g)

    cotangents = jax.shard_map(
      local,
      in_specs=(list(layout.inputs), _everywhere(), layout.results.specs()),
      out_specs=layout.cotangents.specs(),
      check_vma=False,
    )(kept.inputs, kept.own, g)
    return (cotangents,)

  rule.defvjp(forward, backward)

  def f(arrays: tuple, *static: Any) -> Any:
    axes = static[-1].axes
    if not _is_local(axes):
      arrays = _placed(arrays, specs(axes, *arrays)[0])
    return rule(arrays, static)

  return f


def run_sharded(
  f: Callable, axes: MeshAxes | None, arrays, in_specs, out_specs
):
  """f(*arrays) of each device's part; what it returns has no gradient.

  Args:
    f: any function of arrays.
    axes: of the mesh.
    arrays, in_specs, out_specs: as `block` has them.
  """
  if _is_local(axes):
    return f(*arrays)
  arrays = _placed(arrays, in_specs)
  return jax.shard_map(
    f, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )(*arrays)


def _is_local(axes: MeshAxes | None) -> bool:
  """Whether what is traced here is one device's part already."""
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


def _everywhere() -> P:
  """Of an array's first axis: a part on each device."""
  return P(jax.sharding.get_abstract_mesh().axis_names)


def _place(x: Array, inputs: tuple[Array, ...]) -> int | None:
  return next((i for i, known in enumerate(inputs) if known is x), None)


def _for_leaves(specs, arrays) -> list[P]:
  """A spec for each leaf."""
  return jax.tree.leaves(jax.tree.broadcast(specs, arrays, is_leaf=_is_spec))


def _of_cotangents(specs, arrays):
  """None where there are none: of caches and of integers."""

  def of(x, spec):
    has_gradient = isinstance(x, Array) and jnp.issubdtype(
      x.dtype, jnp.floating
    )
    return spec if has_gradient else None

  specs = jax.tree.broadcast(specs, arrays, is_leaf=_is_spec)
  return jax.tree.map(of, arrays, specs, is_leaf=_is_cache)


def _is_cache(x) -> bool:
  return isinstance(x, Operand)


def _is_spec(x) -> bool:
  return isinstance(x, P)


def _placed(arrays, specs):
  """Checks that arrays can be split so; moves them where types say where."""
  mesh = jax.sharding.get_abstract_mesh()
  leaves, tree = jax.tree.flatten(arrays)
  out = []
  for x, spec in zip(leaves, _for_leaves(specs, arrays), strict=True):
    for size, names in zip(x.shape, spec, strict=False):
      names = names if isinstance(names, tuple) else (names,) if names else ()
      parts = [mesh.shape[name] for name in names]
      if any(parts) and size % _product(parts):
        raise ValueError(
          f"layers: an array {list(x.shape)} must be split evenly by {spec}, "
          f"got {size} for {dict(zip(names, parts, strict=True))}; change the "
          "batch, the sequence or the mesh"
        )
    out.append(jax.sharding.reshard(x, spec) if mesh.explicit_axes else x)
  return tree.unflatten(out)


def _product(sizes: list[int]) -> int:
  return functools.reduce(lambda a, b: a * b, sizes, 1)
