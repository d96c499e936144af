# SPDX-License-Identifier: Apache-2.0
"""Custom gradients that run on each device's shards.

With `recipe.axes`, a forward pass and its backward pass each run inside
`jax.shard_map` over all axes of the mesh. `shard_map` itself is never
differentiated, and residuals stay on the device that computed them. Without
`recipe.axes`, XLA partitions both passes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, P
from jax.sharding import NamedSharding

from coat_jax import mesh
from coat_jax.layers.residuals import protect_codes
from coat_jax.mesh import spec_of
from coat_jax.ops import Operand
from coat_jax.ops.capability import FP8, is_before
from coat_jax.ops.dispatch import target
from coat_jax.recipes import CoatRecipe, MeshAxes


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["inputs", "own"],
  meta_fields=["specs"],
)
@dataclasses.dataclass(frozen=True)
class _Saved:
  """The values that a forward pass saves for its backward pass."""

  inputs: tuple  # Arguments that `bwd` reads.
  own: Any  # Values from `fwd`; shards are concatenated along dimension 0.
  # The specs for `bwd`, flattened because static fields must be hashable.
  specs: tuple[tuple[P, ...], Any]


class _Scalar(NamedTuple):
  """A device's scalar as an array [1], so that shards can be concatenated."""

  value: Array


def rule(
  fwd: Callable,
  bwd: Callable,
  specs: Callable | None = None,
  *,
  reads: tuple[int, ...] = (),
  result_spec: Callable | None = None,
) -> Callable:
  """Makes a function with a custom gradient that runs on any mesh.

  `fwd(*arrays, *static, recipe)` returns its results and `own`, a tree of
  values for `bwd`. `bwd(*static, recipe, inputs, own, g)` returns a cotangent
  for each array, or None for integer arrays and for caches (`Operand`s).
  `inputs` contains the arguments at the indices in `reads`. In `reads`, list
  only arguments that stay in memory anyway, such as weights.

  With `recipe.axes`, `specs(*arrays, *static, recipe)` returns a pair: the
  specs of the tuple of arrays, and the specs of the results. Specs are a tree
  of `PartitionSpec`s, or one `PartitionSpec` for a whole tree. By default, each
  spec is `mesh.tokens(recipe.axes, arrays[0])`. Without `recipe.axes`,
  `result_spec(*arrays)` returns the specs of the results on explicit mesh axes;
  by default, each result has the first array's spec.

  The returned function `f(arrays, *static, recipe)` is differentiable with
  respect to the tuple `arrays`. With all recipes except `bf16`, it can be
  differentiated only once.
  """

  specs, result_spec = specs or _tokens_specs, result_spec or _first_spec

  @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
  def apply(arrays, static):
    return forward(arrays, static)[0]

  def forward(arrays, static):
    axes = static[-1].axes
    in_specs, out_specs = specs_of(arrays, static)

    def local(*arrays):
      results, own = fwd(*arrays, *static)
      keep = _with_axis if axes is not None else _splitter(in_specs, arrays)
      return results, protect_codes(jax.tree.map(keep, own))

    args = _differentiated_once(arrays, static[-1])
    results, own = _run(
      axes, local, args, in_specs, (out_specs, _own_spec(axes))
    )
    inputs = tuple(arrays[i] for i in reads)
    if not mesh.is_split():
      inputs = protect_codes(inputs)
    leaves, tree = jax.tree.flatten(
      (
        tuple(in_specs[i] for i in reads),
        out_specs,
        _cotangent_specs(in_specs, arrays),
      )
    )
    return results, _Saved(inputs, own, (tuple(leaves), tree))

  def backward(static, saved, g):
    axes = static[-1].axes
    leaves, tree = saved.specs
    input_specs, out_specs, cotangent_specs = tree.unflatten(leaves)

    def local(inputs, own, g):
      inputs, own, g = _only_saved((inputs, own, g))
      own = jax.tree.map(_without_axis, own, is_leaf=_is_scalar)
      return bwd(*static, inputs, own, g)

    in_specs = input_specs, _own_spec(axes), out_specs
    g = _differentiated_once(g, static[-1])
    args = saved.inputs, saved.own, g
    return (_run(axes, local, args, in_specs, cotangent_specs),)

  def specs_of(arrays, static):
    if static[-1].axes is not None:
      in_specs, out_specs = specs(*arrays, *static)
      return jax.tree.broadcast(in_specs, arrays), out_specs
    return jax.tree.map(spec_of, arrays), result_spec(*arrays)

  apply.defvjp(forward, backward)

  def f(arrays: tuple, *static: Any) -> Any:
    static = _with_axes_of_types(arrays, static, specs)
    # Place arrays outside the custom gradient, so that JAX transposes `place`.
    if static[-1].axes is None:
      arrays = mesh.varying(arrays)
    else:
      arrays = mesh.place(arrays, specs(*arrays, *static)[0])
    return apply(arrays, static)

  return f


