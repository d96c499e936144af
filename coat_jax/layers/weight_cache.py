# SPDX-License-Identifier: Apache-2.0
"""Copies of modules with precomputed scales or codes of their weights."""

import dataclasses
import functools

import jax
from flax import nnx
from jax import P

from coat_jax.layers.linear import Linear
from coat_jax.layers.module import check_recipe
from coat_jax.layers.operands import cache_specs
from coat_jax.layers.weight import cache_weight
from coat_jax.mesh import run_on_shards, run_whole, spec_of, split_kernel
from coat_jax.numerics.checks import check_kind
from coat_jax.numerics.recipes import CoatRecipe
from coat_jax.ops import Operand


def with_weight_cache[Module: nnx.Module](
  module: Module, recipe: CoatRecipe
) -> Module:
  """Copies a module, sharing its weights, and fills their caches.

  Make, use and drop the copy inside the function that is differentiated, or
  around the microbatches of one step: a cache must not outlive its weights.

  Args:
    module: any module; its linear layers may be stacked for a scan.
    recipe: selects what is cached.

  Returns:
    The module itself if nothing is cached, else a copy.

  Raises:
    TypeError: `module` is not an nnx.Module, or `recipe` is not a CoatRecipe.
  """
  op = "with_weight_cache"
  check_recipe(op, recipe)
  check_kind(op, "module", module, nnx.Module, "pass a layer or a model")
  if recipe.linear == "bf16" or recipe.weight_cache == "none":
    return module
  copy = nnx.merge(*nnx.split(module))
  for _, part in nnx.iter_modules(copy):
    if isinstance(part, Linear):
      part.cache = nnx.data(_cache(part, recipe))
  return copy


def _cache(part: Linear, recipe: CoatRecipe) -> Operand:
  """Computes the cache of one kernel, or of a stack of them."""
  w = jax.lax.stop_gradient(part.weight)
  stack = w.shape[: w.ndim - part.weight_ndim]

  def fill(w):
    flat = w.reshape(-1, *w.shape[len(stack) :])
    # Codes are computed layer by layer: the kernel quantizes a single matrix.
    each = jax.lax.map if recipe.weight_cache == "codes" else _vmap
    cache = each(lambda w: cache_weight(w, recipe), flat)
    return jax.tree.map(lambda x: x.reshape(*stack, *x.shape[1:]), cache)

  # Only the structure of a cache matters here, which is the same on a mesh.
  like = functools.partial(
    cache_weight, recipe=dataclasses.replace(recipe, axes=None)
  )
  cache = jax.eval_shape(
    like, jax.ShapeDtypeStruct(w.shape[len(stack) :], w.dtype)
  )
  if recipe.axes is None:
    specs = cache_specs(cache, P(*spec_of(w)[len(stack) :]), len(stack))
    return run_whole(fill, w, out_specs=specs)
  kernel = split_kernel(recipe.axes, part.split, part.weight_ndim)
  specs = cache_specs(cache, kernel, len(stack))
  stacked = P(*(None,) * len(stack), *kernel)
  return run_on_shards(fill, w, in_specs=(stacked,), out_specs=specs)


def _vmap(f, x):
  return jax.vmap(f)(x)
