# SPDX-License-Identifier: Apache-2.0
"""Every operation of a COAT layer in plain jnp, forward and backward.

This module is the definition: a kernel has the name and the signature of a
function here and gives its codes. Nothing is differentiated through; `layers`
pairs forwards and backwards up with `jax.custom_vjp`.

Conventions. FP8 inputs and outputs are `QTensor`s: with one scale per tensor
where a matrix product reads them, with one BF16 scale per 1 x G group of the
last axis where a norm or an activation function does. All arithmetic between
reading codes and writing codes is f32, with no BF16 step on the way. `dy` and
other plain gradients are BF16 or f32, `dx` comes back in `dtype`. Forwards that
write a per-tensor operand take `scale` to write it again in the backward with
the scale it had, which saves the pass that finds amax.

Source: arXiv:2410.19313, section 5; the backward formulas are the derivatives.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.formats import E4M3, E5M2
from coat_jax.qtensor import (
  QTensor,
  amax_to_scale,
  dequantize,
  quantize,
  quantize_with_scale,
  tensor_amax,
)

NormKind = Literal["rms", "layer"]


class NormStats(NamedTuple):
  """What a norm's backward needs beside its input: f32 [...], one per row."""

  mean: Array | None
  rstd: Array


# --- Quantization ------------------------------------------------------------


def quantize_groups(
  x: Array, *, group_size: int, dtype: DTypeLike = E4M3
) -> QTensor:
  """[..., n] to FP8 with a BF16 scale, rounded up, per 1 x group_size group."""
  return quantize(
    x, group_size=group_size, dtype=dtype, scale_dtype=jnp.bfloat16
  )


def quantize_tensor(
  x: Array, *, dtype: DTypeLike = E4M3, scale: Array | None = None
) -> QTensor:
  """[...] to FP8 with one f32 scale; `scale` given: with that one."""
  if scale is None:
    scale = amax_to_scale(tensor_amax(x), dtype)
  return quantize_with_scale(x, scale, group_size=None, dtype=dtype)


# --- Linear ------------------------------------------------------------------


def _matmul(a, b, contract, scale, dtype):
  """FP8 product in f32 with the scalar scales applied to the result."""
  out = jax.lax.dot_general(
    a, b, (contract, ((), ())), preferred_element_type=jnp.float32
  )
  return (out * scale).astype(dtype)


def _rows(x: Array) -> Array:
  """[..., n] to [rows, n]."""
  return x.reshape(-1, x.shape[-1])


