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

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax import recipe as recipes
from coat_jax.formats import E5M2
from coat_jax.layers.activation import silu_mul
from coat_jax.layers.linear import (
  Linear,
  add_bias,
  as_matrix,
  as_row,
  default_kernel_init,
  linear,
  sum_rows,
)
from coat_jax.layers.module import RecipeModule, value_of
from coat_jax.layers.norm import norm
from coat_jax.layers.norm_linear import make_norm
from coat_jax.layers.residuals import cotangent, hand_over, remember
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
  """

  gamma: Array | None
  beta: Array | None
  gate_up: Array
  gate_up_bias: Array | None
  down: Array
  down_bias: Array | None


class _Residuals(NamedTuple):
  x: QTensor
  stats: ops.NormStats
  gate: QTensor
  up: QTensor
  # None where they are recomputed.
  y: QTensor | None
  silu: QTensor | None
  product: QTensor | None
  # Per-tensor scales, to quantize again as the forward did.
  y_scale: Array
  product_scale: Array
  gate_up_scale: Array
  down_scale: Array
  weights: MLPWeights


@functools.partial(jax.custom_vjp, nondiff_argnames=("kind", "eps", "recipe"))
def _gated_mlp(x, weights, kind, eps, recipe):
  return _gated_mlp_fwd(x, weights, kind, eps, recipe)[0]


def _gated_mlp_fwd(x, weights, kind, eps, recipe):
  w, group_size = weights, recipe.group_size
  keep_all = recipe.residuals == "coat"
  x_q = remember("norm", ops.quantize_groups(x, group_size=group_size))
  y_q, stats = ops.norm_fwd(
    x_q, w.gamma, w.beta, kind=kind, eps=eps, group_size=group_size
  )
  if keep_all:
    y_q = remember("linear", y_q)
  gate_up_q = ops.quantize_tensor(as_matrix(w.gate_up))
  gate_up = ops.linear_fwd(y_q, gate_up_q, dtype=jnp.float32)
  gate_up = add_bias(gate_up, as_row(w.gate_up_bias)).astype(x.dtype)
  gate, up = _split(gate_up)
  gate_q = ops.quantize_groups(gate, group_size=group_size)
  up_q = ops.quantize_groups(up, group_size=group_size)
  gate_q, up_q = remember("activation", (gate_q, up_q))
  silu_q = None
  if keep_all:
    silu_q = ops.silu_fwd(gate_q, group_size=group_size)
    silu_q = remember("activation", silu_q)
    product_q = ops.mul_fwd(silu_q, up_q, group_size=group_size)
    product_q = remember("linear", product_q)
  else:
    product_q = ops.silu_mul_fwd(gate_q, up_q, group_size=group_size)
  down_q = ops.quantize_tensor(w.down)
  out = ops.linear_fwd(product_q, down_q, dtype=jnp.float32)
  out = x.astype(jnp.float32) + add_bias(out, w.down_bias)
  scales = (y_q.scale, product_q.scale, gate_up_q.scale, down_q.scale)
  y_scale, product_scale, gate_up_scale, down_scale = remember("linear", scales)
  residuals = _Residuals(
    x=x_q,
    stats=remember("norm", stats),
    gate=gate_q,
    up=up_q,
    y=y_q if keep_all else None,
    silu=silu_q,
    product=product_q if keep_all else None,
    y_scale=y_scale,
    product_scale=product_scale,
    gate_up_scale=gate_up_scale,
    down_scale=down_scale,
    weights=w,
  )
  return out.astype(x.dtype), hand_over(residuals)


def _gated_mlp_bwd(kind, eps, recipe, residuals, g):
  r, w, group_size = residuals, residuals.weights, recipe.group_size
  # Down projection.
  g_q = ops.quantize_tensor(g, dtype=E5M2)
  down_q = ops.quantize_tensor(w.down, scale=r.down_scale)
  dproduct = ops.linear_dgrad(g_q, down_q, dtype=g.dtype)
  if r.product is None:
    product_q = ops.silu_mul_fwd(
      r.gate, r.up, group_size=group_size, scale=r.product_scale
    )
    dgate, dup = ops.silu_mul_bwd(dproduct, r.gate, r.up, group_size=group_size)
  else:
    product_q = r.product
    dsilu, dup = ops.mul_bwd(dproduct, r.silu, r.up, group_size=group_size)
    dgate = ops.silu_bwd(dsilu, r.gate, group_size=group_size)
  ddown = ops.linear_wgrad(product_q, g_q, dtype=w.down.dtype)
  # Gate and up projection: one gradient, one scale.
  dgate_up = jnp.concatenate([dgate, dup], axis=-1)
  dgate_up_q = ops.quantize_tensor(dgate_up, dtype=E5M2)
  y_q = r.y
  if y_q is None:
    y_q, _ = ops.norm_fwd(
      r.x,
      w.gamma,
      w.beta,
      kind=kind,
      eps=eps,
      group_size=group_size,
      scale=r.y_scale,
    )
  dw_gate_up = ops.linear_wgrad(y_q, dgate_up_q, dtype=w.gate_up.dtype)
  gate_up_q = ops.quantize_tensor(as_matrix(w.gate_up), scale=r.gate_up_scale)
  dy = ops.linear_dgrad(dgate_up_q, gate_up_q, dtype=g.dtype)
  # Norm, and the residual's own gradient.
  dx, dgamma, dbeta = ops.norm_bwd(
    dy, r.x, w.gamma, r.stats, group_size=group_size, dtype=jnp.float32
  )
  dx = (g.astype(jnp.float32) + dx).astype(g.dtype)
  return dx, MLPWeights(
    gamma=cotangent(dgamma, w.gamma),
    beta=cotangent(dbeta, w.beta),
    gate_up=cotangent(dw_gate_up, w.gate_up),
    gate_up_bias=cotangent(sum_rows(dgate_up), w.gate_up_bias),
    down=ddown,
    down_bias=cotangent(sum_rows(g), w.down_bias),
  )


_gated_mlp.defvjp(_gated_mlp_fwd, _gated_mlp_bwd)


def _split(gate_up: Array) -> tuple[Array, Array]:
  """[..., 2 F] to gate and up, [..., F] each."""
  gate, up = jnp.split(gate_up, 2, axis=-1)
  return gate, up


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
  if w.gate_up.ndim != 3 or w.gate_up.shape[1:] != (2, w.down.shape[0]):
    raise ValueError(
      "gated_mlp: gate_up must be [D, 2, F] and down [F, D], got "
      f"{w.gate_up.shape} and {w.down.shape}"
    )
  if recipe.nonlinear == "fp8":
    return _gated_mlp(x, w, kind, eps, recipe)
  y = norm(x, w.gamma, w.beta, kind=kind, eps=eps, recipe=recipe)
  gate_up = linear(y, w.gate_up, w.gate_up_bias, recipe=recipe)
  gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
  product = silu_mul(gate, up, recipe=recipe)
  return x + linear(product, w.down, w.down_bias, recipe=recipe)


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
      **shared,
    )
    self.down = Linear(
      hidden_features,
      features,
      use_bias=use_bias,
      kernel_init=out_init or kernel_init,
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
    )
    return gated_mlp(
      x.astype(self.dtype),
      weights,
      kind=self.norm.kind,
      eps=self.norm.epsilon,
      recipe=self.active_recipe,
    )
