# SPDX-License-Identifier: Apache-2.0
"""Fills caches with weights' scales or FP8 codes, once per training step."""

import dataclasses

import jax
from flax import nnx
from jax import P

from coat_jax.layers.module import CacheableWeight, RecipeModule
from coat_jax.layers.operands import cache_specs
from coat_jax.mesh import run_on_shards, run_whole, spec_of
from coat_jax.numerics.checks import check_kind
from coat_jax.ops import Operand
from coat_jax.recipes import CoatRecipe


def with_weight_cache[Module: nnx.Module](module: Module) -> Module:
  """Returns a copy that shares the weights and caches their scales or codes.

  The recipe of each layer selects what it caches (`CoatRecipe.weight_cache`).
  Make the copy inside the differentiated function, or once per step before the
  microbatches. Drop the copy before you update the weights: the update does not
  change the cache.

  Args:
    module: any module; its layers may be stacked for a scan.

  Raises:
    TypeError: `module` is not an nnx.Module.
  """
  remedy = "pass a layer or a model"
  check_kind("with_weight_cache", "module", module, nnx.Module, remedy)
  copy = nnx.merge(*nnx.split(module))
  for _, part in nnx.iter_modules(copy):
    if isinstance(part, RecipeModule):
      recipe = part.active_recipe
      for name, weight in part.cacheable_weights().items():
        setattr(part, name, nnx.data(_filled(weight, recipe)))
  return copy


def _filled(weight: CacheableWeight, recipe: CoatRecipe) -> Operand | None:
  """Computes the cache of one layer's weight, or of stacked weights."""
  w = jax.lax.stop_gradient(weight.w)
  stack = w.shape[: w.ndim - weight.ndim]
  # Only the cache's structure matters here; it does not depend on the mesh.
  single = dataclasses.replace(recipe, axes=None)
  one = jax.ShapeDtypeStruct(w.shape[len(stack) :], w.dtype)
  cache = jax.eval_shape(lambda w: weight.compute(w, single), one)
  if cache is None:
    return None

  def fill(w):
    flat = w.reshape(-1, *w.shape[len(stack) :])
    compute = lambda w: weight.compute(w, recipe)  # noqa: E731
    # The quantization kernel accepts one matrix, so codes need a loop.
    has_codes = cache.rows is not None
    found = jax.lax.map(compute, flat) if has_codes else jax.vmap(compute)(flat)
    return jax.tree.map(lambda x: x.reshape(*stack, *x.shape[1:]), found)

  if weight.spec is None:
    specs = cache_specs(cache, P(*spec_of(w)[len(stack) :]), len(stack))
    return run_whole(fill, w, out_specs=specs)
  specs = cache_specs(cache, weight.spec, len(stack))
  stacked = P(*(None,) * len(stack), *weight.spec)
  return run_on_shards(fill, w, in_specs=(stacked,), out_specs=specs)
