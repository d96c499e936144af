# SPDX-License-Identifier: Apache-2.0
"""FP8 matmuls of a linear layer or a block: forward pass and gradients.

The forward pass reads a weight in column layout, and the backward pass reads it
in row layout. Both layouts hold FP8 codes, with one scale per weight or per
tile of 128 x 128. recipe.weight_cache selects what is computed once and used
several times:

  "none"   nothing. Each use quantizes the weight again. The backward pass
           reuses a scale of the whole weight, but recomputes scales of tiles.
  "scale"  the scales of all weights, before the scan over layers
  "codes"  scales and codes in both layouts. They occupy 2 bytes per parameter
           while the function that cached them runs. This pays off if gradients
           are accumulated over microbatches.

On a mesh, a device caches only its shard of the rows, and gathers the codes of
the other rows at each use.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.layers.module import check_float, check_recipe, value_of
from coat_jax.layers.norm import weights_of_norm
from coat_jax.layers.operands import (
  cache_specs,
  check_scaling,
  gather_weight,
  value_scaling,
)
from coat_jax.layers.residuals import cotangent, save_residual
from coat_jax.mesh import (
  Split,
  reduce_gradient,
  scatter_sequence,
  split_kernel,
  sum_tokens,
  tensor_size,
)
from coat_jax.ops import BlockScales, Operand
from coat_jax.recipes import CoatRecipe, MeshAxes


class LinearWeights(NamedTuple):
  """Parameters of a matmul and its norm; missing ones are None.

  The norm precedes a block's first matmul, or follows its second matmul.

  Attributes:
    w: [D, *F].
    bias: [*F].
    gamma, beta: scale and bias of the norm; [D] for a norm before the matmul,
      [F] for one after it.
    cache: the result of `layers.cache_weight` for w.
  """

  w: Array
  bias: Array | None = None
  gamma: Array | None = None
  beta: Array | None = None
  cache: Operand | None = None

  @classmethod
  def of(cls, linear: Any, norm: Any = None) -> "LinearWeights":
    """Reads the weights from a `Linear` and a norm module."""
    w, bias = linear.kernel[...], value_of(linear.bias)
    return cls(w, bias, *weights_of_norm(norm), linear.cache)


def weights_specs(axes: MeshAxes, weights: LinearWeights, split: Split) -> Any:
  """Returns `LinearWeights` that contain the specs of `weights`."""
  kernel: Any = split_kernel(axes, split, weights.w.ndim)
  bias = P(*kernel[1:]) if split == "columns" else P()
  cache = cache_specs(weights.cache, kernel)
  specs: Any = LinearWeights(kernel, bias, P(), P(), cache)  # pyright: ignore[reportArgumentType]
  return specs


def cache_weight(w: Array, recipe: CoatRecipe) -> Operand | None:
  """Computes the cache that `recipe.weight_cache` selects for w [D, *F].

  If weights are scaled in tiles, `weight_cache="scale"` keeps only the scales
  of the row layout.

  Args:
    w: the weight.
    recipe: selects what is cached.

  Returns:
    None if nothing is cached. Otherwise an `Operand`, which contains the scale,
    and with `weight_cache="codes"` also the codes.

  Raises:
    TypeError: w is not a floating-point array, or `recipe` is not a CoatRecipe.
    ValueError: w has fewer than two axes.
  """
  check_recipe("cache_weight", recipe)
  check_float("cache_weight", "w", w, ndim=range(2, 65))
  if recipe.linear == "bf16":
    return None
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
    # XLA is as fast as the GPU kernel, and reads a layer of stacked weights
    # without copying it.
    scale: Any = ops.tensor_scale(w, scaling=scaling, implementation="xla")
    return Operand(None, None, scale)
  return None


def multiply(
  x: Operand,
  weights: LinearWeights,
  split: Split,
  recipe: CoatRecipe,
  *,
  dtype: DTypeLike,
  add: Array | None = None,
  after: Array | BlockScales | None = None,
) -> tuple[Array, Operand | None]:
  """Computes x w + bias + add in `dtype`, and saves the weight's scale.

  The scale is returned as an `Operand`, or as None if it is cached or will be
  recomputed. x is in row layout, and contains whole sequences if `split` is not
  None. The bias and `add`, the residual stream, are added in f32. With
  split="inputs", partial products are rounded to `dtype` before devices sum
  them. `after` is passed to `quantized_weight`.
  """
  w, how = weights, recipe.implementation
  w_q = quantized_weight(w.w, w.cache, "columns", recipe, after=after)
  saved = _saved_scale(w.cache, w_q, recipe)
  bias = None if w.bias is None else w.bias.reshape(-1)
  if split != "inputs" or tensor_size(recipe.axes) == 1:
    y = ops.linear_fwd(
      x, w_q, dtype=dtype, add=add, bias=bias, implementation=how
    )
    return y, saved
  y = ops.linear_fwd(x, w_q, dtype=dtype, implementation=how)
  y = add_bias(scatter_sequence(y, recipe.axes), bias)
  return y if add is None else add_in_f32(y, add), saved


def input_gradient(
  g: Operand,
  weights: LinearWeights,
  scale: Operand | None,
  recipe: CoatRecipe,
  dtype: DTypeLike,
) -> Array:
  """Computes g w^T in `dtype`; `scale` is from `multiply`."""
  w_q = quantized_weight(weights.w, weights.cache or scale, "rows", recipe)
  return ops.linear_dgrad(
    g, w_q, dtype=dtype, implementation=recipe.implementation
  )


def weight_gradient(
  x: Operand,
  g: Operand,
  w: Array,
  recipe: CoatRecipe,
  *,
  has_columns: bool = True,
) -> Array:
  """Computes dw [D, *F] from x and g in column layout.

  On a mesh, returns only the rows of dw that this device stores. For
  `has_columns` see `mesh.reduce_gradient`.
  """
  dtype = w.dtype if recipe.axes is None else recipe.axes.grad_dtype
  dw = ops.linear_wgrad(x, g, dtype=dtype, implementation=recipe.implementation)
  dw = reduce_gradient(dw, recipe.axes, has_columns=has_columns)
  return cotangent(dw, w)


def add_bias(y: Array, bias: Array | None) -> Array:
  """Adds bias [*F] to y [..., *F] in f32; the result has y's dtype."""
  if bias is None:
    return y
  ones = (1,) * (y.ndim - bias.ndim)
  return add_in_f32(y, bias.reshape(ones + bias.shape))


