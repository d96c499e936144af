# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN, forward and backward: BF16, f16, or with FP8 products.

JAX has no public function for most of it, so this file, and no other, reads
private ones; where a version of JAX has them no more, it says so and XLA runs.

A window has the same meaning as ours: so many keys, the query's own among them
(`sliding_window_length` in JAX, the left bound of a diagonal band in cuDNN).
Left to XLA are

  soft caps   JAX's call of cuDNN has no function of scores
  segments    its packed layout wants offsets and lengths of each segment, and
              their number, which is that of log-sum-exps [segments, N, T] too:
              ids of tokens may be as many segments as tokens

With FP8 products windows are left to XLA too, and heads and lengths that the
card's kernels do not have. There cuDNN's results are E4M3 as well, and JAX
takes its largest magnitudes for those of all devices, which they are not where
XLA partitions the call: it runs on one device or inside jax.shard_map.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.ops.attention_fp8 import (
  P_SCALE,
  FP8AttentionResiduals,
  GradientScales,
)
from coat_jax.ops.dispatch import may_be_partitioned, supported
from coat_jax.ops.types import AttentionKind, AttentionResiduals, Unsupported
from coat_jax.qtensor import QTensor

try:
  from jax._src.cudnn import fused_attention_stablehlo as fmha
except ImportError:
  fmha: Any = None

_PRIVATE = (
  "AttentionLayout",
  "MaskType",
  "check_compute_capability",
  "dot_product_attention",
  "_dot_product_attention_bwd_p_wrapper",
  "_dot_product_attention_fp8_fwd_p_wrapper",
  "_dot_product_attention_fp8_bwd_p_wrapper",
)
_MISSING = [name for name in _PRIVATE if not hasattr(fmha, name)]


def _require_jax() -> None:
  """Raises `Unsupported` where JAX has no longer what this file calls."""
  if _MISSING:
    raise Unsupported(
      f"attention: jax {jax.__version__} has no {', '.join(_MISSING)} in "
      "jax._src.cudnn.fused_attention_stablehlo, by which cuDNN is called; "
      "install the version of JAX in constraints.txt"
    )


def _require(
  q: Array, k: Array, segments: Array | None, kind: AttentionKind
) -> None:
  """Raises `Unsupported` where cuDNN cannot attend to these."""
  _require_jax()
  _require_shapes(q, k, segments, kind)
  if q.dtype not in (jnp.bfloat16, jnp.float16):
    raise Unsupported(
      f"attention: cuDNN computes in bfloat16 or float16, got {q.dtype}"
    )
  if q.shape[-1] % 8 or q.shape[-1] > 256:
    raise Unsupported(
      "attention: cuDNN takes head sizes that are multiples of 8 up to 256, "
      f"got {q.shape[-1]}"
    )


def _require_shapes(
  q: Array, k: Array, segments: Array | None, kind: AttentionKind
) -> None:
  """Raises `Unsupported` where cuDNN attends to none of these, in any dtype."""
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


def _require_fp8(
  q: QTensor, k: QTensor, segments: Array | None, kind: AttentionKind
) -> None:
  """Raises `Unsupported` where cuDNN has no attention in FP8 for these."""
  _require_jax()
  _require_shapes(q.qvalue, k.qvalue, segments, kind)
  t, s, size = q.qvalue.shape[1], k.qvalue.shape[1], q.qvalue.shape[-1]
  if kind.among(s).window is not None:
    raise Unsupported(
      f"attention_fp8: cuDNN has no windows in FP8, got window={kind.window}"
    )
  if size != 128 or t % 128 or s % 128:
    raise Unsupported(
      "attention_fp8: cuDNN takes heads of 128 and multiples of 128 queries "
      f"and keys in FP8, got heads of {size}, {t} queries and {s} keys"
    )
  if jax.default_backend() == "gpu" and not fmha.check_compute_capability(
    "9.0"
  ):
    raise Unsupported(
      "attention_fp8: cuDNN attends in FP8 on Hopper and later, got "
      f"{jax.local_devices()[0].device_kind}"
    )
  if may_be_partitioned():
    raise Unsupported(
      "attention_fp8: with several GPUs cuDNN sees one device's part only "
      "inside jax.shard_map, where layers run with recipe.axes=MeshAxes(...)"
    )


def attention_fp8_fwd(
  q: QTensor,
  k: QTensor,
  v: QTensor,
  segments: Array | None = None,
  *,
  kind: AttentionKind,
) -> FP8AttentionResiduals:
  """`ops.attention_fp8_fwd`."""
  _require_fp8(q, k, segments, kind)
  supported()
  of_p = jnp.float32(P_SCALE)
  out, _, _, lse = fmha._dot_product_attention_fp8_fwd_p_wrapper.bind(
    q.qvalue,
    k.qvalue,
    v.qvalue,
    *map(_scalar, (q.scale, k.scale, v.scale, of_p, 1 / of_p, 1 / v.scale)),
    is_training=True,
    **_fp8_options(q, kind),
  )
  return FP8AttentionResiduals(QTensor(out, v.scale), jnp.swapaxes(lse, 1, 2))


def attention_fp8_bwd(
  dout: QTensor,
  q: QTensor,
  k: QTensor,
  v: QTensor,
  residuals: FP8AttentionResiduals,
  scales: GradientScales,
  segments: Array | None = None,
  *,
  kind: AttentionKind,
) -> tuple[tuple[QTensor, QTensor, QTensor], GradientScales]:
  """`ops.attention_fp8_bwd`."""
  _require_fp8(q, k, segments, kind)
  supported()
  out, of_p = residuals.out, jnp.float32(P_SCALE)
  # What multiplies codes, and then what gives them.
  factors = [q.scale, k.scale, v.scale, out.scale, dout.scale, of_p, scales.ds]
  divisors = [of_p, scales.dq, scales.dk, scales.dv, scales.ds]
  results: Any = fmha._dot_product_attention_fp8_bwd_p_wrapper.bind(
    q.qvalue,
    k.qvalue,
    v.qvalue,
    out.qvalue,
    dout.qvalue,
    jnp.swapaxes(residuals.lse, 1, 2),
    *map(_scalar, factors),
    *(_scalar(1 / x) for x in divisors),
    **_fp8_options(q, kind),
  )
  dq, dk, dv, *largest = results
  of_dq, of_dk, of_dv, of_ds = (x.reshape(()) for x in largest)
  gradients = (
    QTensor(dq, scales.dq),
    QTensor(dk, scales.dk),
    QTensor(dv, scales.dv),
  )
  return gradients, GradientScales(of_dq, of_dk, of_dv, of_ds)


def _scalar(x: Array) -> Array:
  """As cuDNN takes scales: [1, 1, 1, 1]."""
  return x.reshape(1, 1, 1, 1)


def _fp8_options(q: QTensor, kind: AttentionKind) -> dict[str, Any]:
  return dict(
    scale=kind.scale_of(q.qvalue.shape[-1]),
    use_causal_mask=kind.causal,
    layout=fmha.AttentionLayout.BTNH.value,
  )


def _mask_type(kind: AttentionKind):
  return fmha.MaskType.CAUSAL if kind.causal else fmha.MaskType.NO_MASK
