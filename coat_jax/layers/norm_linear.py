# SPDX-License-Identifier: Apache-2.0
"""Norm followed by a linear layer, FP8 from end to end in one custom_vjp.

The norm reads 1 x G FP8 values and writes the E4M3 operand of the product, with
no BF16 array between. Remembered: the norm's input in FP8; with
residuals="coat" its output too, which residuals="minimal" computes again.
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
from coat_jax.layers.linear import Linear, add_bias, linear, sum_rows
from coat_jax.layers.module import RecipeModule, value_of
from coat_jax.layers.norm import LayerNorm, RMSNorm, norm
from coat_jax.layers.residuals import cotangent, hand_over, remember
from coat_jax.qtensor import QTensor
from coat_jax.recipe import CoatRecipe


class _Residuals(NamedTuple):
  x: QTensor
  stats: ops.NormStats
  gamma: Array | None
  beta: Array | None
  y: QTensor | None  # None where it is recomputed.
  y_scale: Array
  w: Array
  w_scale: Array
  bias: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnames=("kind", "eps", "recipe"))
def _norm_linear(x, gamma, beta, w, bias, kind, eps, recipe):
  return _norm_linear_fwd(x, gamma, beta, w, bias, kind, eps, recipe)[0]


def _norm_linear_fwd(x, gamma, beta, w, bias, kind, eps, recipe):
  group_size = recipe.group_size
  keep_all = recipe.residuals == "coat"
  x_q = remember("norm", ops.quantize_groups(x, group_size=group_size))
  y_q, stats = ops.norm_fwd(
    x_q, gamma, beta, kind=kind, eps=eps, group_size=group_size
  )
  if keep_all:
    y_q = remember("linear", y_q)
  w_q = ops.quantize_tensor(w)
  out = add_bias(ops.linear_fwd(y_q, w_q, dtype=jnp.float32), bias)
  y_scale, w_scale = remember("linear", (y_q.scale, w_q.scale))
  residuals = _Residuals(
    x=x_q,
    stats=remember("norm", stats),
    gamma=gamma,
    beta=beta,
    y=y_q if keep_all else None,
    y_scale=y_scale,
    w=w,
    w_scale=w_scale,
    bias=bias,
  )
  return out.astype(x.dtype), hand_over(residuals)


def _norm_linear_bwd(kind, eps, recipe, residuals, g):
  r, group_size = residuals, recipe.group_size
  g_q = ops.quantize_tensor(g, dtype=E5M2)
  w_q = ops.quantize_tensor(r.w, scale=r.w_scale)
  y_q = r.y
  if y_q is None:
    y_q, _ = ops.norm_fwd(
      r.x,
      r.gamma,
      r.beta,
      kind=kind,
      eps=eps,
      group_size=group_size,
      scale=r.y_scale,
    )
  dw = ops.linear_wgrad(y_q, g_q, dtype=r.w.dtype)
  dy = ops.linear_dgrad(g_q, w_q, dtype=g.dtype)
  dx, dgamma, dbeta = ops.norm_bwd(
    dy, r.x, r.gamma, r.stats, group_size=group_size, dtype=g.dtype
  )
  return (
    dx,
    cotangent(dgamma, r.gamma),
    cotangent(dbeta, r.beta),
    dw,
    cotangent(sum_rows(g), r.bias),
  )


_norm_linear.defvjp(_norm_linear_fwd, _norm_linear_bwd)


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

  Returns:
    [..., F] in x's dtype.

  Raises:
    ValueError: x's last axis is not w's first.
  """
  if recipe.nonlinear == "fp8":
    return _norm_linear(x, gamma, beta, w, bias, kind, eps, recipe)
  y = norm(x, gamma, beta, kind=kind, eps=eps, recipe=recipe)
  return linear(y, w, bias, recipe=recipe)


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
    self.linear = Linear(in_features, out_features, use_bias=use_bias, **shared)

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
    )
