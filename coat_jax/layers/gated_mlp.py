# SPDX-License-Identifier: Apache-2.0
"""x + down(silu(gate(norm(x))) * up(norm(x))), FP8 from end to end.

One custom_vjp holds the norm, both products and the residual add, so that FP8
flows between them and only BF16 crosses its borders. Gate and up are one matrix
product with one weight [D, 2, F] (a shard of the last axis holds both of its
columns), and their gradients share one E5M2 scale.

Remembered with residuals="minimal": the norm's input, gate and up, 1 x G FP8.
With "coat" also the norm's output, SiLU's output and the product, as the
reference does; then the product reads SiLU's output from FP8.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array, P
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax import recipe as recipes
from coat_jax.formats import E5M2
from coat_jax.layers.activation import silu_mul
from coat_jax.layers.linear import (
  Linear,
  add_bias,
  add_linear,
  as_row,
  bias_gradient,
  default_kernel_init,
  keep_scale,
  linear,
)
from coat_jax.layers.mesh.collectives import gather_sequence, scatter_sequence
from coat_jax.layers.mesh.rule import block
from coat_jax.layers.mesh.specs import (
  cached,
  split_columns,
  split_inputs,
  tokens,
)
from coat_jax.layers.module import RecipeModule, value_of
from coat_jax.layers.norm import NormResiduals, norm, norm_gradients
from coat_jax.layers.norm_linear import (
  make_norm,
  norm_to_operand,
  recompute_norm,
)
from coat_jax.layers.residuals import save_residual
from coat_jax.layers.weight import as_matrix, quantized_weight, weight_gradient
from coat_jax.ops import Operand
from coat_jax.qtensor import QTensor
from coat_jax.recipe import CoatRecipe


class MLPWeights(NamedTuple):
  """Parameters of a gated MLP; None where it has none.

  Attributes:
    gamma, beta: [D], of the norm.
    gate_up: [D, 2, F], gate first.
    gate_up_bias: [2, F].
    down: [F, D].
    down_bias: [D].
    gate_up_cache, down_cache: from `layers.weight`.
  """

  gamma: Array | None
  beta: Array | None
  gate_up: Array
  gate_up_bias: Array | None
  down: Array
  down_bias: Array | None
  gate_up_cache: Operand | None = None
  down_cache: Operand | None = None


class _Residuals(NamedTuple):
  x: QTensor
  stats: ops.NormStats
  gate: QTensor
  up: QTensor
  silu: QTensor | None  # None where it is recomputed.
  # Columns of y and rows of the product; the scale alone where recomputed.
  y: Operand
  product: Operand
  weights: MLPWeights


def _gated_mlp_fwd(x, weights, kind, eps, recipe):
  w, how = weights, recipe.implementation
  x_q, stats, y, kept_y = norm_to_operand(x, w.gamma, w.beta, kind, eps, recipe)
  y = gather_sequence(y, recipe, batch=x.shape[0])
  gate_up_q = quantized_weight(
    as_matrix(w.gate_up), w.gate_up_cache, "columns", recipe
  )
  gate_up = ops.linear_fwd(y, gate_up_q, dtype=x.dtype, implementation=how)
  gate_up = add_bias(gate_up, as_row(w.gate_up_bias))
  gate, up, silu, product = _swiglu(gate_up, recipe)
  down_q = quantized_weight(
    w.down, w.down_cache, "columns", recipe, after=y.scale
  )
  out = add_linear(x, product, down_q, w.down_bias, recipe)
  if silu is None:
    product = product._replace(rows=None)
  residuals = _Residuals(
    x=x_q,
    stats=stats,
    gate=gate,
    up=up,
    silu=silu,
    y=kept_y,
    product=save_residual("linear", product),
    weights=w._replace(
      gate_up_cache=keep_scale(w.gate_up_cache, gate_up_q),
      down_cache=keep_scale(w.down_cache, down_q),
    ),
  )
  return out, residuals


def _swiglu(gate_up, recipe):
  """gate, up, silu(gate) where it is remembered, and the product's operand."""
  sizes = dict(
    group_size=recipe.group_size, implementation=recipe.implementation
  )
  gate, up, scale = ops.gate_up_input(gate_up, **sizes)
  gate, up = save_residual("activation", (gate, up))
  if recipe.residuals == "coat":
    silu = save_residual("activation", ops.silu_fwd(gate, **sizes))
    return gate, up, silu, ops.mul_fwd(silu, up, **sizes)
  scale = save_residual("linear", scale)
  return gate, up, None, ops.silu_mul_fwd(gate, up, scale=scale, **sizes)