def _differentiated_once[Tree](tree: Tree, recipe: CoatRecipe) -> Tree:
  """Refuses second derivatives if the recipe rounds to 8 bits.

  Rounding has derivative 0, so second derivatives would be wrong, and often 0.
  """
  if recipe.name == "bf16":
    return tree

  def of(x):
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    # Skip integers, such as positions: autodiff would save them twice.
    return _without_derivative(x) if is_float else x

  # One call per array, so that a checkpoint recomputes only what it needs.
  return jax.tree.map(of, tree)


@jax.custom_vjp
def _without_derivative(x: Array) -> Array:
  return x


def _refuse(*_):
  raise NotImplementedError(
    "coat_jax: layers that round to 8 bits can be differentiated only once, "
    "because rounding has derivative 0, got a second derivative; pass "
    "recipe=recipes.bf16(), or apply jax.lax.stop_gradient to the arguments of "
    "the first derivative (not to its result)"
  )


_without_derivative.defvjp(_refuse, _refuse)


def _tokens_specs(*arguments):
  """Returns specs for elementwise functions: all like the first array."""
  first, *_, recipe = arguments
  each = mesh.tokens(recipe.axes, first)
  return each, each


def _first_spec(first: Array, *others: Any) -> P:
  del others
  return spec_of(first)


def _run(axes: MeshAxes | None, f, args, in_specs, out_specs):
  """Runs f on shards if there are `axes`, else on whole arrays."""
  if axes is None:
    return mesh.run_whole(f, *args, out_specs=out_specs)
  return mesh.run_on_shards(f, *args, in_specs=in_specs, out_specs=out_specs)


def _only_saved[Tree](read: Tree) -> Tree:
  """Makes `bwd` wait for the incoming gradient, and use only saved values.

  Without this barrier, if layers are not scanned, XLA would notice that `bwd`
  recomputes f32 values of `fwd`, and keep these values in memory. NVIDIA GPUs
  with FP8 need no barrier, because kernels compute these values.
  """
  if target() == "cuda" and not is_before(FP8):
    return read
  return jax.lax.optimization_barrier(read)


def _own_spec(axes: MeshAxes | None) -> P | None:
  """Returns the spec of the values that `fwd` saves; None without `axes`."""
  if axes is None:
    return None
  return P(jax.sharding.get_abstract_mesh().axis_names)


def _splitter(specs: tuple, arrays: tuple) -> Callable[[Array], Array]:
  """Returns a function that shards a saved value.

  The value's tokens are split like the first array's tokens, and its features
  are split over the other mesh axes. Otherwise, XLA would stop splitting the
  features where a weight [D, 2, F] is reshaped.
  """
  first = jax.tree.leaves(arrays)[0]
  leaves = jax.tree.leaves(specs)
  rows = leaves[0][: first.ndim - 1]
  others = [
    name for name in mesh.axes_in(*leaves) if name not in mesh.axes_in(rows)
  ]

  def split(x):
    if not others or not x.ndim or x.shape[:-1] != first.shape[:-1]:
      return x
    spec = mesh.fitted((*rows, tuple(others)), x.shape)
    return jax.lax.with_sharding_constraint(x, spec)

  return split


def _with_axis(x: Array) -> Array | _Scalar:
  return x if x.ndim else _Scalar(x.reshape(1))


def _without_axis(x: Any) -> Any:
  return x.value[0] if _is_scalar(x) else x


def _is_scalar(x: Any) -> bool:
  return isinstance(x, _Scalar)


def _with_axes_of_types(arrays: tuple, static: tuple, specs: Callable) -> tuple:
  """Sets the recipe's mesh axes if the arrays are sharded over explicit axes.

  Devices can then run kernels on their shards, and gather FP8 codes. Only mesh
  axes for data and FSDP are recognized.
  """
  *others, recipe = static
  types = jax.sharding.get_abstract_mesh()
  if recipe.axes is not None or not types.explicit_axes:
    return static
  leaves = jax.tree.leaves(arrays)
  batch = mesh.axes_in(spec_of(leaves[0])[:1])
  if types.auto_axes or types.manual_axes or leaves[0].ndim < 2 or not batch:
    return static

  def fit(wanted) -> bool:
    wanted = jax.tree.broadcast(wanted, arrays)
    return all(
      NamedSharding(types, spec_of(x)).is_equivalent_to(
        NamedSharding(types, spec), x.ndim
      )
      for x, spec in zip(leaves, jax.tree.leaves(wanted), strict=True)
    )

  for fsdp in (None, *batch):
    axes = MeshAxes(batch=batch, fsdp=fsdp)
    candidate = (*others, dataclasses.replace(recipe, axes=axes))
    if fit(specs(*arrays, *candidate)[0]):
      return candidate
  return static


def _cotangent_specs(specs: tuple, arrays: tuple) -> tuple:
  """Replaces specs of caches and integers with None: they have no cotangent."""

  def of(x, spec):
    is_float = isinstance(x, Array) and jnp.issubdtype(x.dtype, jnp.floating)
    return spec if is_float else None

  is_cache = lambda x: isinstance(x, Operand)  # noqa: E731
  found = jax.tree.map(of, arrays, specs, is_leaf=is_cache)
  return tuple(spec if jax.tree.leaves(spec) else None for spec in found)
