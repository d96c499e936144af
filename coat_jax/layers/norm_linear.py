# SPDX-License-Identifier: Apache-2.0
"""Norm followed by a linear layer, FP8 from end to end in one custom_vjp.

The norm reads 1 x G FP8 values and writes the E4M3 operand of the product, with
no BF16 array between. Remembered: the norm's input in FP8; with
residuals="coat" its output too, which residuals="minimal" computes again.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax import recipe as recipes
from coat_jax.formats import E5M2
from coat_jax.layers.linear import (
  Linear,
  add_bias,
  bias_gradient,
  keep_scale,
  linear,
)
from coat_jax.layers.mesh.collectives import gather_sequence, scatter_sequence
from coat_jax.layers.mesh.rule import block
from coat_jax.layers.mesh.specs import (
  cached,
  own_columns,
  split_columns,
  tokens,
)
from coat_jax.layers.module import RecipeModule, value_of
from coat_jax.layers.norm import LayerNorm, RMSNorm, norm, norm_gradients
from coat_jax.layers.residuals import save_residual
from coat_jax.layers.weight import quantized_weight, weight_gradient
from coat_jax.ops import Operand
from coat_jax.qtensor import QTensor
from coat_jax.recipe import CoatRecipe


class NormLinearResiduals(NamedTuple):
  """What `norm_linear_fwd` hands to its backward."""

  x: QTensor
  stats: ops.NormStats
  gamma: Array | None
  beta: Array | None
  y: Operand  # Columns, or the scale alone where they are recomputed.
  w: Array
  cache: Operand
  bias: Array | None


def norm_linear_fwd(x, gamma, beta, w, bias, cache, kind, eps, recipe):
  """norm(x) w + bias of whole sequences, and what is handed over."""
  x_q, stats, y, kept = norm_to_operand(x, gamma, beta, kind, eps, recipe)
  y = gather_sequence(y, recipe, batch=x.shape[0])
  w_q = quantized_weight(w, cache, "columns", recipe)
  out = ops.linear_fwd(
    y, w_q, dtype=x.dtype, implementation=recipe.implementation
  )
  cache = keep_scale(cache, w_q)
  residuals = NormLinearResiduals(x_q, stats, gamma, beta, kept, w, cache, bias)
  return add_bias(out, bias), residuals


def _norm_linear_bwd(kind, eps, recipe, residuals, g):
  del kind, eps
  g_q = ops.quantize_tensor(
    g, dtype=E5M2, layout="both", implementation=recipe.implementation
  )
  gradients = norm_linear_gradients(recipe, residuals, g_q, g.dtype)
  dbias = bias_gradient(g, residuals.bias, recipe, has_columns=True)
  return *gradients, dbias, None


def norm_linear_specs(axes, x, gamma, beta, w, bias, cache):
  del gamma, beta, bias
  columns = split_columns(axes, w.ndim)
  arrays = (
    tokens(axes, x),
    P(),
    P(),
    columns,
    P(axes.tensor),
    cached(cache, columns),
  )
  return arrays, own_columns(axes, x.ndim)


_norm_linear = block(norm_linear_fwd, _norm_linear_bwd, norm_linear_specs)


def norm_linear_gradients(recipe, residuals, g, dtype, add=None):
  """dx in `dtype`, dgamma, dbeta and dw, from the operand of the gradient.

  `add` is the gradient that goes around both, added to dx in f32.
  """
  r, how = residuals, recipe.implementation
  y = recompute_norm(r.x, r.gamma, r.beta, r.stats, r.y, recipe)
  dw = weight_gradient(y, g, r.w, recipe)
  w_q = quantized_weight(r.w, r.cache, "rows", recipe)
  dy = ops.linear_dgrad(g, w_q, dtype=dtype, implementation=how)
  dy = scatter_sequence(dy, recipe.axes)
  return *norm_gradients(r, dy, add, recipe), dw


def norm_to_operand(x, gamma, beta, kind, eps, recipe):
  """A norm in front of a product: x in FP8, its statistics, the operand.

  The last of the four is what the backward gets of the operand: its columns
  with residuals="coat", else its scale, to compute them again.
  """
  group_size, how = recipe.group_size, recipe.implementation
  x_q, stats, scale = ops.norm_input(
    x,
    gamma,
    beta,
    kind=kind,
    eps=eps,
    group_size=group_size,
    implementation=how,
  )
  x_q, stats = save_residual("norm", (x_q, stats))
  scale = save_residual("linear", scale)
  y = ops.norm_fwd(
    x_q,
    gamma,
    beta,
    stats,
    scale=scale,
    group_size=group_size,
    layout="both" if recipe.residuals == "coat" else "rows",
    implementation=how,
  )
  return x_q, stats, y, save_residual("linear", y._replace(rows=None))


def recompute_norm(x, gamma, beta, stats, y, recipe) -> Operand:
  """The columns of the operand, from memory or computed again."""
  if y.columns is None:
    y = ops.norm_fwd(
      x,
      gamma,
      beta,
      stats,
      scale=y.scale,
      group_size=recipe.group_size,
      layout="columns",
      implementation=recipe.implementation,
    )
  return gather_sequence(y, recipe, batch=x.qvalue.shape[0])


def norm_linear(
  x: Array,
  gamma: Array | None,
  beta: Array | None,
  w: Array,
  bias: Array | None = None,
  *,
  kind: ops.NormKind,
  eps: float,
  recipe: CoatRecipe,
  cache: Operand | None = None,
) -> Array:
  """norm(x) w + bias.

  Args:
    x: [..., D], BF16 (or f32).
    gamma, beta: [D] or None, of the norm.
    w: [D, F].
    bias: [F] or None.
    kind: "rms" or "layer".
    eps: the norm's.
    recipe: fused where both `linear` and `nonlinear` are "fp8".
    cache: of w, from `layers.weight`, or None.

  Returns:
    [..., F] in x's dtype.

  Raises:
    ValueError: x's last axis is not w's first.
  """
  if recipe.nonlinear == "fp8":
    return _norm_linear((x, gamma, beta, w, bias, cache), kind, eps, recipe)
  y = norm(x, gamma, beta, kind=kind, eps=eps, recipe=recipe)
  return linear(y, w, bias, recipe=recipe, cache=cache, split="columns")


def make_norm(
  kind: ops.NormKind, num_features: int, **kwargs
) -> RMSNorm | LayerNorm:
  """The norm module of this kind; `kwargs` are the module's."""
  return {"rms": RMSNorm, "layer": LayerNorm}[kind](num_features, **kwargs)