def _gated_mlp_bwd(kind, eps, recipe, residuals, g):
  r, w, how = residuals, residuals.weights, recipe.implementation
  # Down projection.
  g_q = ops.quantize_tensor(g, dtype=E5M2, layout="both", implementation=how)
  g_q = gather_sequence(g_q, recipe, batch=g.shape[0])
  down_q = quantized_weight(w.down, w.down_cache, "rows", recipe)
  dproduct = ops.linear_dgrad(g_q, down_q, dtype=g.dtype, implementation=how)
  dgate_up, product = _swiglu_bwd(dproduct, r, recipe)
  ddown = weight_gradient(product, g_q, w.down, recipe)
  # Gate and up projection: one gradient, one scale.
  y = recompute_norm(r.x, w.gamma, w.beta, r.stats, r.y, recipe)
  dw_gate_up = weight_gradient(y, dgate_up, w.gate_up, recipe)
  gate_up_q = quantized_weight(
    as_matrix(w.gate_up), w.gate_up_cache, "rows", recipe
  )
  dy = ops.linear_dgrad(dgate_up, gate_up_q, dtype=g.dtype, implementation=how)
  # Norm, and the residual's own gradient.
  dy = scatter_sequence(dy, recipe.axes)
  dx, dgamma, dbeta = norm_gradients(
    NormResiduals(r.x, r.stats, w.gamma, w.beta), dy, g, recipe
  )
  dgate_up_bias = None
  if w.gate_up_bias is not None:
    gradient = _swiglu_gradient(dproduct, r, recipe)
    dgate_up_bias = bias_gradient(
      gradient, w.gate_up_bias, recipe, has_columns=True
    )
  return dx, MLPWeights(
    gamma=dgamma,
    beta=dbeta,
    gate_up=dw_gate_up,
    gate_up_bias=dgate_up_bias,
    down=ddown,
    down_bias=bias_gradient(g, w.down_bias, recipe, has_columns=False),
  )


def _specs(axes, x, weights):
  columns, rows = split_columns(axes, weights.gate_up.ndim), split_inputs(axes)
  w: Any = dict(
    gamma=P(),
    beta=P(),
    gate_up=columns,
    gate_up_bias=P(None, axes.tensor),
    down=rows,
    down_bias=P(),
    gate_up_cache=cached(weights.gate_up_cache, columns),
    down_cache=cached(weights.down_cache, rows),
  )
  return (tokens(axes, x), MLPWeights(**w)), tokens(axes, x)


_gated_mlp = block(_gated_mlp_fwd, _gated_mlp_bwd, _specs)


def _swiglu_bwd(dproduct, r, recipe):
  """Operands of the gradient of [gate, up] and, its columns, of the product."""
  how = recipe.implementation
  if r.silu is None:
    return ops.silu_mul_bwd_operands(
      dproduct,
      r.gate,
      r.up,
      product_scale=r.product.scale,
      group_size=recipe.group_size,
      implementation=how,
    )
  dgate_up = ops.quantize_tensor(
    _swiglu_gradient(dproduct, r, recipe),
    dtype=E5M2,
    layout="both",
    implementation=how,
  )
  # Columns cannot be remembered: XLA stacks those of all layers as rows, and
  # transposes them at once before the backward; its peak has both stacks.
  rows = r.product.rows
  columns = rows.reshape(-1, rows.shape[-1]).T
  return dgate_up, Operand(None, columns, r.product.scale)


