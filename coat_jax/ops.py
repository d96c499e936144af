# SPDX-License-Identifier: Apache-2.0
"""The operations that layers are made of, checked at trace time.

Layers call these and never `reference` itself: here is where an implementation
is chosen. Shapes are static, so that a misuse is found once, while tracing.
"""

from jax import Array
from jax.typing import DTypeLike

from coat_jax import reference, reference_attention
from coat_jax.qtensor import QTensor
from coat_jax.reference import (
  NormKind,
  NormStats,
  gelu_bwd,
  gelu_derivative,
  gelu_fwd,
  gelu_values,
  linear_dgrad,
  linear_wgrad,
  mul_bwd,
  mul_fwd,
  norm_bwd,
  norm_fwd,
  norm_gradients,
  norm_values,
  quantize_groups,
  quantize_tensor,
  residual_add_bwd,
  residual_add_fwd,
  silu_bwd,
  silu_derivative,
  silu_fwd,
  silu_mul_bwd,
  silu_mul_fwd,
  silu_values,
)
from coat_jax.reference_attention import AttentionResiduals, attention_bwd

__all__ = [
  "AttentionResiduals",
  "NormKind",
  "NormStats",
  "attention_bwd",
  "attention_fwd",
  "gelu_bwd",
  "gelu_derivative",
  "gelu_fwd",
  "gelu_values",
  "linear_dgrad",
  "linear_fwd",
  "linear_wgrad",
  "mul_bwd",
  "mul_fwd",
  "norm_bwd",
  "norm_fwd",
  "norm_gradients",
  "norm_values",
  "quantize_groups",
  "quantize_tensor",
  "residual_add_bwd",
  "residual_add_fwd",
  "silu_bwd",
  "silu_derivative",
  "silu_fwd",
  "silu_mul_bwd",
  "silu_mul_fwd",
  "silu_values",
]


def linear_fwd(x: QTensor, w: QTensor, *, dtype: DTypeLike) -> Array:
  """`reference.linear_fwd`: y [..., F] = x [..., D] w [D, F].

  Raises:
    ValueError: the last axis of x is not the first of w.
  """
  if w.qvalue.ndim != 2 or x.qvalue.shape[-1] != w.qvalue.shape[0]:
    raise ValueError(
      "linear: x [..., D] needs a weight [D, F], got x "
      f"{x.qvalue.shape} and weight {w.qvalue.shape}"
    )
  return reference.linear_fwd(x, w, dtype=dtype)


def attention_fwd(
  q: Array, k: Array, v: Array, *, causal: bool
) -> AttentionResiduals:
  """`reference_attention.attention_fwd`: q [B, T, N, H], k, v [B, S, K, H].

  Raises:
    ValueError: ranks other than 4, batches or head sizes that differ, or query
      heads that are no multiple of the key heads.
  """
  fits = q.ndim == k.ndim == 4 and k.shape == v.shape
  fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
  if not fits or q.shape[2] % k.shape[2]:
    raise ValueError(
      "attention: needs q [B, T, N, H] and k, v [B, S, K, H] with N a "
      f"multiple of K, got q {q.shape}, k {k.shape}, v {v.shape}"
    )
  return reference_attention.attention_fwd(q, k, v, causal=causal)
