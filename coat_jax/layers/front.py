# SPDX-License-Identifier: Apache-2.0
"""A block's front: norm or none, operand, first product and bias.

The norm reads 1 x G FP8 values and writes the E4M3 operand of the product, with
no BF16 array between. Saved: the norm's input in 1 x G FP8 and its statistics;
with residuals="coat" its output too, which residuals="minimal" computes again.
Without a norm the codes that the product read are saved.

On a mesh the product is column-parallel over the tensor axis.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, P

from coat_jax import ops
from coat_jax.layers.linear import Linear, as_row, scale_to_save
from coat_jax.layers.mesh.collectives import (
  gather_sequence,
  scale_axes,
  scatter_sequence,
)
from coat_jax.layers.mesh.specs import cached, split_columns
from coat_jax.layers.module import value_of
from coat_jax.layers.norm import Norm, NormSaved, norm_gradients
from coat_jax.layers.operands import columns_of, input_operand
from coat_jax.layers.residuals import save_residual
from coat_jax.layers.weight import as_matrix, quantized_weight, weight_gradient
from coat_jax.ops import BlockScales, Operand
from coat_jax.recipe import CoatRecipe, MeshAxes


class FrontWeights(NamedTuple):
  """Parameters of a front; None where it has none.

  Attributes:
    gamma, beta: [D], of the norm.
    w: [D, *F].
    bias: [*F].
    cache: of w, from `layers.cache_weight`.
  """

  gamma: Array | None
  beta: Array | None
  w: Array
  bias: Array | None = None
  cache: Operand | None = None

  @classmethod
  def of(cls, norm: Norm | None, linear: Linear) -> "FrontWeights":
    """Those of a norm's module and a linear layer's."""
    gamma, beta = (None, None)
    if norm is not None:
      gamma, beta = norm.gamma, value_of(norm.bias)
    w, bias = linear.kernel[...], value_of(linear.bias)
    return cls(gamma, beta, w, bias, linear.cache)


def front_specs(axes: MeshAxes, weights: FrontWeights) -> FrontWeights:
  """How a front's weights are sharded: column-parallel, norms replicated."""
  columns: Any = split_columns(axes, weights.w.ndim)
  all_of_it: Any = P()
  return FrontWeights(
    gamma=all_of_it,
    beta=all_of_it,
    w=columns,
    bias=P(*columns[1:]),  # pyright: ignore[reportArgumentType]
    cache=cached(weights.cache, columns),
  )


class FrontSaved(NamedTuple):
  """What `front_forward` makes for its backward.

  Attributes:
    norm: input and statistics of the norm; None without one.
    y: the operand, see `input_operand`; where it is recomputed its scale alone,
      or None in blocks.
    w_scale: see `scale_to_save`.
  """

  norm: NormSaved | None
  y: Operand | None
  w_scale: Operand | None


def front_forward(
  x: Array,
  weights: FrontWeights,
  kind: ops.NormKind | None,
  eps: float,
  recipe: CoatRecipe,
) -> tuple[Array, Array | BlockScales, FrontSaved]:
  """h [..., F] of whole sequences, the operand's scales, and what is saved."""
  w = weights
  if kind is None:
    normed, (y, kept) = None, input_operand(x, recipe)
  else:
    normed, y, kept = _norm_to_operand(x, w.gamma, w.beta, kind, eps, recipe)
  y = gather_sequence(y, recipe, batch=x.shape[0])
  w_q = quantized_weight(as_matrix(w.w), w.cache, "columns", recipe)
  h = ops.linear_fwd(
    y,
    w_q,
    dtype=x.dtype,
    bias=as_row(w.bias),
    implementation=recipe.implementation,
  )
  return h, y.scale, FrontSaved(normed, kept, scale_to_save(w.cache, w_q))


def front_backward(
  weights: FrontWeights,
  saved: FrontSaved,
  g: Operand,
  recipe: CoatRecipe,
  *,
  like: Array,
  add: Array | None = None,
) -> tuple[Array, FrontWeights]:
  """Gradients of x, in `like`'s dtype, and of the weights but the bias.

  Args:
    weights: of the front.
    saved: from `front_forward`.
    g: gradient of h, from `gradient_operand`.
    recipe: as of the block.
    like: [B, ...], any array of the device's sequences.
    add: the gradient that goes around the block, added to dx in f32.
  """
  w, how = weights, recipe.implementation
  y = _columns_of(saved, w, recipe)
  y = gather_sequence(y, recipe, batch=like.shape[0])
  dw = weight_gradient(y, g, w.w, recipe)
  w_q = quantized_weight(
    as_matrix(w.w), w.cache or saved.w_scale, "rows", recipe
  )
  dy = ops.linear_dgrad(g, w_q, dtype=like.dtype, implementation=how)
  dy = scatter_sequence(dy, recipe.axes)
  if saved.norm is None:
    if add is not None:
      dy = dy.astype(jnp.float32) + add.astype(jnp.float32)
    return dy.astype(like.dtype), FrontWeights(None, None, dw)
  dx, dgamma, dbeta = norm_gradients(
    saved.norm, w.gamma, w.beta, dy, add, recipe
  )
  return dx, FrontWeights(dgamma, dbeta, dw)


def _norm_to_operand(x, gamma, beta, kind, eps, recipe):
  """A norm in front of a product: what it saves, its operand, what is saved.

  Of the operand the backward gets columns with residuals="coat", else the
  scale, to compute them again. In blocks rows, or nothing.
  """
  in_blocks = recipe.scaling == "block"
  group_size, how = recipe.group_size, recipe.implementation
  x_q, stats, scale = ops.norm_input(
    x,
    gamma,
    beta,
    kind=kind,
    eps=eps,
    group_size=group_size,
    dtype=recipe.formats.values,
    output_dtype=recipe.formats.values,
    axis_names=scale_axes(recipe.axes),
    implementation=how,
  )
  x_q, stats = save_residual("norm", (x_q, stats))
  scale = None if in_blocks else save_residual("linear", scale)
  saves_codes = recipe.residuals == "coat"
  y = ops.norm_fwd(
    x_q,
    gamma,
    beta,
    stats,
    scale=scale,
    group_size=group_size,
    dtype=recipe.formats.values,
    layout="both" if saves_codes and not in_blocks else "rows",
    implementation=how,
  )
  if in_blocks:
    kept = save_residual("linear", y) if saves_codes else None
    return NormSaved(x_q, stats), kept or y, kept
  kept = save_residual("linear", y._replace(rows=None))
  return NormSaved(x_q, stats), y, kept


def _columns_of(saved: FrontSaved, weights: FrontWeights, recipe) -> Operand:
  """The columns of the front's operand, saved or computed again."""
  y = saved.y
  if y is not None and (y.rows is not None or y.columns is not None):
    return columns_of(y, recipe)
  assert saved.norm is not None
  return ops.norm_fwd(
    saved.norm.x,
    weights.gamma,
    weights.beta,
    saved.norm.stats,
    scale=None if y is None else y.scale,
    group_size=recipe.group_size,
    dtype=recipe.formats.values,
    layout="columns",
    implementation=recipe.implementation,
  )
