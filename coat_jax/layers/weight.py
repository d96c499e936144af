# SPDX-License-Identifier: Apache-2.0
"""Quantizes weights for FP8 matmuls, and caches the result.

The forward pass reads a weight's columns and the backward pass its rows, in
E4M3 with one scale, or with one per tile of 128 x 128. recipe.weight_cache
selects what is computed once for several uses:

  "none"   nothing: the amax is found at the first use, codes at each use
  "scale"  the scales of every weight, before the scan over layers
  "codes"  scale and codes in both layouts: 2 bytes a parameter while the
           function that requested them runs; pays off if gradients are
           accumulated over microbatches

A cache is computed from the weights and discarded after use. It is not part of
any state, so no cache outlives an update of its weights. On a mesh a device
caches its own rows, and gathers the codes of all other rows at each use.
"""

from typing import Any

import jax
from jax import Array

from coat_jax import ops
from coat_jax.layers.module import check_float, check_recipe
from coat_jax.layers.operands import (
  check_scaling,
  gather_weight,
  value_scaling,
)
from coat_jax.layers.residuals import cotangent
from coat_jax.mesh import reduce_gradient
from coat_jax.numerics.recipes import CoatRecipe
from coat_jax.ops import BlockScales, Operand


def quantized_weight(
  w: Array,
  cache: Operand | None,
  layout: ops.Layout,
  recipe: CoatRecipe,
  *,
  after: Array | BlockScales | None = None,
) -> Operand:
  """Quantizes all rows of w [D, *F], reusing cached scales and codes.

  On a mesh w holds the device's rows. With a cached scale, codes are gathered
  only after `after` is known: devices run one collective at a time, and the
  amax that a product needs should not wait for the codes of the whole layer.
  """
  check_scaling(recipe)
  if cache is not None and cache.rows is not None:
    return gather_weight(_in_layout(cache, layout), recipe)
  scale: Any = None if cache is None else cache.scale
  if scale is not None and recipe.axes is not None:
    # Otherwise XLA would read the scale from its stack only when it multiplies
    # the scales of both operands, so the codes and their gathers would wait for
    # the input's amax.
    scale, _ = jax.lax.optimization_barrier((scale, after))
  if layout == "rows" and isinstance(scale, Array):
    # XLA reads w in place from a stack of layers. For a kernel it would copy w
    # out first, 8 bytes a parameter. Reshape codes, not w: on a TPU, a reshape
    # of [D, 2, F] is a copy.
    rows = ops.quantize_rows(
      w,
      scale=scale,
      dtype=recipe.formats.values,
      implementation=recipe.implementation,
    )
    return gather_weight(Operand(as_matrix(rows), None, scale), recipe)
  codes = ops.quantize_tensor(
    as_matrix(w),
    scaling=value_scaling(recipe).of_weights,
    scale=scale,
    layout=layout,
    implementation=recipe.implementation,
  )
  return gather_weight(codes, recipe)


def weight_gradient(
  x: Operand,
  g: Operand,
  w: Array,
  recipe: CoatRecipe,
  *,
  has_columns: bool = True,
) -> Array:
  """Computes x^T g, the gradient of w [D, *F]; on a mesh, only a device's rows.

  x and g are the input and the output's gradient, in the layout `columns`. For
  `has_columns` see `mesh.reduce_gradient`.
  """
  dtype = w.dtype if recipe.axes is None else recipe.axes.grad_dtype
  dw = ops.linear_wgrad(x, g, dtype=dtype, implementation=recipe.implementation)
  dw = reduce_gradient(dw, recipe.axes, has_columns=has_columns)
  return cotangent(dw, w)


def cache_weight(w: Array, recipe: CoatRecipe) -> Operand | None:
  """Computes what `recipe.weight_cache` keeps for a weight [D, *F].

  Scales of tiles are kept in the layout of rows.

  Args:
    w: the weight.
    recipe: selects what is cached.

  Returns:
    The scale, with codes for "codes"; None if nothing is cached.

  Raises:
    TypeError: w is not a floating-point array, or `recipe` is not a CoatRecipe.
    ValueError: w has fewer than two axes.
  """
  check_recipe("cache_weight", recipe)
  check_float("cache_weight", "w", w, ndim=range(2, 65))
  w = jax.lax.stop_gradient(as_matrix(w))
  scaling = value_scaling(recipe).of_weights
  if recipe.weight_cache == "codes":
    return ops.quantize_tensor(
      w,
      scaling=scaling,
      layout="both",
      implementation=recipe.implementation,
    )
  if recipe.weight_cache == "scale":
    # XLA is as fast as the kernel, and copies no weights out of a stack.
    scale: Any = ops.tensor_scale(w, scaling=scaling, implementation="xla")
    return Operand(None, None, scale)
  return None


def _in_layout(x: Operand, layout: ops.Layout) -> Operand:
  """Returns an operand with only one of its two layouts."""
  is_rows, scale = layout == "rows", x.scale
  if isinstance(scale, BlockScales):
    without = dict(columns=None) if is_rows else dict(rows=None)
    scale = scale._replace(**without)
  rows, columns = (x.rows, None) if is_rows else (None, x.columns)
  return Operand(rows, columns, scale)


def as_matrix(w: Array) -> Array:
  """Reshapes [D, *F] to [D, F]."""
  return w.reshape(w.shape[0], -1)