def add_in_f32(a: Array, b: Array) -> Array:
  """Adds a and b in f32; the result has a's dtype."""
  return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)


def bias_gradient(
  g: Array | None, bias: Array | None, recipe: CoatRecipe, *, has_columns: bool
) -> Array | None:
  """Sums g [..., F] over all tokens in f32; returns None if there is no bias.

  g may also be [F], already summed over the device's tokens. With
  `has_columns`, g contains the device's shard of the columns for all positions.
  """
  if bias is None:
    return None
  assert g is not None  # See `MiddleGradient`.
  sums = jnp.sum(g.astype(jnp.float32), axis=tuple(range(g.ndim - 1)))
  sums = sum_tokens(sums, recipe.axes, all_positions=has_columns)
  return cotangent(sums, bias)


def quantized_weight(
  w: Array,
  cache: Operand | None,
  layout: ops.Layout,
  recipe: CoatRecipe,
  *,
  after: Array | BlockScales | None = None,
) -> Operand:
  """Quantizes all rows of w [D, *F], reusing cached scales and codes.

  On a mesh, w contains only the device's rows; the codes are gathered. If the
  scale is cached, the gather waits for the array `after`. Devices run one
  collective at a time, so an earlier gather would delay the all-reduce of the
  amax that the first matmul needs.
  """
  check_scaling(recipe)
  if cache is not None and cache.rows is not None:
    return gather_weight(_in_layout(cache, layout), recipe)
  scale: Any = None if cache is None else cache.scale
  if scale is not None and recipe.axes is not None:
    # The barrier is needed even if `after` is None. Without it, the kernel that
    # multiplies both operands' scales would also read this scale from the stack
    # of layers. That kernel waits for the input's amax, so the weight's codes
    # would wait too.
    scale, _ = jax.lax.optimization_barrier((scale, after))
  if layout == "rows" and isinstance(scale, Array):
    # `quantize_rows` reads w in place from a stack of layers. A Pallas kernel
    # would make XLA copy w first, which moves 8 bytes per parameter. Reshape
    # the codes instead of w: on a TPU, a reshape of [D, 2, F] is a copy.
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


def _saved_scale(
  cache: Operand | None, w: Operand, recipe: CoatRecipe
) -> Operand | None:
  """Saves the weight's scale; returns None if it is cached or recomputed."""
  if cache is not None or not value_scaling(recipe).of_weights.saves_scale:
    return None
  return Operand(None, None, save_residual("linear", w.scale))


def _in_layout(x: Operand, layout: ops.Layout) -> Operand:
  """Returns an operand with only one of its layouts."""
  without = dict(columns=None) if layout == "rows" else dict(rows=None)
  scale = x.scale
  if isinstance(scale, BlockScales):
    scale = scale._replace(**without)
  return x._replace(**without, scale=scale)


def as_matrix(w: Array) -> Array:
  """Reshapes [D, *F] to [D, F]."""
  return w.reshape(w.shape[0], -1)
