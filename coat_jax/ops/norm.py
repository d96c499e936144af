# SPDX-License-Identifier: Apache-2.0
"""RMS norm and layer norm of FP8 values in plain jnp, forward and backward."""

from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.numerics.checks import (
  NOT_NEGATIVE,
  check_choice,
  check_number,
  check_numeric,
)
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import (
  VALUES,
  Groups,
  Layout,
  Operand,
  Scales,
  Scaling,
)
from coat_jax.ops.dispatch import op
from coat_jax.ops.types import NormKind, NormStats


def check_norm(x, gamma, beta, *, kind, eps, **_) -> None:
  """Raises if arguments of a norm are invalid."""
  check_numeric("norm", "x", x, "pass the norm's input")
  remedy = "pass one of these, since only a block accepts None"
  check_choice("norm", "kind", kind, get_args(NormKind), remedy)
  check_number("norm", "eps", eps, NOT_NEGATIVE, "1e-6 is usual")
  for name, row in (("gamma", gamma), ("beta", beta)):
    if row is not None and row.shape != x.shape[-1:]:
      raise ValueError(
        f"norm: {name} must be [D] for x [..., D], got {row.shape} for x "
        f"{x.shape}; pass an x as wide as the norm"
      )


def norm_values(
  x: Array,
  gamma: Array | None,
  beta: Array | None,
  *,
  kind: NormKind,
  eps: float,
  axis_names: tuple[str, ...] = (),
) -> tuple[Array, NormStats]:
  """Computes y = (x - mean) rstd gamma + beta and the statistics, in f32.

  x is [..., D]; gamma and beta are [D] or None.

    kind     mean         rstd
    "rms"    none         (mean(x^2) + eps)^-1/2
    "layer"  mean(x)      (var(x) + eps)^-1/2

  Inside `jax.shard_map`, devices along `axis_names` hold shards of each row.
  """
  check_norm(x, gamma, beta, kind=kind, eps=eps)
  x = x.astype(jnp.float32)
  mean, centred = None, x
  if kind == "layer":
    mean = _mean(x, axis_names)
    centred = x - mean[..., None]
  rstd = jax.lax.rsqrt(_mean(centred * centred, axis_names) + eps)
  stats = NormStats(mean, rstd)
  return _normalized(x, gamma, beta, stats), stats


def _mean(x: Array, axis_names: tuple[str, ...]) -> Array:
  """Averages whole rows; devices along `axis_names` hold shards of each."""
  mean = jnp.mean(x, axis=-1)
  return jax.lax.pmean(mean, axis_names) if axis_names else mean


def _normalized(x, gamma, beta, stats) -> Array:
  """Computes (x - mean) rstd gamma + beta, f32 [..., D]."""
  if stats.mean is not None:
    x = x - stats.mean[..., None]
  y = x * stats.rstd[..., None]
  if gamma is not None:
    y = y * _row(gamma, y)
  if beta is not None:
    y = y + _row(beta, y)
  return y


def norm_gradients(
  dy: Array,
  x: Array,
  gamma: Array | None,
  stats: NormStats,
  *,
  axis_names: tuple[str, ...] = (),
) -> tuple[Array, Array, Array]:
  """Computes dx [..., D], and dgamma and dbeta [D] summed over rows, in f32.

  dx = (g - xhat mean(xhat g) - mean(g)) rstd, where xhat is the normalized x,
  g = gamma dy, and the term mean(g) exists only for "layer".
  """
  for name, each in (("dy", dy), ("x", x)):
    check_numeric("norm", name, each, "pass an array [..., D]")
  dy = dy.astype(jnp.float32)
  x = x.astype(jnp.float32)
  if stats.mean is not None:
    x = x - stats.mean[..., None]
  xhat = x * stats.rstd[..., None]
  g = dy if gamma is None else dy * _row(gamma, dy)
  dx = g - xhat * _mean(xhat * g, axis_names)[..., None]
  if stats.mean is not None:
    dx = dx - _mean(g, axis_names)[..., None]
  rows = tuple(range(dy.ndim - 1))
  dgamma, dbeta = jnp.sum(dy * xhat, axis=rows), jnp.sum(dy, axis=rows)
  return dx * stats.rstd[..., None], dgamma, dbeta


def _row(v: Array, like: Array) -> Array:
  """Casts v [D] to f32 and reshapes it to the rank of `like` [..., D]."""
  return v.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + v.shape)


@op(check=check_norm, mosaic="norm")
def norm_input(
  x: Array,
  gamma: Array | None,
  beta: Array | None,
  *,
  kind: NormKind,
  eps: float,
  groups: Groups,
  output: Scaling = VALUES,
) -> tuple[QTensor, NormStats, Scales | None]:
  """Quantizes a norm's input; computes statistics and the output's scale."""
  x_q = groups.quantize(x)
  y, stats = norm_values(x_q.dequantize(), gamma, beta, kind=kind, eps=eps)
  return x_q, stats, output.find_scale(y)


@op(mosaic="norm")
def norm_fwd(
  x: QTensor,
  gamma: Array | None,
  beta: Array | None,
  stats: NormStats,
  *,
  output: Scaling = VALUES,
  scale: Scales | None = None,
  layout: Layout = "rows",
) -> Operand:
  """Normalizes quantized x; returns the operand of the next matmul."""
  y = _normalized(x.dequantize(), gamma, beta, stats)
  return output.quantize(y, scale, layout)


@op(mosaic="norm_backward")
def norm_bwd(
  dy: Array,
  x: QTensor,
  gamma: Array | None,
  stats: NormStats,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  add: Array | None = None,
) -> tuple[Array, Array, Array]:
  """Computes dx in `dtype`, and dgamma and dbeta in f32, from quantized x.

  `add` [..., D], the gradient that bypasses the norm, is added to dx in f32.
  """
  dx, dgamma, dbeta = norm_gradients(dy, x.dequantize(), gamma, stats)
  if add is not None:
    dx = dx + add.astype(jnp.float32)
  return dx.astype(dtype), dgamma, dbeta