class NormLinear(RecipeModule):
  """A norm and the linear layer that reads it, as one block.

  Attributes:
    norm: RMSNorm or LayerNorm (its parameters).
    linear: Linear (its parameters).
  """

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    recipe: CoatRecipe | None = None,
    norm: ops.NormKind = "rms",
    epsilon: float = 1e-6,
    use_scale: bool = True,
    use_norm_bias: bool = False,
    use_bias: bool = True,
    dtype: DTypeLike = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    kernel_init: nnx.Initializer | None = None,
    rngs: nnx.Rngs,
  ):
    super().__init__(recipe or recipes.coat(), dtype)
    shared: dict[str, Any] = dict(
      recipe=self.recipe, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.norm = make_norm(
      norm,
      in_features,
      epsilon=epsilon,
      use_scale=use_scale,
      use_bias=use_norm_bias,
      **shared,
    )
    if kernel_init is not None:
      shared["kernel_init"] = kernel_init
    shared |= dict(use_bias=use_bias, split="columns")
    self.linear = Linear(in_features, out_features, **shared)

  def __call__(self, x: Array) -> Array:
    """[..., in_features] to [..., out_features], both in `dtype`."""
    return norm_linear(
      x.astype(self.dtype),
      value_of(self.norm.scale),
      value_of(self.norm.bias),
      self.linear.kernel[...],
      value_of(self.linear.bias),
      kind=self.norm.kind,
      eps=self.norm.epsilon,
      recipe=self.active_recipe,
      cache=self.linear.cache,
    )
