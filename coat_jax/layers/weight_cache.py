# SPDX-License-Identifier: Apache-2.0
"""Copies of modules whose weights' scales or codes are computed once."""

import functools

import jax
from flax import nnx
from jax import P

from coat_jax.checks import check_kind
from coat_jax.layers.linear import Linear
from coat_jax.layers.mesh.rule import run_sharded
from coat_jax.layers.mesh.specs import cache_specs, split_kernel
from coat_jax.layers.module import check_recipe
from coat_jax.layers.weight import cache_weight
from coat_jax.ops import Operand
from coat_jax.ops.explicit import partitioned, spec_of
from coat_jax.recipe import CoatRecipe


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

  Raises:
    TypeError: `module` is no nnx.Module, or `recipe` no CoatRecipe.
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
  """The cache of one kernel, or of a stack of them."""
  w = jax.lax.stop_gradient(part.kernel[...])
  stack = w.shape[: w.ndim - part.weight_ndim]

  def fill(w):
    flat = w.reshape(-1, *w.shape[len(stack) :])
    # Codes one layer after the other: a kernel has one matrix at a time.
    each = jax.lax.map if recipe.weight_cache == "codes" else _vmap
    cache = each(lambda w: cache_weight(w, recipe), flat)
    return jax.tree.map(lambda x: x.reshape(*stack, *x.shape[1:]), cache)

  specs_of = functools.partial(
    cache_specs,
    has_codes=recipe.weight_cache == "codes",
    in_tiles=recipe.scaling == "block",
    num_stacked=len(stack),
  )
  if (axes := recipe.axes) is None:
    kernel = P(*spec_of(w)[len(stack) :])
    out_specs = specs_of(kernel)
    return partitioned(fill, w, types=lambda *_: out_specs)
  kernel = split_kernel(axes, part.split, part.weight_ndim)
  out_specs = specs_of(kernel)
  stacked = P(*(None,) * len(stack), *kernel)
  return run_sharded(fill, axes, (w,), (stacked,), out_specs)


def _vmap(f, x):
  return jax.vmap(f)(x)
