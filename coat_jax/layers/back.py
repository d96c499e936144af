# SPDX-License-Identifier: Apache-2.0
"""A block's back: the second product, an optional norm and the residual add.

The norm reads the product, bias included, as 1 x G FP8 values. These are saved
with its statistics; the product itself is not. The gradient of the norm's input
is that of the product, and the backward continues as without a norm.

On a mesh the product is row-parallel over the tensor axis: each device
multiplies its own columns of whole sequences, and sums are scattered. The norm
comes after that, when a device has whole rows of its own tokens.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, P

from coat_jax import ops
from coat_jax.layers.linear import (
  Linear,
  add_linear,
  bias_gradient,
  scale_to_save,
)
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.module import value_of
from coat_jax.layers.norm import (
  Norm,
  NormSaved,
  norm_forward,
  norm_gradients,
  weights_of_norm,
)
from coat_jax.layers.operands import cached, gather_sequence, gradient_operand
from coat_jax.layers.weight import quantized_weight, weight_gradient
from coat_jax.mesh import split_inputs
from coat_jax.numerics.recipes import CoatRecipe, MeshAxes
from coat_jax.ops import BlockScales, Operand


class BackWeights(NamedTuple):
  """Parameters of a back; None for those it does not have.

  Attributes:
    w: [F, D].
    bias: [D].
    cache: cache of w, from `layers.cache_weight`.
    gamma, beta: [D], of the norm after the product.
  """

  w: Array
  bias: Array | None = None
  cache: Operand | None = None
  gamma: Array | None = None
  beta: Array | None = None

  @classmethod
  def of(cls, linear: Linear, norm: Norm | None = None) -> "BackWeights":
    """Reads the weights off a linear layer's module and a norm's."""
    gamma, beta = weights_of_norm(norm)
    w, bias = linear.kernel[...], value_of(linear.bias)
    return cls(w, bias, linear.cache, gamma, beta)


def back_specs(axes: MeshAxes, weights: BackWeights) -> BackWeights:
  """Returns how a back's weights are sharded.

  w is row-parallel; vectors are replicated.
  """
  rows: Any = split_inputs(axes)
  all_of_it: Any = P()
  return BackWeights(
    w=rows,
    bias=all_of_it,
    cache=cached(weights.cache, rows),
    gamma=all_of_it,
    beta=all_of_it,
  )


class BackSaved(NamedTuple):
  """Values that `back_forward` makes for its backward.

  Attributes:
    middle: values that the middle saves.
    w_scale: see `scale_to_save`.
    norm: input and statistics of the norm; None without one.
  """

  middle: Any
  w_scale: Operand | None
  norm: NormSaved | None


class BlockStatic(NamedTuple):
  """Arguments of `layers.block` that are not arrays, except the recipe."""

  middle: Middle
  kind: ops.NormKind | None
  eps: float
  add_input: bool
  post_norm: ops.NormKind | None


def back_forward(
  x: Array,
  out: MiddleOutput,
  weights: BackWeights,
  static: BlockStatic,
  recipe: CoatRecipe,
  *,
  after: Array | BlockScales | None = None,
) -> tuple[Array, BackSaved]:
  """Computes the second product, its norm and the sum with x, in x's dtype.

  Also returns what is saved. x is added in f32. For `after` see
  `quantized_weight`.
  """
  w = weights
  after = after if out.after is None else out.after
  w_q = quantized_weight(w.w, w.cache, "columns", recipe, after=after)
  product = functools.partial(
    add_linear, out.operand, w_q, w.bias, recipe, dtype=x.dtype
  )
  w_scale = scale_to_save(w.cache, w_q, recipe)
  add = x if static.add_input else None
  if static.post_norm is None:
    return product(add=add), BackSaved(out.saved, w_scale, None)
  z = product(add=None)
  y, saved = norm_forward(
    z, w.gamma, w.beta, static.post_norm, static.eps, recipe
  )
  if add is not None:
    y = add.astype(jnp.float32) + y
  return y.astype(x.dtype), BackSaved(out.saved, w_scale, saved)


def back_backward(
  g: Array,
  middle_weights: Any,
  weights: BackWeights,
  saved: BackSaved,
  static: BlockStatic,
  recipe: CoatRecipe,
  *,
  has_bias: bool,
) -> tuple[MiddleGradient, BackWeights]:
  """Computes gradients of the middle, its weights and the back's weights."""
  w, middle, dgamma, dbeta = weights, static.middle, None, None
  if saved.norm is not None:
    g, dgamma, dbeta = norm_gradients(
      saved.norm, w.gamma, w.beta, g, None, recipe
    )
  g_q = gather_sequence(gradient_operand(g, recipe), recipe, batch=g.shape[0])
  values, operand = middle.restore(saved.middle, g.dtype, recipe)
  dw = None
  if operand is not None:
    dw = weight_gradient(operand, g_q, w.w, recipe)
  w_q = quantized_weight(w.w, w.cache or saved.w_scale, "rows", recipe)
  dout = ops.linear_dgrad(
    g_q, w_q, dtype=g.dtype, implementation=recipe.implementation
  )
  gradient = middle.backward(
    values, dout, middle_weights, recipe, has_bias=has_bias
  )
  if dw is None:
    assert gradient.operand is not None  # See `MiddleGradient`.
    dw = weight_gradient(gradient.operand, g_q, w.w, recipe)
  dbias = bias_gradient(g, w.bias, recipe, has_columns=False)
  return gradient, BackWeights(dw, dbias, None, dgamma, dbeta)
