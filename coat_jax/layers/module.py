# SPDX-License-Identifier: Apache-2.0
"""Base module: a training recipe and an evaluation recipe."""

import inspect
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from coat_jax.numerics import recipes
from coat_jax.numerics.checks import (
  COUNT,
  check_array,
  check_float_dtype,
  check_kind,
  check_whole,
)
from coat_jax.numerics.recipes import CoatRecipe

_SOME_AXES = range(1, 65)
type Sharding = NamedSharding | PartitionSpec | None

# Reasons for refusing arguments of flax's modules, by a part of their name; the
# first match counts.
_REASONS = {
  "precision": "products read FP8 codes and are summed in f32",
  "dot_general": "products and their gradients are the recipe's",
  "promote_dtype": "`dtype` and the recipe say in which format each array is",
  "preferred_element_type": "sums are f32 and outputs `dtype`",
  "axis_name": "statistics are of whole rows; shard other axes than the last",
  "axis_index_groups": "statistics are of whole rows",
  "use_fast_variance": "the variance is always the accurate one",
  "_axes": "groups that share a scale, and so norms, are along the last axis",
  "axis": "products are over the last axis; reshape the input, or use nnx.vmap "
  "for a batch of kernels",
  "attention_fn": "attention is part of the block; one of your own can be made "
  "of NormLinear, Linear and a function between",
  "drop": "there is no dropout",
  "determ": "there is no dropout",
  "keep_rngs": "there is no dropout",
  "decode": "there is no cache of keys and values",
  "normalize_qk": "`qk_norm` says how q and k are normalized, by an RMSNorm",
  "_ln_": "`qk_norm` says how q and k are normalized, by an RMSNorm",
  "_features": "input and output are `features` wide, heads `head_dim`",
}


def recipe_of(op: str, recipe: CoatRecipe | None) -> CoatRecipe:
  """Returns the caller's recipe, or `recipes.coat()` for None.

  Raises a TypeError if it is not a CoatRecipe, such as a preset not called.
  """
  recipe = recipes.coat() if recipe is None else recipe
  check_recipe(op, recipe)
  return recipe


def check_recipe(op: str, recipe: Any) -> None:
  """Raises a TypeError if this is not a CoatRecipe."""
  remedy = "call a preset, as in recipes.coat()"
  check_kind(op, "recipe", recipe, CoatRecipe, remedy)


def check_float(
  op: str, name: str, x: Any, *, ndim: int | Collection[int] = ()
) -> None:
  """Raises unless x is a floating-point array with one of these ranks."""
  rule = "a floating array"
  if isinstance(ndim, int):
    rule += f" of {ndim} axes"
  elif ndim:
    rule += f" of at least {min(ndim)} axes"
  remedy = "pass activations, in bfloat16 or float32"
  ranks = ndim or _SOME_AXES
  check_array(op, name, x, rule, ndim=ranks, remedy=remedy)


def check_sequences(op: str, x: Any) -> None:
  """Raises if x is not an array [..., T, D]."""
  rule, remedy = "an array [..., T, D]", "pass sequences of activations"
  ranks, kind = range(2, 65), jnp.number
  check_array(op, "x", x, rule, ndim=ranks, kind=kind, remedy=remedy)


def sizes_of(op: str, name: str, value: Any) -> tuple[int, ...]:
  """Returns a width, or the sizes of several axes, as a tuple; checks them."""
  sizes = tuple(value) if isinstance(value, tuple | list) else (value,)
  for size in sizes or (0,):
    check_whole(op, name, size, COUNT, "pass a width, or a tuple of sizes")
  return sizes


