# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN, forward and backward, in BF16 or f16.

JAX has no public functions for most of this, so this file calls private
functions of JAX. No other file in `coat_jax` calls private functions. If the
installed JAX lacks one of them, `_why_not` says so, and attention runs in
another implementation.

Two options are not supported:

  soft caps  From JAX 0.12 on, JAX's cuDNN call accepts a function that changes
             the scores, but we never pass one.
  segments   cuDNN needs the offsets and lengths of a fixed number of segments,
             but we have only a segment id for each token.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.ops.capability import HOPPER, is_before
from coat_jax.ops.dispatch import kernel
from coat_jax.ops.types import AttentionKind, AttentionResiduals

try:
  from jax._src.cudnn import fused_attention_stablehlo as fmha
except ImportError:
  fmha: Any = None

_PRIVATE = (
  "AttentionLayout",
  "MaskType",
  "dot_product_attention",
  "_dot_product_attention_bwd_p_wrapper",
)
_MISSING = [name for name in _PRIVATE if not hasattr(fmha, name)]


def _why_not(q, k, v, segments, kind, **_) -> str | None:
  """Returns why cuDNN or this version of JAX cannot run a call, or None."""
  if _MISSING:
    return (
      f"jax {jax.__version__} has no {', '.join(_MISSING)} in "
      "jax._src.cudnn.fused_attention_stablehlo, which calls cuDNN; install "
      "the version of JAX in constraints.txt"
    )
  if kind.soft_cap is not None:
    return f"this cuDNN call cannot cap scores, got soft_cap={kind.soft_cap}"
  if segments is not None:
    return (
      "cuDNN reads packed sequences as offsets and lengths of a fixed number "
      "of segments, got an id for each token"
    )
  if q.size == 0 or k.size == 0:
    return (
      "cuDNN needs at least one query and one key, got q "
      f"{q.shape} and k {k.shape}"
    )
  if kind.causal and q.shape[1] != k.shape[1]:
    return (
      "cuDNN aligns a causal mask with the first key, not the last, so it "
      f"needs as many queries as keys, got {q.shape[1]} and {k.shape[1]}"
    )
  known = q.dtype in (jnp.bfloat16, jnp.float16)
  if not known or not q.dtype == k.dtype == v.dtype:
    return (
      "cuDNN needs q, k and v all in bfloat16 or all in float16, got "
      f"{q.dtype}, {k.dtype} and {v.dtype}"
    )
  largest = 128 if is_before(HOPPER) else 256
  if q.shape[-1] % 8 or q.shape[-1] > largest:
    return (
      f"cuDNN needs head sizes that are multiples of 8 up to {largest} on this "
      f"GPU, got {q.shape[-1]}"
    )
  return None


@kernel(_why_not)
def attention_fwd(
  q: Array,
  k: Array,
  v: Array,
  segments: Array | None = None,
  *,
  kind: AttentionKind,
) -> AttentionResiduals:
  """`ops.attention_fwd`."""
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
  # cuDNN's log-sum-exp is [B, N, T].
  return AttentionResiduals(out, jnp.swapaxes(lse, 1, 2))


@kernel(_why_not)
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
  """`ops.attention_bwd`."""
  # Call the private primitive, because no public function of JAX accepts the
  # forward pass's output and log-sum-exp as arguments.
  unused = jnp.zeros(0, q.dtype)
  # From JAX 0.12 on, the call has another required argument: a function that
  # changes the scores, or None.
  accepted = inspect.signature(fmha.dot_product_attention).parameters
  options = {"score_mod": None} if "score_mod" in accepted else {}
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
    **options,
  )
  return dq, dk, dv


def _mask_type(kind: AttentionKind):
  return fmha.MaskType.CAUSAL if kind.causal else fmha.MaskType.NO_MASK
