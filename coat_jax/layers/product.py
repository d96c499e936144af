# SPDX-License-Identifier: Apache-2.0
"""FP8 products of a linear layer or a block: weights, forward, gradients.

On a mesh a weight is split over the tensor axis by columns or by inputs (rows).
A product split by columns reads whole sequences. A product split by inputs
reads the device's own columns of whole sequences, and its partial sums are
reduce-scattered over positions.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.layers.module import value_of
from coat_jax.layers.norm import weights_of_norm
from coat_jax.layers.operands import cache_specs, value_scaling
from coat_jax.layers.residuals import cotangent, save_residual
from coat_jax.layers.weight import quantized_weight
from coat_jax.mesh import (
  Split,
  scatter_sequence,
  split_kernel,
  sum_tokens,
  tensor_size,
)
from coat_jax.numerics.recipes import CoatRecipe, MeshAxes
from coat_jax.ops import BlockScales, Operand


class LinearWeights(NamedTuple):
  """Parameters of a product and its norm; None for each that does not exist.

  The norm comes before a block's first product, or after its second product.

  Attributes:
    w: [D, *F].
    bias: [*F].
    gamma, beta: the norm's scale and bias; [D] if it comes first, else [F].
    cache: the cached operand of w, from `layers.cache_weight`.
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
  """Returns the specs of the weights; the norm's weights are replicated."""
  kernel: Any = split_kernel(axes, split, weights.w.ndim)
  bias = P(*kernel[1:]) if split == "columns" else P()
  cache = cache_specs(weights.cache, kernel)
  specs: Any = LinearWeights(kernel, bias, P(), P(), cache)  # pyright: ignore[reportArgumentType]
  return specs


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
  """Computes x w + bias + add in `dtype`, and the weight's scale to save.

  x holds rows, of whole sequences unless `split` is None. The bias is rounded
  to `dtype` if a device computes the whole sum. `add`, the residual stream of a
  product split by inputs, is added in f32. For `after` see `quantized_weight`.
  """
  w, how = weights, recipe.implementation
  w_q = quantized_weight(w.w, w.cache, "columns", recipe, after=after)
  saved = _scale_to_save(w.cache, w_q, recipe)
  bias = None if w.bias is None else w.bias.reshape(-1)
  if split != "inputs" or tensor_size(recipe.axes) == 1:
    y = ops.linear_fwd(
      x, w_q, dtype=dtype, add=add, bias=bias, implementation=how
    )
    return y, saved
  y = ops.linear_fwd(x, w_q, dtype=dtype, implementation=how)
  y = add_bias(scatter_sequence(y, recipe.axes), bias)
  if add is None:
    return y, saved
  y = add.astype(jnp.float32) + y.astype(jnp.float32)
  return y.astype(dtype), saved


def input_gradient(
  g: Operand,
  weights: LinearWeights,
  scale: Operand | None,
  recipe: CoatRecipe,
  dtype: DTypeLike,
) -> Array:
  """Computes g w^T in `dtype`; `scale` is what `multiply` saved."""
  w_q = quantized_weight(weights.w, weights.cache or scale, "rows", recipe)
  return ops.linear_dgrad(
    g, w_q, dtype=dtype, implementation=recipe.implementation
  )


def _scale_to_save(
  cache: Operand | None, w: Operand, recipe: CoatRecipe
) -> Operand | None:
  """Returns the scale of a weight to save; None if it is cached.

  Also returns None for tiles, whose scales are recomputed. The backward pass
  reads codes only if they are cached, because they then stay in memory anyway.
  """
  if cache is not None or not value_scaling(recipe).of_weights.saves_scale:
    return None
  return Operand(None, None, save_residual("linear", w.scale))


def add_bias(y: Array, bias: Array | None) -> Array:
  """Adds bias [*F] to y [..., *F] in f32; the result has y's dtype."""
  if bias is None:
    return y
  ones = (1,) * (y.ndim - bias.ndim)
  row = bias.astype(jnp.float32).reshape(ones + bias.shape)
  return (y.astype(jnp.float32) + row).astype(y.dtype)


def bias_gradient(
  g: Array | None, bias: Array | None, recipe: CoatRecipe, *, has_columns: bool
) -> Array | None:
  """Sums g [..., F] over all tokens in f32; None without a bias.

  g is [F] if it is already summed over the device's tokens. `has_columns`:
  whether g holds the device's own columns for all positions.
  """
  if bias is None:
    return None
  assert g is not None  # See `MiddleGradient`.
  sums = jnp.sum(g.astype(jnp.float32), axis=tuple(range(g.ndim - 1)))
  sums = sum_tokens(sums, recipe.axes, all_positions=has_columns)
  return cotangent(sums, bias)
