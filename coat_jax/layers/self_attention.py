# SPDX-License-Identifier: Apache-2.0
"""x + attention(heads(norm(x) w_qkv)) w_out, FP8 from end to end.

One custom_vjp holds the rules of `norm_linear` and of `attention_output` and
what lies between. So the gradients of q, k and v go from attention's backward
to the E5M2 operand of the products in front in one pass, and the gradient that
goes around the norm is added where the norm's is written.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, P

from coat_jax import ops
from coat_jax.formats import E5M2
from coat_jax.layers.attention_output import (
  attention_output,
  attention_output_bwd,
  attention_output_fwd,
)
from coat_jax.layers.linear import bias_gradient
from coat_jax.layers.mesh.rule import block
from coat_jax.layers.mesh.specs import (
  cached,
  split_columns,
  split_inputs,
  tokens,
)
from coat_jax.layers.norm_linear import (
  norm_linear,
  norm_linear_fwd,
  norm_linear_gradients,
)
from coat_jax.layers.residuals import save_residual
from coat_jax.layers.rope import Heads, split_heads
from coat_jax.ops import Operand
from coat_jax.ops.rope import rotation
from coat_jax.recipe import CoatRecipe


class AttentionWeights(NamedTuple):
  """Parameters of a self-attention block; None where it has none.

  Attributes:
    gamma, beta: [D], of the norm.
    qkv: [D, (N + 2 K) H], ordered by key head: see `layers.split_heads`.
    qkv_bias: [(N + 2 K) H].
    out: [N H, D].
    out_bias: [D].
    qkv_cache, out_cache: from `layers.weight`.
  """

  gamma: Array | None
  beta: Array | None
  qkv: Array
  qkv_bias: Array | None
  out: Array
  out_bias: Array | None
  qkv_cache: Operand | None = None
  out_cache: Operand | None = None


class _Static(NamedTuple):
  """Arguments that are no arrays."""

  kind: ops.NormKind
  eps: float
  heads: Heads
  causal: bool
  clip: float | None


def _self_attention_fwd(x, weights, positions, static, recipe):
  w, (n, k, _) = weights, static.heads.of_device(recipe.axes)
  qkv, front = norm_linear_fwd(
    x,
    w.gamma,
    w.beta,
    w.qkv,
    w.qkv_bias,
    w.qkv_cache,
    static.kind,
    static.eps,
    recipe,
  )
  qkv, inside = _clip_fwd(qkv, static.clip)
  positions = save_residual("rope", positions)
  heads = ops.split_heads(
    qkv,
    *_angles(positions, qkv.shape[-1] // (n + 2 * k), static),
    num_heads=n,
    num_kv_heads=k,
    implementation=recipe.implementation,
  )
  y, back = attention_output_fwd(
    x, *heads, w.out, w.out_bias, w.out_cache, static.causal, recipe
  )
  return y, (front, back, positions, inside)


def _self_attention_bwd(static, recipe, residuals, g):
  front, back, positions, inside = residuals
  how = recipe.implementation
  _, *dheads, dout, dout_bias, _ = attention_output_bwd(
    static.causal, recipe, back, g
  )
  angles = _angles(positions, dheads[0].shape[-1], static)
  dqkv_bias = None
  if inside is None and front.bias is None:
    dqkv_q = ops.join_heads_operand(*dheads, *angles, implementation=how)
  else:
    dqkv = ops.join_heads(*dheads, *angles, implementation=how)
    dqkv = _clip_bwd(static.clip, inside, dqkv)[0]
    dqkv_bias = bias_gradient(dqkv, front.bias, recipe, has_columns=True)
    dqkv_q = ops.quantize_tensor(
      dqkv, dtype=E5M2, layout="both", implementation=how
    )
  dx, dgamma, dbeta, dqkv_weight = norm_linear_gradients(
    recipe, front, dqkv_q, g.dtype, add=g
  )
  weights = AttentionWeights(
    dgamma, dbeta, dqkv_weight, dqkv_bias, dout, dout_bias
  )
  return dx, weights, None


def _specs(axes, x, weights, positions):
  del positions
  columns, rows = split_columns(axes, weights.qkv.ndim), split_inputs(axes)
  w: Any = dict(
    gamma=P(),
    beta=P(),
    qkv=columns,
    qkv_bias=P(axes.tensor),
    out=rows,
    out_bias=P(),
    qkv_cache=cached(weights.qkv_cache, columns),
    out_cache=cached(weights.out_cache, rows),
  )
  return (tokens(axes, x), AttentionWeights(**w), P()), tokens(axes, x)


_self_attention = block(_self_attention_fwd, _self_attention_bwd, _specs)


def _angles(positions, head_dim, static):
  return rotation(positions, head_dim=head_dim, theta=static.heads.theta)


@functools.partial(jax.custom_vjp, nondiff_argnames=("limit",))
def _clip(x, limit):
  return _clip_fwd(x, limit)[0]


def _clip_fwd(x, limit):
  if limit is None:
    return x, None
  # One bit a value; autodiff would keep two BF16 arrays, 6 U for q, k and v.
  inside = jnp.packbits(jnp.abs(x) <= limit, axis=-1)
  return jnp.clip(x, -limit, limit), save_residual("attention", inside)


def _clip_bwd(limit, inside, g):
  if limit is None:
    return (g,)
  passes = jnp.unpackbits(inside, axis=-1, count=g.shape[-1])
  return (jnp.where(passes == 1, g, 0),)


_clip.defvjp(_clip_fwd, _clip_bwd)


def self_attention(
  x: Array,
  weights: AttentionWeights,
  positions: Array,
  *,
  kind: ops.NormKind,
  eps: float,
  heads: Heads,
  causal: bool = True,
  clip: float | None = None,
  recipe: CoatRecipe,
) -> Array:
  """x + attention(rope(clip(norm(x) w_qkv))) w_out.

  Args:
    x: [B, T, D], the residual stream, BF16 (or f32).
    weights: see `AttentionWeights`.
    positions: int32 [T], for RoPE.
    kind: norm, "rms" or "layer".
    eps: the norm's.
    heads: N, K and the base of RoPE's frequencies, or None for no RoPE.
    causal: whether a query sees only keys up to its own place.
    clip: largest magnitude of q, k and v, or None.
    recipe: fused where both `linear` and `nonlinear` are "fp8".

  Returns:
    [B, T, D] in x's dtype.

  Raises:
    ValueError: shapes that do not fit one another.
  """
  if positions.shape != (x.shape[1],):
    raise ValueError(
      "self_attention: needs positions [T], one for each of x [B, T, D], got "
      f"x {x.shape} and positions {positions.shape}"
    )
  w = weights
  if recipe.nonlinear == "fp8":
    static = _Static(kind, eps, heads, causal, clip)
    return _self_attention((x, w, positions), static, recipe)
  qkv = norm_linear(
    x,
    w.gamma,
    w.beta,
    w.qkv,
    w.qkv_bias,
    kind=kind,
    eps=eps,
    recipe=recipe,
    cache=w.qkv_cache,
  )
  q, k, v = split_heads(_clip(qkv, clip), positions, heads, recipe=recipe)
  return attention_output(
    x,
    q,
    k,
    v,
    w.out,
    w.out_bias,
    causal=causal,
    recipe=recipe,
    cache=w.out_cache,
  )
