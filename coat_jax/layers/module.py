# SPDX-License-Identifier: Apache-2.0
"""The base class of layers and blocks, and checks of their arguments."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from coat_jax import recipes
from coat_jax.numerics.checks import (
  COUNT,
  check_array,
  check_float_dtype,
  check_kind,
  check_whole,
)
from coat_jax.ops import Operand
from coat_jax.recipes import CoatRecipe

_SOME_AXES = range(1, 65)
type Sharding = NamedSharding | PartitionSpec | None


def recipe_of(op: str, recipe: Any) -> CoatRecipe:
  """Checks and returns a recipe; None stands for `recipes.coat()`."""
  recipe = recipes.coat() if recipe is None else recipe
  check_recipe(op, recipe)
  return recipe


def check_recipe(op: str, recipe: Any) -> None:
  """Raises a TypeError unless `recipe` is a CoatRecipe."""
  remedy = "call a preset, as in recipes.coat()"
  check_kind(op, "recipe", recipe, CoatRecipe, remedy)


def check_float(
  op: str, name: str, x: Any, *, ndim: int | Collection[int] = ()
) -> None:
  """Raises unless x is a floating-point array; `ndim` restricts its rank."""
  rule = "a floating-point array"
  if isinstance(ndim, int):
    rule += f" with {ndim} axes"
  elif ndim:
    rule += f" with at least {min(ndim)} axes"
  remedy = "pass a bfloat16 or float32 array"
  ranks = ndim or _SOME_AXES
  check_array(op, name, x, rule, ndim=ranks, remedy=remedy)


def sizes_of(op: str, name: str, value: Any) -> tuple[int, ...]:
  """Checks one size, or a tuple of sizes, and returns a tuple."""
  sizes = tuple(value) if isinstance(value, tuple | list) else (value,)
  for size in sizes or (0,):
    check_whole(op, name, size, COUNT, "pass a width, or a tuple of sizes")
  return sizes


class CacheableWeight(NamedTuple):
  """A weight of a layer, and how `with_weight_cache` fills its cache.

  Attributes:
    w: the weight; if layers are stacked for a scan, the axes of the stack come
      first.
    ndim: rank of one layer's weight.
    compute: computes one layer's cache from its weight and the recipe; returns
      None if nothing is cached.
    spec: the spec of one layer's weight; None without `recipe.axes`.
  """

  w: Array
  ndim: int
  compute: Callable[[Array, CoatRecipe], Operand | None]
  spec: PartitionSpec | None


class RecipeModule(nnx.Module):
  """The base class of layers and blocks; holds the recipe and compute dtype.

  Attributes:
    recipe: selects what is computed and saved in FP8.
    dtype: dtype of inputs and outputs; None for the common dtype of inputs and
      parameters.
    deterministic: True after `module.eval()`, False after `module.train()`. If
      it is True, the module uses `recipe.for_evaluation()`.
  """

  def __init__(
    self,
    *,
    recipe: CoatRecipe | None,
    dtype: DTypeLike | None,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
    **sizes: Any,
  ):
    """Sets recipe and dtype, and checks the arguments that modules share.

    `sizes`, such as the number of heads, must be positive ints or None.
    """
    op = type(self).__name__
    self.recipe = recipe_of(op, recipe)
    if dtype is not None:
      check_float_dtype(op, "dtype", dtype)
    self.dtype = dtype
    self.deterministic = False
    check_float_dtype(op, "param_dtype", param_dtype)
    check_kind(op, "rngs", rngs, nnx.Rngs, "pass nnx.Rngs(0)")
    for name, size in sizes.items():
      if size is not None:
        check_whole(op, name, size, COUNT, "pass a positive int")

  def cast(self, x: Array, *params: nnx.Param | None) -> Array:
    """Casts x to `dtype`; None means the common dtype of x and `params`."""
    op, remedy = type(self).__name__, "pass activations [..., features]"
    rule, kind = "an array of numbers [..., features]", jnp.number
    check_array(op, "x", x, rule, ndim=_SOME_AXES, kind=kind, remedy=remedy)
    arrays = map(value_of, params)
    return x.astype(canonicalize_dtype(x, *arrays, dtype=self.dtype))

  def cacheable_weights(self) -> dict[str, CacheableWeight]:
    """Returns cacheable weights, keyed by the attribute name of their cache."""
    return {}

  @property
  def active_recipe(self) -> CoatRecipe:
    """The recipe for the current mode, training or evaluation."""
    return self.recipe.for_evaluation() if self.deterministic else self.recipe


def value_of(param: nnx.Param | None) -> Array | None:
  """Returns a parameter's array, or None."""
  return None if param is None else param[...]


def reshard(y: Array, out_sharding: Sharding) -> Array:
  """Shards y as `out_sharding` specifies; None leaves y unchanged."""
  if out_sharding is None:
    return y
  kinds, remedy = (PartitionSpec, NamedSharding), "pass one, or leave it out"
  check_kind("layers", "out_sharding", out_sharding, kinds, remedy)
  mesh = jax.sharding.get_abstract_mesh()
  if isinstance(out_sharding, NamedSharding):
    mesh = out_sharding.mesh
  if AxisType.Explicit in mesh.axis_types:
    return jax.sharding.reshard(y, out_sharding)
  return jax.lax.with_sharding_constraint(y, out_sharding)
