# SPDX-License-Identifier: Apache-2.0
"""A block's front: optional norm, operand, first product and bias.

The norm reads 1 x G FP8 values and writes the E4M3 operand of the product,
without a BF16 array in between. Saved: the norm's input in 1 x G FP8 and its
statistics; with residuals="coat" also its output, which residuals="minimal"
recomputes. Without a norm, the codes that the product read are saved.

On a mesh the product is column-parallel over the tensor axis.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from coat_jax import ops
from coat_jax.layers.linear import linear
from coat_jax.layers.norm import NormSaved, norm, norm_gradients
from coat_jax.layers.operands import (
  columns_of,
  gather_sequence,
  groups_of,
  input_operand,
  keep_input,
  layout_of_input,
  value_scaling,
)
from coat_jax.layers.product import LinearWeights, input_gradient, multiply
from coat_jax.layers.residuals import save_residual
from coat_jax.layers.weight import weight_gradient
from coat_jax.mesh import scatter_sequence
from coat_jax.numerics.recipes import CoatRecipe
from coat_jax.ops import BlockScales, Operand


class FrontSaved(NamedTuple):
  """Values that `front_forward` makes for its backward.

  Attributes:
    norm: input and statistics of the norm; None without one.
    y: the operand, see `keep_input`; or, if it is recomputed, its scale.
    w_scale: see `multiply`.
  """

  norm: NormSaved | None
  y: Operand | ops.Scales | None
  w_scale: Operand | None


def front_forward(
  x: Array,
  weights: LinearWeights,
  kind: ops.NormKind | None,
  eps: float,
  recipe: CoatRecipe,
) -> tuple[Array, Array | BlockScales, FrontSaved]:
  """Computes h [..., F] of whole sequences.

  Also returns the operand's scales and what is saved.
  """
  w = weights
  if kind is None:
    normed, (y, kept) = None, input_operand(x, recipe)
  else:
    normed, y, kept = _norm_to_operand(x, w.gamma, w.beta, kind, eps, recipe)
  whole = gather_sequence(y, recipe, batch=x.shape[0])
  h, w_scale = multiply(whole, w, "columns", recipe, dtype=x.dtype)
  return h, y.scale, FrontSaved(normed, kept, w_scale)


def front_backward(
  weights: LinearWeights,
  saved: FrontSaved,
  g: Operand,
  recipe: CoatRecipe,
  *,
  like: Array,
  add: Array | None = None,
) -> tuple[Array, LinearWeights]:
  """Computes gradients of x, in `like`'s dtype, and of the weights.

  The bias is left out. g, from `gradient_operand`, is the gradient of h. `like`
  is any array [B, ...] of the device's sequences. `add`, the gradient that
  bypasses the block, is added to dx in f32.
  """
  w = weights
  y = _columns_of(saved, w, recipe)
  y = gather_sequence(y, recipe, batch=like.shape[0])
  dw = weight_gradient(y, g, w.w, recipe)
  dy = input_gradient(g, w, saved.w_scale, recipe, like.dtype)
  dy = scatter_sequence(dy, recipe.axes)
  if saved.norm is None:
    if add is not None:
      dy = dy.astype(jnp.float32) + add.astype(jnp.float32)
    return dy.astype(like.dtype), LinearWeights(dw)
  dx, dgamma, dbeta = norm_gradients(
    saved.norm, w.gamma, w.beta, dy, add, recipe
  )
  return dx, LinearWeights(dw, None, dgamma, dbeta)


def plain_front(
  x: Array,
  weights: LinearWeights,
  kind: ops.NormKind | None,
  eps: float,
  recipe: CoatRecipe,
) -> Array:
  """Computes h [..., *F] from a norm and a linear layer that are not fused."""
  w, y = weights, x
  if kind is not None:
    y = norm(x, w.gamma, w.beta, kind=kind, eps=eps, recipe=recipe)
  return linear(y, w.w, w.bias, recipe=recipe, cache=w.cache, split="columns")


def _norm_to_operand(x, gamma, beta, kind, eps, recipe):
  """Normalizes before a product; returns what is saved and the operand."""
  scaling, how = value_scaling(recipe), recipe.implementation
  x_q, stats, scale = ops.norm_input(
    x,
    gamma,
    beta,
    kind=kind,
    eps=eps,
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


def _columns_of(saved: FrontSaved, weights: LinearWeights, recipe) -> Operand:
  """Returns the columns of the front's operand, saved or recomputed."""
  if isinstance(saved.y, Operand):
    return columns_of(saved.y, recipe)
  assert saved.norm is not None
  return ops.norm_fwd(
    saved.norm.x,
    weights.gamma,
    weights.beta,
    saved.norm.stats,
    output=value_scaling(recipe),
    scale=saved.y,
    layout="columns",
    implementation=recipe.implementation,
  )
