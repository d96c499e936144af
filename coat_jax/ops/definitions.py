# SPDX-License-Identifier: Apache-2.0
"""Every operation of a COAT layer in plain jnp, forward and backward.

This module is the definition: a kernel has the name and the signature of a
function here and gives its codes. Nothing is differentiated through; `layers`
pairs forwards and backwards up with `jax.custom_vjp`.

Conventions. What a matrix product reads is an `Operand`: FP8 with one scale per
tensor, in the layout that the product needs. What a norm or an activation
function reads is a `QTensor` with one BF16 scale per 1 x G group of the last
axis. All arithmetic between reading codes and writing codes is f32, with no
BF16 step on the way. `dy` and other plain gradients are BF16 or f32, `dx` comes
back in `dtype`.

Group Scaling. Whatever produces the values of an operand finds their largest
magnitude too (`norm_input`, `gate_up_input`), so that writing the operand is
one pass, in the forward and, with the scale it had, again in the backward.

Source: arXiv:2410.19313, section 5; the backward formulas are the derivatives.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.formats import E4M3
from coat_jax.ops.types import Layout, NormKind, NormStats, Operand
from coat_jax.qtensor import (
  QTensor,
  amax_to_scale,
  dequantize,
  quantize,
  quantize_with_scale,
  tensor_amax,
)

# --- Quantization ------------------------------------------------------------


def quantize_groups(
  x: Array, *, group_size: int, dtype: DTypeLike = E4M3
) -> QTensor:
  """[..., n] to FP8 with a BF16 scale, rounded up, per 1 x group_size group."""
  return quantize(
    x, group_size=group_size, dtype=dtype, scale_dtype=jnp.bfloat16
  )


def quantize_tensor(
  x: Array,
  *,
  dtype: DTypeLike = E4M3,
  scale: Array | None = None,
  layout: Layout = "rows",
) -> Operand:
  """[..., n] to an operand with one f32 scale; `scale` given: with that one."""
  if scale is None:
    scale = tensor_scale(x, dtype=dtype)
  codes = quantize_with_scale(x, scale, group_size=None, dtype=dtype).qvalue
  return lay_out(codes, scale, layout)


def tensor_scale(x: Array, *, dtype: DTypeLike = E4M3) -> Array:
  """The f32 scale of [...] as one tensor."""
  return amax_to_scale(tensor_amax(x), dtype)


def lay_out(rows: Array, scale: Array, layout: Layout) -> Operand:
  """An operand of codes [..., n] in this layout."""
  return Operand(
    rows=None if layout == "columns" else rows,
    columns=None if layout == "rows" else _rows(rows).T,
    scale=scale,
  )


def join_columns(parts: Array) -> Array:
  """[P, f, k] to [f, P k]: columns, of which each of P devices had k values."""
  return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], -1)


# --- Linear ------------------------------------------------------------------


def matmul(
  a: Array,
  b: Array,
  scale: Array,
  dtype: DTypeLike,
  add: Array | None = None,
) -> Array:
  """a [m, k] b [n, k]^T in FP8 times a scalar, plus `add`, in f32: [m, n]."""
  out = jax.lax.dot_general(
    a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
  )
  out = out * scale
  if add is not None:
    out = out + add.astype(jnp.float32)
  return out.astype(dtype)


def _rows(x: Array) -> Array:
  """[..., n] to [rows, n]."""
  return x.reshape(-1, x.shape[-1])


def linear_fwd(
  x: Operand,
  w: Operand,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  add: Array | None = None,
) -> Array:
  """y [..., F] = x w, E4M3 times E4M3: x.rows [..., D], w.columns [F, D].

  `add` [..., F], the residual stream, is added in f32, before y is rounded.
  """
  assert x.rows is not None and w.columns is not None
  if add is not None:
    add = _rows(add)
  y = matmul(_rows(x.rows), w.columns, x.scale * w.scale, dtype, add)
  return y.reshape(*x.rows.shape[:-1], w.columns.shape[0])


def linear_dgrad(
  g: Operand, w: Operand, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """dx [..., D] = g w^T, E5M2 times E4M3: g.rows [..., F], w.rows [D, F]."""
  assert g.rows is not None and w.rows is not None
  dx = matmul(_rows(g.rows), w.rows, g.scale * w.scale, dtype)
  return dx.reshape(*g.rows.shape[:-1], w.rows.shape[0])


def linear_wgrad(
  x: Operand, g: Operand, *, dtype: DTypeLike = jnp.float32
) -> Array:
  """dw [D, F] = x^T g, E4M3 times E5M2: x.columns [D, m], g.columns [F, m]."""
  assert x.columns is not None and g.columns is not None
  return matmul(x.columns, g.columns, x.scale * g.scale, dtype)


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
  mean, centred = None, x
  if kind == "layer":
    mean = jnp.mean(x, axis=-1)
    centred = x - mean[..., None]
  rstd = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1) + eps)
  stats = NormStats(mean, rstd)
  return _normalized(x, gamma, beta, stats), stats


def _normalized(x, gamma, beta, stats) -> Array:
  """(x - mean) rstd gamma + beta, f32 [..., D]."""
  if stats.mean is not None:
    x = x - stats.mean[..., None]
  y = x * stats.rstd[..., None]
  if gamma is not None:
    y = y * _row(gamma, y)
  if beta is not None:
    y = y + _row(beta, y)
  return y


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


def norm_input(
  x: Array,
  gamma: Array | None,
  beta: Array | None,
  *,
  kind: NormKind,
  eps: float,
  group_size: int,
) -> tuple[QTensor, NormStats, Array]:
  """What a norm reads and remembers: 1 x G values, and what follows from them.

  Args:
    x: [..., D], BF16 or f32.
    gamma, beta: [D] or None.
    kind, eps: the norm's.
    group_size: of the values.

  Returns:
    x in FP8, the statistics of its rows, and the scale of the norm's output.
  """
  x_q = quantize_groups(x, group_size=group_size)
  values = dequantize(x_q, group_size=group_size)
  y, stats = norm_values(values, gamma, beta, kind=kind, eps=eps)
  return x_q, stats, tensor_scale(y)


def norm_fwd(
  x: QTensor,
  gamma: Array | None,
  beta: Array | None,
  stats: NormStats,
  *,
  scale: Array,
  group_size: int,
  layout: Layout = "rows",
) -> Operand:
  """Norm of 1 x G values to the operand of the next product."""
  values = dequantize(x, group_size=group_size)
  y = _normalized(values, gamma, beta, stats)
  return quantize_tensor(y, scale=scale, layout=layout)


def norm_bwd(
  dy: Array,
  x: QTensor,
  gamma: Array | None,
  stats: NormStats,
  *,
  group_size: int,
  dtype: DTypeLike = jnp.bfloat16,
  add: Array | None = None,
) -> tuple[Array, Array, Array]:
  """dx in `dtype`, dgamma and dbeta in f32, at the values the forward read.

  `add` [..., D], the gradient that goes around the norm, is added to dx in f32.
  """
  values = dequantize(x, group_size=group_size)
  dx, dgamma, dbeta = norm_gradients(dy, values, gamma, stats)
  if add is not None:
    dx = dx + add.astype(jnp.float32)
  return dx.astype(dtype), dgamma, dbeta