class RecipeModule(nnx.Module):
  """Base of all modules: holds the recipe and the compute dtype.

  Attributes:
    counterparts: flax modules whose other arguments are refused with a reason,
      or accepted with their default value.
    recipe: selects what training computes and saves for the backward pass.
    dtype: dtype of inputs and outputs; None promotes them with the parameters.
    deterministic: set by `module.eval()` and `module.train()`; evaluation uses
      `recipe.for_evaluation()`.
  """

  counterparts: ClassVar[tuple[type[nnx.Module], ...]] = ()

  def __init__(
    self,
    recipe: CoatRecipe,
    dtype: DTypeLike | None,
    others: Mapping[str, Any] | None = None,
  ):
    """Sets recipe and dtype; refuses `others`, unknown constructor arguments.

    Raises a TypeError for a wrong recipe, a dtype that is not floating-point or
    an argument that flax does not know either; a ValueError for a flax argument
    that is not supported here.
    """
    op = type(self).__name__
    for name, value in (others or {}).items():
      self._refuse(name, value)
    check_recipe(op, recipe)
    if dtype is not None:
      check_float_dtype(op, "dtype", dtype)
    self.recipe = recipe
    self.dtype = dtype
    self.deterministic = False

  def _check(self, param_dtype: Any, rngs: Any, **sizes: Any) -> None:
    """Raises for invalid constructor arguments.

    `sizes` are numbers of features, heads and the like; None is allowed if one
    follows from the others.
    """
    op = type(self).__name__
    check_float_dtype(op, "param_dtype", param_dtype)
    check_kind(op, "rngs", rngs, nnx.Rngs, "pass nnx.Rngs(0)")
    for name, size in sizes.items():
      if size is not None:
        check_whole(op, name, size, COUNT, "pass the width of its arrays")

  def _refuse(self, name: str, value: Any) -> None:
    """Raises unless this is a flax argument with its default value."""
    module = type(self).__name__
    theirs = [inspect.signature(c.__init__) for c in self.counterparts]
    found = [
      signature.parameters[name].default
      for signature in theirs
      if name in signature.parameters
    ]
    if not found:
      raise TypeError(
        f"{module}.__init__() got an unexpected keyword argument {name!r}"
      )
    if any(value is x or type(value) is type(x) and value == x for x in found):
      return
    reasons = (why for part, why in _REASONS.items() if part in name)
    reason = next(reasons, "there is nothing like it in FP8 layers")
    raise ValueError(
      f"{module}: {name} must be left out, got {value!r}: {reason}"
    )

  def cast(self, x: Array, *params: nnx.Param | None) -> Array:
    """Casts x to `dtype` or, if that is None, promotes it with `params`.

    Raises a TypeError if x is not numeric, a ValueError if it is a scalar.
    """
    op, remedy = type(self).__name__, "pass activations [..., features]"
    rule, kind = "an array of numbers [..., features]", jnp.number
    check_array(op, "x", x, rule, ndim=_SOME_AXES, kind=kind, remedy=remedy)
    arrays = map(value_of, params)
    return x.astype(canonicalize_dtype(x, *arrays, dtype=self.dtype))

  @property
  def active_recipe(self) -> CoatRecipe:
    """The recipe of the current mode, training or evaluation."""
    return self.recipe.for_evaluation() if self.deterministic else self.recipe


def value_of(param: nnx.Param | None) -> Array | None:
  """Returns a parameter's array, or None."""
  return None if param is None else param[...]


def reshard(y: Array, out_sharding: Sharding) -> Array:
  """Shards y as given; None leaves it unchanged.

  On explicit axes of a mesh this changes the type, on automatic axes it is a
  constraint.
  """
  if out_sharding is None:
    return y
  mesh = jax.sharding.get_abstract_mesh()
  if isinstance(out_sharding, NamedSharding):
    mesh = out_sharding.mesh
  if AxisType.Explicit in mesh.axis_types:
    return jax.sharding.reshard(y, out_sharding)
  return jax.lax.with_sharding_constraint(y, out_sharding)


def rows_to_batch(x: Array) -> Array:
  """Reshapes [..., T, D] to [B, T, D]: merges leading axes."""
  return jnp.reshape(x, (math.prod(x.shape[:-2]), *x.shape[-2:]))
