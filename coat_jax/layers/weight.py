# SPDX-License-Identifier: Apache-2.0
"""Weights on their way into FP8 products, and what may be kept of that.

A forward reads a weight's columns and a backward its rows, in E4M3 with one
scale, or with one per tile of 128 x 128. recipe.weight_cache says what is
computed once for several uses:

  "none"   nothing: amax at the first use, codes at each
  "scale"  the scales of every weight, before the scan over layers
  "codes"  scale and codes in both layouts: 2 bytes a parameter, for as long as
           the function that asked for them runs; pays with accumulation

A cache is a value that is computed from the weights where it is used and dies
there. It is no state: none can survive an update of its weights. On a mesh a
device caches its own rows and gathers the codes of the others at each use.
"""

from typing import Any

import jax
from jax import Array

from coat_jax import ops
from coat_jax.layers.mesh.collectives import (
  check_scaling,
  gather_weight,
  reduce_gradient,
  scale_axes,
)
from coat_jax.layers.module import check_float, check_recipe
from coat_jax.layers.residuals import cotangent
from coat_jax.ops import BlockScales, Operand
from coat_jax.recipe import CoatRecipe


def quantized_weight(
  w: Array,
  cache: Operand | None,
  layout: ops.Layout,
  recipe: CoatRecipe,
  *,
  after: Array | BlockScales | None = None,
) -> Operand:
  """The operand of all rows of w [D, F], from as much as is cached.

  Args:
    w: the weight, or the device's rows of it.
    cache: from `cache_weight`.
    layout: "columns" for a forward, "rows" for a backward.
    recipe: how it is quantized.
    after: on a mesh, where a scale is cached, codes are gathered only once
      this value is known. Devices exchange one thing after another, and an amax
      that a product waits for should not wait behind all of a layer's codes.
  """
  check_scaling(recipe)
  if cache is not None and cache.rows is not None:
    return gather_weight(_in_layout(cache, layout), recipe)
  if cache is not None and recipe.axes is not None:
    # XLA would take the scale from its stack along with the product of scales,
    # and so have codes wait, and gathers of them, for the input's amax.
    scale, _ = jax.lax.optimization_barrier((cache.scale, after))
    cache = cache._replace(scale=scale)
  if recipe.scaling == "block":
    tiles = ops.quantize_tiles(
      w,
      dtype=recipe.formats.values,
      scale=_tile_scales(cache),
      layout=layout,
      implementation=recipe.implementation,
    )
    return gather_weight(tiles, recipe)
  scale: Any = None if cache is None else cache.scale
  how: Any = dict(
    dtype=recipe.formats.values, implementation=recipe.implementation
  )
  if layout == "rows" and scale is not None:
    # Read where they are in a stack of layers. For a kernel XLA copies them out
    # first, 8 bytes a parameter.
    rows = ops.quantize_rows(w, scale=scale, **how)
    return gather_weight(Operand(rows, None, scale), recipe)
  axis_names = scale_axes(recipe.axes)
  codes = ops.quantize_tensor(
    w, scale=scale, layout=layout, axis_names=axis_names, **how
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
  """x^T g as the gradient of w [D, *F]; on a mesh of the device's rows.

  Args:
    x: columns of the input.
    g: columns of the output's gradient.
    w: the weight, or the device's rows of it.
    recipe: how it is summed over devices.
    has_columns: see `collectives.reduce_gradient`.
  """
  dtype = w.dtype if recipe.axes is None else recipe.axes.grad_dtype
  dw = ops.linear_wgrad(x, g, dtype=dtype, implementation=recipe.implementation)
  dw = reduce_gradient(dw, recipe.axes, has_columns=has_columns)
  return cotangent(dw, w)


def cache_weight(w: Array, recipe: CoatRecipe) -> Operand | None:
  """What `recipe.weight_cache` keeps of a weight [D, *F].

  Scales of tiles are kept as those of rows.

  Raises:
    TypeError: w is no floating array, or `recipe` no CoatRecipe.
    ValueError: w has fewer than two axes.
  """
  check_recipe("cache_weight", recipe)
  check_float("cache_weight", "w", w, ndim=range(2, 65))
  w = jax.lax.stop_gradient(as_matrix(w))
  if recipe.scaling == "block":
    return _cache_tiles(w, recipe)
  if recipe.weight_cache == "codes":
    return ops.quantize_tensor(
      w,
      dtype=recipe.formats.values,
      layout="both",
      axis_names=scale_axes(recipe.axes),
      implementation=recipe.implementation,
    )
  if recipe.weight_cache == "scale":
    # As fast as the kernel, and where weights are stacked XLA copies none out.
    scale = ops.tensor_scale(
      w,
      dtype=recipe.formats.values,
      axis_names=scale_axes(recipe.axes),
      implementation="xla",
    )
    return Operand(None, None, scale)
  return None


def _cache_tiles(w: Array, recipe: CoatRecipe) -> Operand | None:
  """`cache_weight` in tiles."""
  how: Any = dict(
    dtype=recipe.formats.values, implementation=recipe.implementation
  )
  if recipe.weight_cache == "codes":
    return ops.quantize_tiles(w, layout="both", **how)
  if recipe.weight_cache == "scale":
    return Operand(None, None, BlockScales(ops.tile_scales(w, **how), None))
  return None


def _tile_scales(cache: Operand | None) -> Array | None:
  if cache is None:
    return None
  assert isinstance(cache.scale, BlockScales)
  return cache.scale.rows


def _in_layout(x: Operand, layout: ops.Layout) -> Operand:
  """An operand that has both layouts without one of them."""
  is_rows, scale = layout == "rows", x.scale
  if isinstance(scale, BlockScales):
    without = dict(columns=None) if is_rows else dict(rows=None)
    scale = scale._replace(**without)
  rows, columns = (x.rows, None) if is_rows else (None, x.columns)
  return Operand(rows, columns, scale)


def as_matrix(w: Array) -> Array:
  """[D, *F] to [D, F]."""
  return w.reshape(w.shape[0], -1)
