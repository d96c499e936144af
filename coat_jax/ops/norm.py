# SPDX-License-Identifier: Apache-2.0
"""RMS norm and layer norm of FP8 values in plain jnp, forward and backward."""

from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.checks import (
  NOT_NEGATIVE,
  check_array,
  check_choice,
  check_number,
)
from coat_jax.formats import E4M3
from coat_jax.ops.blocks import values_to_operand
from coat_jax.ops.dispatch import op
from coat_jax.ops.quantize import quantize_groups, tensor_scale
from coat_jax.ops.types import Layout, NormKind, NormStats, Operand
from coat_jax.qtensor import QTensor, dequantize


def check_norm(x, gamma, beta, *, kind, eps, **kwargs) -> None:
  """Raises where these are no arguments of a norm."""
  del kwargs
  rule, remedy = "an array of numbers", "pass its input"
  check_array("norm", "x", x, rule, kind=jnp.number, remedy=remedy)
  remedy = "without a norm kind is None in blocks"
  check_choice("norm", "kind", kind, get_args(NormKind), remedy)
  check_number("norm", "eps", eps, NOT_NEGATIVE, "1e-6 is usual")
  for name, row in (("gamma", gamma), ("beta", beta)):
    if row is not None and row.shape != x.shape[-1:]:
      raise ValueError(
        f"norm: {name} must be [D] for x [..., D], got {row.shape} for x "
        f"{x.shape}; pass x of the width that the norm has"
      )


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

  Raises:
    TypeError: `eps` is no number.
    ValueError: an unknown kind, a negative `eps`, or shapes that do not fit.
  """
  check_norm(x, gamma, beta, kind=kind, eps=eps)
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
  rule, remedy = "an array of numbers", "pass that of the forward"
  for name, each in (("dy", dy), ("x", x)):
    check_array("norm", name, each, rule, kind=jnp.number, remedy=remedy)
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


@op(check=check_norm, triton="norm")
def norm_input(
  x: Array,
  gamma: Array | None,
  beta: Array | None,
  *,
  kind: NormKind,
  eps: float,
  group_size: int,
  dtype: DTypeLike = E4M3,
  output_dtype: DTypeLike = E4M3,
  axis_names: tuple[str, ...] = (),
) -> tuple[QTensor, NormStats, Array]:
  """Makes what a norm reads and saves: 1 x G values and their statistics.

  Args:
    x: [..., D], BF16 or f32.
    gamma, beta: [D] or None.
    kind, eps: the norm's.
    group_size: of the values.
    dtype: format of the values.
    output_dtype: format of the norm's output.

  Returns:
    x in `dtype`, the statistics of its rows, and the scale of the output.
  """
  x_q = quantize_groups.definition(x, group_size=group_size, dtype=dtype)
  values = dequantize(x_q, group_size=group_size)
  y, stats = norm_values(values, gamma, beta, kind=kind, eps=eps)
  scale = tensor_scale.definition(y, dtype=output_dtype, axis_names=axis_names)
  return x_q, stats, scale


@op(triton="norm")
def norm_fwd(
  x: QTensor,
  gamma: Array | None,
  beta: Array | None,
  stats: NormStats,
  *,
  scale: Array | None,
  group_size: int,
  layout: Layout = "rows",
  dtype: DTypeLike = E4M3,
) -> Operand:
  """Norm of 1 x G values to the operand of the next product.

  With this scale; with None in blocks of 128, each with its own.
  """
  values = dequantize(x, group_size=group_size)
  y = _normalized(values, gamma, beta, stats)
  return values_to_operand(y, scale=scale, layout=layout, dtype=dtype)


@op(triton="norm_backward")
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
