# SPDX-License-Identifier: Apache-2.0
"""Expected results of layers: f32 functions with straight-through quantization.

`pin(x, value)` returns `value`, and its gradient is the identity. Quantized
values come from the reference operations, so these functions and the layers
read the same codes. JAX computes the gradients of plain f32 functions at the
quantized values. As in the layers, gradients that enter a matmul are rounded to
E5M2, or to the format in `formats`. Nothing else is rounded in the backward
pass.
"""

import functools

import jax
import jax.numpy as jnp

from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.ops import AttentionKind, Groups, PerTensor
from coat_jax.ops.activation import gradient_bounds
from coat_jax.recipes import Formats
from tests.ops.naive_attention import naive_attention, seen

CAUSAL = AttentionKind()
FP8 = Formats()


@jax.custom_vjp
def pin(x, value):
  """Returns `value`; the gradient goes to x unchanged."""
  return value


pin.defvjp(lambda x, value: (value, None), lambda _, g: (g, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def rounded_gradient(x, dtype):
  """Returns x; rounds the gradient to a format, with one scale."""
  del dtype
  return x


def per_tensor(x, dtype=E4M3, scale=None):
  """Quantizes x with one scale, and dequantizes to f32."""
  q = ops.quantize_tensor(x, scaling=PerTensor(dtype), scale=scale)
  return q.rows.astype(jnp.float32) * q.scale


rounded_gradient.defvjp(
  lambda x, dtype: (x, None), lambda dtype, _, g: (per_tensor(g, dtype),)
)


def per_group(x, group_size=16, dtype=E4M3):
  """Quantizes x in groups, and dequantizes to f32."""
  q = ops.quantize_groups(x, groups=Groups(group_size, dtype))
  x = x.astype(jnp.float32)
  return pin(x, q.dequantize())


@jax.custom_vjp
def gradient_rounded_later(x):
  """Returns x, and 0; rounds the gradient to E5M2.

  `activation` reads the 0. Its backward pass returns the scale as the 0's
  gradient, which is how the scale gets here.
  """
  return x, jnp.float32(0)


gradient_rounded_later.defvjp(
  lambda x: ((x, jnp.float32(0)), None),
  lambda _, g: (per_tensor(g[0], E5M2, g[1]),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def activation(f, count, groups, x, zero, factor=None):
  """Computes f(x, factor); returns the scale of x's gradient as that of `zero`.

  The scale comes from `gradient_bounds` for `count` parts of x.
  """
  del count, groups, zero
  return f(x, factor)


def _activation_fwd(f, count, groups, x, zero, factor):
  del count, groups, zero
  y, vjp = jax.vjp(f, x, factor)
  return y, (vjp, x, factor)


def _activation_bwd(f, count, groups, saved, dy):
  del f
  vjp, x, factor = saved
  dx, dfactor = vjp(dy)
  parts = tuple(
    ops.quantize_groups(part, groups=groups)
    for part in jnp.split(x, count, axis=-1)
  )
  bounds = gradient_bounds(dy, parts, factor)
  return dx, PerTensor(E5M2).find_scale(bounds), dfactor


activation.defvjp(_activation_fwd, _activation_bwd)


def rounded(x, dtype):
  """Rounds x to `dtype`, and converts to f32."""
  return pin(x, x.astype(dtype).astype(jnp.float32))


def linear(x, w, bias=None, dtype=jnp.float32, formats=FP8, later=False):
  """Computes x @ w + bias with quantized operands and gradients; w: [D, ...].

  The result is rounded to `dtype`, unless there is a bias. With `later`, also
  returns the second result of `gradient_rounded_later`.
  """
  matrix = w.reshape(w.shape[0], -1)
  of = formats.values
  x_q = ops.quantize_tensor(x, scaling=PerTensor(of))
  w_q = ops.quantize_tensor(matrix, scaling=PerTensor(of), layout="columns")
  x = pin(x.astype(jnp.float32), per_tensor(x, of))
  matrix = pin(matrix.astype(jnp.float32), per_tensor(matrix, of))
  y = jnp.matmul(x, matrix, precision="highest")
  y, zero = gradient_rounded_later(y) if later else (y, None)
  y = y if later else rounded_gradient(y, formats.gradients)
  if bias is None:
    y = pin(y, ops.linear_fwd(x_q, w_q, dtype=dtype).astype(jnp.float32))
  else:
    y = pin(y, ops.linear_fwd(x_q, w_q, dtype=jnp.float32))
    y = y + _row(rounded(bias.reshape(-1), dtype), y)
  return (y, zero) if later else y


def norm(x, gamma, beta, kind, eps, group_size=16, dtype=E4M3):
  """Computes the formula of a norm at values quantized in groups."""
  x = per_group(x, group_size, dtype)
  mean = jnp.mean(x, -1, keepdims=True) if kind == "layer" else 0.0
  variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
  y = (x - mean) * (variance + eps) ** -0.5
  y = y if gamma is None else y * _row(gamma, y)
  y = y if beta is None else y + _row(beta, y)
  fixed = ops.norm_values(x, gamma, beta, kind=kind, eps=eps)[0]
  return pin(y, jax.lax.stop_gradient(fixed))


def _row(v, like):
  return v.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + v.shape)


ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
  "gelu": lambda x: jax.nn.gelu(x, approximate=False),
  "gelu_quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


def gated_mlp(
  x,
  weights,
  kind,
  eps,
  residuals,
  group_size=16,
  name="silu",
  post_norm=None,
  formats=FP8,
):
  """Computes x + post_norm((f(y @ gate) * (y @ up)) @ down), y = norm(x)."""
  front, back, _ = weights
  groups = dict(group_size=group_size, dtype=formats.values)
  y = x
  if kind is not None:
    y = norm(x, front.gamma, front.beta, kind, eps, **groups)
  # With residuals="coat", the scale comes from the gradient itself.
  is_exact = residuals == "coat" or formats.gradients != E5M2
  h = linear(y, front.w, front.bias, x.dtype, formats, later=not is_exact)
  h, zero = (h, None) if is_exact else h
  h = rounded(h, x.dtype)

  def activated(h, _):
    gate, up = jnp.split(h, 2, axis=-1)
    gate, up = per_group(gate, **groups), per_group(up, **groups)
    fixed = ops.activation_values(gate, activation=name)
    y = pin(ACTIVATIONS[name](gate), jax.lax.stop_gradient(fixed))
    if residuals == "coat":
      y = per_group(y, **groups)
    return y * up

  if is_exact:
    y = activated(h, None)
  else:
    y = activation(activated, 2, Groups(group_size, formats.values), h, zero)
  # Bias and x are added in f32, before the result is rounded.
  dtype = jnp.float32 if back.bias is None else x.dtype
  if post_norm is not None:
    out = linear(y, back.w, back.bias, x.dtype, formats)
    out = rounded(out, x.dtype)
    out = norm(out, back.gamma, back.beta, post_norm, eps, **groups)
    return x.astype(jnp.float32) + out
  out = linear(y, back.w, back.bias, dtype, formats)
  return x.astype(jnp.float32) + out


def attention(q, k, v, kind=CAUSAL, segments=None):
  """Computes softmax(scores) @ v."""
  out, _ = naive_attention(
    q,
    k,
    v,
    mask=seen(q.shape[1], k.shape[1], kind, segments),
    scale=kind.scale or q.shape[-1] ** -0.5,
    cap=kind.soft_cap,
  )
  return out


def attention_output(x, q, k, v, w, bias, kept, kind=CAUSAL, ids=None):
  """Returns x + attention(q, k, v) @ w + bias; kept="fp8" quantizes q, k, v."""
  keep = per_group if kept == "fp8" else _as_is
  out = attention(keep(q), keep(k), keep(v), kind, ids)
  return x + linear(out.reshape(*x.shape[:2], -1), w, bias)


def self_attention(x, weights, kind, segments, turn, heads, over, eps, recipe):
  """Computes x + attention(q, k, v) @ w_out in f32; q and k get RMSNorms.

  Args:
    x: [B, T, D].
    weights: `BlockWeights`, with the weights of both norms in `middle`.
    kind: `AttentionKind`.
    segments: ids of documents [B, T], or None.
    turn: function that applies RoPE to [B, T, N, H].
    heads: (N, K).
    over: whether a norm's mean is over a "head" or over "all" channels.
    eps: epsilon of both norms.
    recipe: coat, bf16 or fp8_linear.
  """
  (front, back, own), (n, kv_heads) = weights, heads
  is_coat, is_fp8 = recipe.nonlinear == "fp8", recipe.linear == "fp8"
  group = per_group if is_coat else _as_is
  keep = group if recipe.attention == "fp8" else _as_is
  product = linear if is_fp8 else _exact_linear
  if is_coat:
    y = norm(x, front.gamma, None, "rms", eps)
  else:
    y = _rms(x, -1, eps) * _row(front.gamma, x)
  h = product(y, front.w, front.bias)
  h = h.reshape(*h.shape[:2], kv_heads, n // kv_heads + 2, -1)
  q, k, v = h[..., :-2, :], h[..., -2, :], h[..., -1, :]
  q = q.reshape(*q.shape[:2], n, -1)

  def normed(x, weight):
    axes = -1 if over == "head" else (-2, -1)
    x = _rms(group(x), axes, eps)
    shape = (1, 1, 1, -1) if over == "head" else (1, 1, *x.shape[2:])
    return turn(x * weight.reshape(shape))

  q, k = normed(q, own.q), normed(k, own.k)
  out = attention(q, k, keep(v), kind, segments)
  return x + product(out.reshape(*x.shape[:2], -1), back.w, back.bias)


def _rms(x, axes, eps):
  return x / jnp.sqrt(jnp.mean(x * x, axis=axes, keepdims=True) + eps)


def _exact_linear(x, w, bias):
  y = jnp.matmul(x, w, precision="highest")
  return y if bias is None else y + _row(bias, y)


def _as_is(x):
  return x
