# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN, forward and backward, BF16 or f16.

A window has the same meaning as ours: so many keys, the query's own among them
(`sliding_window_length` in JAX, the left bound of a diagonal band in cuDNN).
Left to XLA are

  soft caps   JAX's call of cuDNN has no function of scores
  segments    its packed layout wants offsets and lengths of each segment, and
              their number, which is that of log-sum-exps [segments, N, T] too:
              ids of tokens may be as many segments as tokens
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as fmha

from coat_jax.ops.dispatch import supported
from coat_jax.ops.types import AttentionKind, AttentionResiduals, Unsupported


def _require(
  q: Array, k: Array, segments: Array | None, kind: AttentionKind
) -> None:
  """Raises `Unsupported` where cuDNN cannot attend to these."""
  if kind.soft_cap is not None:
    raise Unsupported(
      "attention: JAX's call of cuDNN has no caps of scores, got "
      f"soft_cap={kind.soft_cap}"
    )
  if segments is not None:
    raise Unsupported(
      "attention: cuDNN takes packed sequences as offsets and lengths of a "
      "fixed number of segments, got an id for each token"
    )
  if q.dtype not in (jnp.bfloat16, jnp.float16):
    raise Unsupported(
      f"attention: cuDNN computes in bfloat16 or float16, got {q.dtype}"
    )
  if q.shape[-1] % 8 or q.shape[-1] > 256:
    raise Unsupported(
      "attention: cuDNN takes head sizes that are multiples of 8 up to 256, "
      f"got {q.shape[-1]}"
    )
  if q.size == 0 or k.size == 0:
    raise Unsupported(
      "attention: cuDNN attends to at least one query and key, got q "
      f"{q.shape} and k {k.shape}"
    )
  if kind.causal and q.shape[1] != k.shape[1]:
    raise Unsupported(
      "attention: cuDNN aligns a causal mask with the first key and needs as "
      f"many queries as keys, got {q.shape[1]} and {k.shape[1]}"
    )


def attention_fwd(
  q: Array,
  k: Array,
  v: Array,
  segments: Array | None = None,
  *,
  kind: AttentionKind,
) -> AttentionResiduals:
  """`ops.attention_fwd`."""
  _require(q, k, segments, kind)
  supported()
  results: Any = fmha.dot_product_attention(
    q,
    k,
    v,
    scale=kind.scale_of(q.shape[-1]),
    mask_type=_mask_type(kind),
    sliding_window_length=kind.among(k.shape[1]).window,
    return_residual=True,
  )
  out, lse = results
  # cuDNN's statistics are [B, N, T].
  return AttentionResiduals(out, jnp.swapaxes(lse, 1, 2))


def attention_bwd(
  dout: Array,
  q: Array,
  k: Array,
  v: Array,
  residuals: AttentionResiduals,
  segments: Array | None = None,
  *,
  kind: AttentionKind,
) -> tuple[Array, Array, Array]:
  """`ops.attention_bwd`.

  JAX has no public function for a backward from given residuals, which
  need not be the arrays that the forward made (recipe.attention="fp8").
  """
  _require(q, k, segments, kind)
  supported()
  unused = jnp.zeros(0, q.dtype)
  dq, dk, dv = fmha._dot_product_attention_bwd_p_wrapper.bind(
    q,
    k,
    v,
    *(unused,) * 7,
    jnp.swapaxes(residuals.lse, 1, 2),
    residuals.out,
    dout.astype(q.dtype),
    scale=kind.scale_of(q.shape[-1]),
    seed=42,
    dropout_rate=0.0,
    variadic_args=(False, False),
    mask_type=_mask_type(kind),
    layout=fmha.AttentionLayout.BTNH.value,
    sliding_window_length=kind.among(k.shape[1]).window,
  )
  return dq, dk, dv


def _mask_type(kind: AttentionKind):
  return fmha.MaskType.CAUSAL if kind.causal else fmha.MaskType.NO_MASK