def linear_fwd(
  x: QTensor, w: QTensor, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """y [..., F] = x [..., D] w [D, F], E4M3 times E4M3, one scale each."""
  y = _matmul(_rows(x.qvalue), w.qvalue, ((1,), (0,)), x.scale * w.scale, dtype)
  return y.reshape(*x.qvalue.shape[:-1], w.qvalue.shape[-1])


def linear_dgrad(
  g: QTensor, w: QTensor, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """dx [..., D] = g [..., F] w^T, E5M2 times E4M3."""
  dx = _matmul(
    _rows(g.qvalue), w.qvalue, ((1,), (1,)), g.scale * w.scale, dtype
  )
  return dx.reshape(*g.qvalue.shape[:-1], w.qvalue.shape[0])


def linear_wgrad(
  x: QTensor, g: QTensor, *, dtype: DTypeLike = jnp.float32
) -> Array:
  """dw [D, F] = x^T g over all rows, E4M3 times E5M2."""
  return _matmul(
    _rows(x.qvalue),
    _rows(g.qvalue),
    ((0,), (0,)),
    x.scale * g.scale,
    dtype,
  )


# --- Norms -------------------------------------------------------------------


def norm_values(
  x: Array,
  gamma: Array | None,
  beta: Array | None,
  *,
  kind: NormKind,
  eps: float,
) -> tuple[Array, NormStats]:
  """y = (x - mean) rstd gamma + beta in f32; "rms" has no mean.

  Args:
    x: [..., D].
    gamma, beta: [D] or None.
    kind: "rms", rstd = (mean(x^2) + eps)^-1/2, or "layer", with the variance.
    eps: added under the root.

  Returns:
    y f32 [..., D] and the statistics.
  """
  x = x.astype(jnp.float32)
  mean = None
  if kind == "layer":
    mean = jnp.mean(x, axis=-1)
    x = x - mean[..., None]
  rstd = jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)
  y = x * rstd[..., None]
  if gamma is not None:
    y = y * _row(gamma, y)
  if beta is not None:
    y = y + _row(beta, y)
  return y, NormStats(mean, rstd)


def norm_gradients(
  dy: Array, x: Array, gamma: Array | None, stats: NormStats
) -> tuple[Array, Array, Array]:
  """dx [..., D], dgamma [D], dbeta [D] in f32; sums over rows in f32.

  With xhat the normalized x and g = gamma dy:
  dx = (g - xhat mean(xhat g) - mean(g)) rstd, the last mean for "layer" only.
  """
  dy = dy.astype(jnp.float32)
  x = x.astype(jnp.float32)
  if stats.mean is not None:
    x = x - stats.mean[..., None]
  xhat = x * stats.rstd[..., None]
  g = dy if gamma is None else dy * _row(gamma, dy)
  dx = g - xhat * jnp.mean(xhat * g, axis=-1, keepdims=True)
  if stats.mean is not None:
    dx = dx - jnp.mean(g, axis=-1, keepdims=True)
  rows = tuple(range(dy.ndim - 1))
  dgamma, dbeta = jnp.sum(dy * xhat, axis=rows), jnp.sum(dy, axis=rows)
  return dx * stats.rstd[..., None], dgamma, dbeta


def _row(v: Array, like: Array) -> Array:
  """A [D] vector as f32 of the rank of [..., D]."""
  return v.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + v.shape)


def norm_fwd(
  x: QTensor,
  gamma: Array | None,
  beta: Array | None,
  *,
  kind: NormKind,
  eps: float,
  group_size: int,
  scale: Array | None = None,
) -> tuple[QTensor, NormStats]:
  """Norm of 1 x G values to the per-tensor operand of the next product."""
  values = dequantize(x, group_size=group_size)
  y, stats = norm_values(values, gamma, beta, kind=kind, eps=eps)
  return quantize_tensor(y, scale=scale), stats


def norm_bwd(
  dy: Array,
  x: QTensor,
  gamma: Array | None,
  stats: NormStats,
  *,
  group_size: int,
  dtype: DTypeLike = jnp.bfloat16,
) -> tuple[Array, Array, Array]:
  """dx in `dtype`, dgamma and dbeta in f32, at the values the forward read."""
  values = dequantize(x, group_size=group_size)
  dx, dgamma, dbeta = norm_gradients(dy, values, gamma, stats)
  return dx.astype(dtype), dgamma, dbeta


# --- Activation functions ----------------------------------------------------


def silu_values(x: Array) -> Array:
  """x sigmoid(x) in f32."""
  x = x.astype(jnp.float32)
  return x * jax.nn.sigmoid(x)


def silu_derivative(x: Array) -> Array:
  """sigmoid(x) (1 + x (1 - sigmoid(x))) in f32."""
  x = x.astype(jnp.float32)
  sigmoid = jax.nn.sigmoid(x)
  return sigmoid * (1 + x * (1 - sigmoid))


_SQRT_HALF = 0.7071067811865476
_INV_SQRT_2PI = 0.3989422804014327
_SQRT_2_OVER_PI = 0.7978845608028654
_CUBIC = 0.044715


def gelu_values(x: Array, *, approximate: bool) -> Array:
  """x Phi(x) in f32, Phi by erf or by the tanh approximation."""
  x = x.astype(jnp.float32)
  if approximate:
    inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)
    return 0.5 * x * (1 + jnp.tanh(inner))
  return 0.5 * x * (1 + jax.lax.erf(x * _SQRT_HALF))


