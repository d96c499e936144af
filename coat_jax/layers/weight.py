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
    # As fast as the kernel, and where weights are stacked XLA copies none out.
    return Operand(None, None, ops.tensor_scale(w, implementation="xla"))
  return None


def as_matrix(w: Array) -> Array:
  """[D, *F] to [D, F]."""
  return w.reshape(w.shape[0], -1)
