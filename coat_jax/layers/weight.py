# SPDX-License-Identifier: Apache-2.0
"""Weights on their way into FP8 products, and what may be kept of that.

A forward reads a weight's columns and a backward its rows, in E4M3 with one
scale. recipe.weight_cache says what is computed once for several uses:

  "none"   nothing: amax at the first use, codes at each
  "scale"  the scale of every weight, before the scan over layers
  "codes"  scale and codes in both layouts: 2 bytes a parameter, for as long as
           the function that asked for them runs; pays with accumulation

A cache is a value that is computed from the weights where it is used and dies
there. It is no state: none can survive an update of its weights.
"""

import jax
from flax import nnx
from jax import Array

from coat_jax import ops
from coat_jax.ops import Operand
from coat_jax.recipe import CoatRecipe


def quantized_weight(
  w: Array, cache: Operand | None, layout: ops.Layout, recipe: CoatRecipe
) -> Operand:
  """The operand of w [D, F] in one layout, from as much as is cached."""
  if cache is not None and cache.rows is not None:
    return cache
  return ops.quantize_tensor(
    w,
    scale=None if cache is None else cache.scale,
    layout=layout,
    implementation=recipe.implementation,
  )


def cache_weight(w: Array, recipe: CoatRecipe) -> Operand | None:
  """What `recipe.weight_cache` keeps of a weight [D, *F]."""
  w = jax.lax.stop_gradient(as_matrix(w))
  if recipe.weight_cache == "codes":
    return ops.quantize_tensor(
      w, layout="both", implementation=recipe.implementation
    )
  if recipe.weight_cache == "scale":
    scale = ops.tensor_scale(w, implementation=recipe.implementation)
    return Operand(None, None, scale)
  return None


def as_matrix(w: Array) -> Array:
  """[D, *F] to [D, F]."""
  return w.reshape(w.shape[0], -1)


class HasWeight(nnx.Module):
  """What `with_weight_cache` looks for: a module with a weight in FP8.

  Attributes:
    kernel: [*stack, D, *F], stack the axes of layers that are scanned over.
    weight_ndim: rank of [D, *F].
    cache: what is kept of the weight, or None.
  """

  kernel: nnx.Param
  weight_ndim: int
  cache: Operand | None


def with_weight_cache[Module: nnx.Module](
  module: Module, recipe: CoatRecipe
) -> Module:
  """A copy of a module, of the same weights, with their caches filled.

  To be used where the module is used and dropped with it: in the function that
  is differentiated, or around the microbatches of one step.

  Args:
    module: any module; its linear layers can be stacked over layers.
    recipe: says what is cached.

  Returns:
    The module itself where nothing is cached, else a copy.
  """
  if recipe.linear == "bf16" or recipe.weight_cache == "none":
    return module
  copy = nnx.merge(*nnx.split(module))
  for _, part in nnx.iter_modules(copy):
    if isinstance(part, HasWeight):
      w = part.kernel[...]
      stack = w.shape[: w.ndim - part.weight_ndim]
      flat = w.reshape(-1, *w.shape[len(stack) :])
      # One after the other: together they would be held in one layout more.
      cache = jax.lax.map(lambda w: cache_weight(w, recipe), flat)
      part.cache = jax.tree.map(
        lambda x, stack=stack: x.reshape(*stack, *x.shape[1:]), cache
      )
  return copy