def gelu_derivative(x: Array, *, approximate: bool) -> Array:
  """d gelu / dx in f32."""
  x = x.astype(jnp.float32)
  if approximate:
    # Beyond 10 tanh is 1 in f32, and 0 times an overflowing slope would be NaN.
    x = jnp.clip(x, -10, 10)
    inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)
    slope = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
    tanh = jnp.tanh(inner)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope
  density = _INV_SQRT_2PI * jnp.exp(-0.5 * x * x)
  return 0.5 * (1 + jax.lax.erf(x * _SQRT_HALF)) + x * density


def silu_fwd(x: QTensor, *, group_size: int) -> QTensor:
  """SiLU from 1 x G values to 1 x G values."""
  y = silu_values(dequantize(x, group_size=group_size))
  return quantize_groups(y, group_size=group_size)


def silu_bwd(dy: Array, x: QTensor, *, group_size: int) -> Array:
  """Gradient of SiLU, f32."""
  slope = silu_derivative(dequantize(x, group_size=group_size))
  return dy.astype(jnp.float32) * slope


def mul_fwd(
  a: QTensor, b: QTensor, *, group_size: int, scale: Array | None = None
) -> QTensor:
  """Product of 1 x G values to a per-tensor operand."""
  product = dequantize(a, group_size=group_size) * dequantize(
    b, group_size=group_size
  )
  return quantize_tensor(product, scale=scale)


def mul_bwd(
  dy: Array, a: QTensor, b: QTensor, *, group_size: int
) -> tuple[Array, Array]:
  """Gradients (dy b, dy a), f32."""
  dy = dy.astype(jnp.float32)
  da = dy * dequantize(b, group_size=group_size)
  return da, dy * dequantize(a, group_size=group_size)


def silu_mul_fwd(
  gate: QTensor, up: QTensor, *, group_size: int, scale: Array | None = None
) -> QTensor:
  """silu(gate) up from 1 x G values to a per-tensor operand, in one pass."""
  gate_values = dequantize(gate, group_size=group_size)
  up_values = dequantize(up, group_size=group_size)
  return quantize_tensor(silu_values(gate_values) * up_values, scale=scale)


def silu_mul_bwd(
  dy: Array, gate: QTensor, up: QTensor, *, group_size: int
) -> tuple[Array, Array]:
  """Gradients (dgate, dup), f32, SiLU recomputed from the gate."""
  dy = dy.astype(jnp.float32)
  gate_values = dequantize(gate, group_size=group_size)
  up_values = dequantize(up, group_size=group_size)
  dgate = dy * up_values * silu_derivative(gate_values)
  return dgate, dy * silu_values(gate_values)


def gelu_fwd(
  x: QTensor, *, approximate: bool, group_size: int, scale: Array | None = None
) -> QTensor:
  """GELU from 1 x G values to a per-tensor operand."""
  values = dequantize(x, group_size=group_size)
  y = gelu_values(values, approximate=approximate)
  return quantize_tensor(y, scale=scale)


def gelu_bwd(
  dy: Array, x: QTensor, *, approximate: bool, group_size: int
) -> Array:
  """Gradient of GELU, f32."""
  values = dequantize(x, group_size=group_size)
  slope = gelu_derivative(values, approximate=approximate)
  return dy.astype(jnp.float32) * slope


# --- Residual add ------------------------------------------------------------


def residual_add_fwd(
  x: Array, y: Array, *, group_size: int
) -> tuple[Array, QTensor]:
  """x + y in x's dtype, and its 1 x G copy, quantized from the f32 sum."""
  total = x.astype(jnp.float32) + y.astype(jnp.float32)
  return total.astype(x.dtype), quantize_groups(total, group_size=group_size)


def residual_add_bwd(g: Array, dx: Array) -> tuple[Array, QTensor]:
  """g + dx in g's dtype, and its per-tensor E5M2 copy for the product above."""
  total = g.astype(jnp.float32) + dx.astype(jnp.float32)
  return total.astype(g.dtype), quantize_tensor(total, dtype=E5M2)
