# SPDX-License-Identifier: Apache-2.0
"""A block's back: the second matmul, an optional norm and the residual add.

The norm reads the matmul's output, including the bias, as 1 x G FP8 values.
These values and the norm's statistics are saved, but not the output itself. The
gradient of the norm's input serves as the gradient of that output.

On a mesh the matmul is row-parallel over the tensor axis: each device
multiplies its own columns of whole sequences, and partial sums are
reduce-scattered. Then each device normalizes whole rows of its own tokens.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from coat_jax import ops
from coat_jax.layers.middle import Middle, MiddleGradient, MiddleOutput
from coat_jax.layers.norm import NormSaved, norm_forward, norm_gradients
from coat_jax.layers.operands import gather_sequence, gradient_operand
from coat_jax.layers.product import (
  LinearWeights,
  bias_gradient,
  input_gradient,
  multiply,
)
from coat_jax.layers.weight import weight_gradient
from coat_jax.numerics.recipes import CoatRecipe
from coat_jax.ops import BlockScales, Operand


class BackSaved(NamedTuple):
  """Values that `back_forward` saves for `back_backward`.

  Attributes:
    middle: values that the middle saves.
    w_scale: see `multiply`.
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
  weights: LinearWeights,
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
  product = functools.partial(
    multiply,
    out.operand,
    w,
    "inputs",
    recipe,
    dtype=x.dtype,
    after=after if out.after is None else out.after,
  )
  add = x if static.add_input else None
  if static.post_norm is None:
    y, w_scale = product(add=add)
    return y, BackSaved(out.saved, w_scale, None)
  z, w_scale = product()
  y, saved = norm_forward(
    z, w.gamma, w.beta, static.post_norm, static.eps, recipe
  )
  if add is not None:
    y = add.astype(jnp.float32) + y
  return y.astype(x.dtype), BackSaved(out.saved, w_scale, saved)


def back_backward(
  g: Array,
  middle_weights: Any,
  weights: LinearWeights,
  saved: BackSaved,
  static: BlockStatic,
  recipe: CoatRecipe,
  *,
  has_bias: bool,
) -> tuple[MiddleGradient, LinearWeights]:
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
  dout = input_gradient(g_q, w, saved.w_scale, recipe, g.dtype)
  gradient = middle.backward(
    values, dout, middle_weights, recipe, has_bias=has_bias
  )
  if dw is None:
    assert gradient.operand is not None  # See `MiddleGradient`.
    dw = weight_gradient(gradient.operand, g_q, w.w, recipe)
  dbias = bias_gradient(g, w.bias, recipe, has_columns=False)
  return gradient, LinearWeights(dw, dbias, dgamma, dbeta)