def _swiglu_gradient(dproduct, r, recipe):
  """Gradient of [gate, up], f32 [..., 2 F]."""
  sizes = dict(group_size=recipe.group_size)
  if r.silu is None:
    gradients = ops.silu_mul_bwd(dproduct, r.gate, r.up, **sizes)
  else:
    dsilu, dup = ops.mul_bwd(dproduct, r.silu, r.up, **sizes)
    gradients = ops.silu_bwd(dsilu, r.gate, **sizes), dup
  return jnp.concatenate(gradients, axis=-1)


def gated_mlp(
  x: Array,
  weights: MLPWeights,
  *,
  kind: ops.NormKind,
  eps: float,
  recipe: CoatRecipe,
) -> Array:
  """x + (silu(norm(x) w_gate) * (norm(x) w_up)) w_down.

  Args:
    x: [..., D], the residual stream, BF16 (or f32).
    weights: see `MLPWeights`.
    kind: norm, "rms" or "layer".
    eps: the norm's.
    recipe: fused where both `linear` and `nonlinear` are "fp8".

  Returns:
    [..., D] in x's dtype.

  Raises:
    ValueError: shapes that do not fit one another.
  """
  w = weights
  fits = w.gate_up.ndim == 3 and w.gate_up.shape[1] == 2
  # On a mesh a caller's own shard_map has other shares of either.
  if not fits or w.gate_up.shape[2] != w.down.shape[0] and not recipe.axes:
    raise ValueError(
      "gated_mlp: gate_up must be [D, 2, F] and down [F, D], got "
      f"{w.gate_up.shape} and {w.down.shape}"
    )
  if recipe.nonlinear == "fp8":
    return _gated_mlp((x, w), kind, eps, recipe)
  y = norm(x, w.gamma, w.beta, kind=kind, eps=eps, recipe=recipe)
  gate_up = linear(
    y,
    w.gate_up,
    w.gate_up_bias,
    recipe=recipe,
    cache=w.gate_up_cache,
    split="columns",
  )
  gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
  product = silu_mul(gate, up, recipe=recipe)
  return x + linear(
    product,
    w.down,
    w.down_bias,
    recipe=recipe,
    cache=w.down_cache,
    split="inputs",
  )


class GatedMLP(RecipeModule):
  """The MLP half of a decoder layer: norm, SwiGLU and residual add.

  Attributes:
    norm: RMSNorm or LayerNorm.
    gate_up: Linear with kernel [features, 2, hidden_features].
    down: Linear with kernel [hidden_features, features].
  """

  def __init__(
    self,
    features: int,
    hidden_features: int,
    *,
    recipe: CoatRecipe | None = None,
    norm: ops.NormKind = "rms",
    epsilon: float = 1e-6,
    use_scale: bool = True,
    use_norm_bias: bool = False,
    use_bias: bool = False,
    dtype: DTypeLike = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    kernel_init: nnx.Initializer = default_kernel_init,
    out_init: nnx.Initializer | None = None,
    rngs: nnx.Rngs,
  ):
    super().__init__(recipe or recipes.coat(), dtype)
    shared: dict[str, Any] = dict(
      recipe=self.recipe, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.norm = make_norm(
      norm,
      features,
      epsilon=epsilon,
      use_scale=use_scale,
      use_bias=use_norm_bias,
      **shared,
    )
    self.gate_up = Linear(
      features,
      (2, hidden_features),
      use_bias=use_bias,
      kernel_init=kernel_init,
      split="columns",
      **shared,
    )
    self.down = Linear(
      hidden_features,
      features,
      use_bias=use_bias,
      kernel_init=out_init or kernel_init,
      split="inputs",
      **shared,
    )

  def __call__(self, x: Array) -> Array:
    """[..., features] to the same shape, in `dtype`."""
    weights = MLPWeights(
      gamma=value_of(self.norm.scale),
      beta=value_of(self.norm.bias),
      gate_up=self.gate_up.kernel[...],
      gate_up_bias=value_of(self.gate_up.bias),
      down=self.down.kernel[...],
      down_bias=value_of(self.down.bias),
      gate_up_cache=self.gate_up.cache,
      down_cache=self.down.cache,
    )
    return gated_mlp(
      x.astype(self.dtype),
      weights,
      kind=self.norm.kind,
      eps=self.norm.epsilon,
      recipe=self.active_recipe,
    )
