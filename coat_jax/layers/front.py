# SPDX-License-Identifier: Apache-2.0
"""A matmul and the norm before it: a linear layer, or the front of a block.

The norm's input is rounded to FP8 in 1 x G groups. From the rounded values, the
norm writes the matmul's E4M3 operand, without a BF16 array in between. The
front saves the rounded values and the norm's statistics. With residuals="coat",
it also saves the operand, as the reference implementation does. With "minimal",
the backward pass recomputes the operand. Without a norm, the operand is always
saved. Weights are quantized in both passes, unless their FP8 codes are cached.
"""

import math
from typing import Any, NamedTuple

from jax import Array

from coat_jax import ops
from coat_jax.layers.norm import NormSaved, norm_gradients
from coat_jax.layers.operands import (
  columns_of,
  gather_sequence,
  gradient_operand,
  groups_of,
  keep_input,
  layout_of_input,
  quantized,
  value_scaling,
)
from coat_jax.layers.product import (
  LinearWeights,
  add_in_f32,
  bias_gradient,
  input_gradient,
  multiply,
  weight_gradient,
  weights_specs,
)
from coat_jax.layers.residuals import save_residual
from coat_jax.layers.rule import rule
from coat_jax.mesh import (
  Split,
  own_columns,
  product_spec,
  scatter_sequence,
  tokens,
)
from coat_jax.ops import BlockScales, Operand
from coat_jax.recipes import CoatRecipe


class FrontStatic(NamedTuple):
  """The static arguments of a front, without the recipe."""

  kind: ops.NormKind | None = None
  eps: float = 0.0
  split: Split = "columns"


class LinearSaved(NamedTuple):
  """The values that a front or back saves for its backward pass.

  Attributes:
    norm: input and statistics of the norm; None without a norm.
    x: for a front, the matmul's operand (see `keep_input`), or only its scale
      if the backward pass recomputes the operand; for a back, the values that
      the middle saves.
    w_scale: the weight's scale, as `multiply` returns it, or None.
  """

  norm: NormSaved | None
  x: Any
  w_scale: Operand | None


def front_forward(
  x: Array, weights: LinearWeights, static: FrontStatic, recipe: CoatRecipe
) -> tuple[Array, Array | BlockScales, LinearSaved]:
  """Computes h [..., F], the scale of the matmul's operand, and `LinearSaved`.

  On a mesh, x and h contain only the device's positions, with two exceptions:
  with split="columns", h contains whole sequences; with split="inputs", x
  contains whole sequences.
  """
  if static.kind is None:
    y = quantized(x, recipe, layout=layout_of_input(recipe))
    normed, (y, kept) = None, keep_input(y, recipe)
  else:
    normed, y, kept = _norm_to_operand(x, weights, static, recipe)
  whole = y
  if static.split == "columns":
    whole = gather_sequence(y, recipe, batch=x.shape[0])
  h, w_scale = multiply(whole, weights, static.split, recipe, dtype=x.dtype)
  return h, y.scale, LinearSaved(normed, kept, w_scale)


def front_backward(
  g: Operand,
  weights: LinearWeights,
  saved: LinearSaved,
  split: Split,
  recipe: CoatRecipe,
  *,
  like: Array,
  add: Array | None = None,
) -> tuple[Array, LinearWeights]:
  """Computes dx, dw, dgamma and dbeta from g, the gradient of h.

  `like` is any array with the device's batch size and the dtype for dx. `add`,
  the gradient that bypasses the block, is added to dx in f32.
  """
  w, has_columns = weights, split == "columns"
  y = _columns_of(saved, w, recipe)
  if has_columns:
    y = gather_sequence(y, recipe, batch=like.shape[0])
  dw = weight_gradient(y, g, w.w, recipe, has_columns=split is not None)
  dy = input_gradient(g, w, saved.w_scale, recipe, like.dtype)
  if has_columns:
    dy = scatter_sequence(dy, recipe.axes)
  if saved.norm is None:
    dx = dy if add is None else add_in_f32(dy, add)
    return dx, LinearWeights(dw)
  dx, dgamma, dbeta = norm_gradients(
    saved.norm, w.gamma, w.beta, dy, add, recipe
  )
  return dx, LinearWeights(dw, None, dgamma, dbeta)


def _norm_to_operand(x, weights, static, recipe):
  """Returns `LinearSaved.norm`, the matmul's operand, and `LinearSaved.x`."""
  gamma, beta = weights.gamma, weights.beta
  scaling, how = value_scaling(recipe), recipe.implementation
  x_q, stats, scale = ops.norm_input(
    x,
    gamma,
    beta,
    kind=static.kind,
    eps=static.eps,
    groups=groups_of(recipe),
    output=scaling,
    implementation=how,
  )
  x_q, stats = save_residual("norm", (x_q, stats))
  scale = save_residual("linear", scale)
  saves_codes = recipe.residuals == "coat"
  y = ops.norm_fwd(
    x_q,
    gamma,
    beta,
    stats,
    output=scaling,
    scale=scale,
    layout=layout_of_input(recipe) if saves_codes else "rows",
    implementation=how,
  )
  if not saves_codes:
    return NormSaved(x_q, stats), y, scale
  return NormSaved(x_q, stats), *keep_input(y, recipe)


def _columns_of(saved: LinearSaved, weights: LinearWeights, recipe) -> Operand:
  """Reads or recomputes the matmul's operand in column layout."""
  if isinstance(saved.x, Operand):
    return columns_of(saved.x, recipe)
  assert saved.norm is not None
  return ops.norm_fwd(
    saved.norm.x,
    weights.gamma,
    weights.beta,
    saved.norm.stats,
    output=value_scaling(recipe),
    scale=saved.x,
    layout="columns",
    implementation=recipe.implementation,
  )


def _fwd(x, weights, static, recipe):
  h, _, saved = front_forward(x, weights, static, recipe)
  return h.reshape(*h.shape[:-1], *weights.w.shape[1:]), saved


def _bwd(static, recipe, inputs, saved, g):
  (weights,), split = inputs, static.split
  w = weights.w
  # Don't use reshape(-1, ...), which fails for an empty batch.
  g = g.reshape(*g.shape[: g.ndim - w.ndim + 1], math.prod(w.shape[1:]))
  g_q = gradient_operand(g, recipe)
  if split == "inputs":
    g_q = gather_sequence(g_q, recipe, batch=g.shape[0])
  dx, dweights = front_backward(g_q, weights, saved, split, recipe, like=g)
  has_columns = split == "columns"
  dbias = bias_gradient(g, weights.bias, recipe, has_columns=has_columns)
  return dx, dweights._replace(bias=dbias)


def _specs(x, weights, static, recipe):
  axes, each, split = recipe.axes, tokens(recipe.axes, x), static.split
  x_spec = own_columns(axes, x.ndim) if split == "inputs" else each
  y_spec = each
  if split == "columns" and x.ndim > 2:
    y_spec = own_columns(axes, x.ndim + weights.w.ndim - 2)
  return (x_spec, weights_specs(axes, weights, split)), y_spec


front_rule = rule(
  _fwd,
  _bwd,
  _specs,
  reads=(1,),
  result_spec=lambda x, weights: product_spec(x, weights.w),
)
