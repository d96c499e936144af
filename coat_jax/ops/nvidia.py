# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's libraries do best, asked for in the form that reaches them.

Matrix products in FP8 are cuBLASLt's ("cublas"). XLA makes one such call of a
dot product with an FP8 algorithm, both operands with the summed axis last, a
result in the dtype that is wanted and a scalar factor in that dtype. In any
other form a separate pass over the result, or over an operand, comes with it.
A matrix that is added becomes part of the call. The factor and the sum are f32
in it: XLA:GPU drops the roundings to BF16.

Attention is cuDNN's ("cudnn"), forward and backward, BF16 or f16. Its sliding
window has as many keys as ours, the query's own among them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.typing import DTypeLike

from coat_jax.formats import is_fp8
from coat_jax.ops.dispatch import supported
from coat_jax.ops.types import (
  AttentionKind,
  AttentionResiduals,
  Operand,
  Unsupported,
)

_SUMMED_LAST = (((1,), (1,)), ((), ()))
# Products of activations may sum with fewer bits, as is usual on Hopper; sums
# over all tokens and gradients may not.
_FAST = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
_PRECISE = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32


def _matmul(a: Array, b: Array, scale: Array, dtype: DTypeLike, algorithm):
  """a [m, k] b [n, k]^T scale in one cuBLASLt call: [m, n]."""
  product = jax.lax.dot_general(
    a, b, _SUMMED_LAST, precision=algorithm, preferred_element_type=dtype
  )
  return product * scale.astype(dtype)


def _rows(x: Array) -> Array:
  """[..., n] to [rows, n]."""
  return x.reshape(-1, x.shape[-1])


def _require_product(op: str, a: Array, b: Array, dtype: DTypeLike) -> None:
  """Raises `Unsupported` where cuBLASLt would have to pad or convert."""
  wrong = {x.dtype.name for x in (a, b) if not is_fp8(x.dtype)}
  if wrong:
    raise Unsupported(f"{op}: cuBLASLt multiplies FP8 here, got {wrong}")
  sizes = (math.prod(a.shape[:-1]), b.shape[0], a.shape[-1])
  if any(size % 16 or size == 0 for size in sizes):
    raise Unsupported(
      f"{op}: cuBLASLt takes FP8 matrices whose sizes are multiples of 16, "
      f"got [{sizes[0]}, {sizes[2]}] times [{sizes[2]}, {sizes[1]}]"
    )
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
    raise Unsupported(
      f"{op}: cuBLASLt writes bfloat16, float16 or float32, got {dtype}"
    )


def linear_fwd(
  x: Operand,
  w: Operand,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  add: Array | None = None,
) -> Array:
  """`ops.linear_fwd`."""
  if add is not None and add.dtype != dtype:
    raise Unsupported(
      "linear_fwd: cuBLASLt adds what has the dtype of the result, got "
      f"{add.dtype} for {jnp.dtype(dtype)}"
    )
  assert x.rows is not None and w.columns is not None
  _require_product("linear_fwd", x.rows, w.columns, dtype)
  supported()
  y = _matmul(_rows(x.rows), w.columns, x.scale * w.scale, dtype, _FAST)
  if add is not None:
    y = y + _rows(add)
  return y.reshape(*x.rows.shape[:-1], w.columns.shape[0])


def linear_dgrad(
  g: Operand, w: Operand, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """`ops.linear_dgrad`."""
  assert g.rows is not None and w.rows is not None
  _require_product("linear_dgrad", g.rows, w.rows, dtype)
  supported()
  dx = _matmul(_rows(g.rows), w.rows, g.scale * w.scale, dtype, _PRECISE)
  return dx.reshape(*g.rows.shape[:-1], w.rows.shape[0])


def linear_wgrad(
  x: Operand, g: Operand, *, dtype: DTypeLike = jnp.float32
) -> Array:
  """`ops.linear_wgrad`."""
  assert x.columns is not None and g.columns is not None
  _require_product("linear_wgrad", x.columns, g.columns, dtype)
  supported()
  return _matmul(x.columns, g.columns, x.scale * g.scale, dtype, _PRECISE)


def _require_attention(
  q: Array, k: Array, segments: Array | None, kind: AttentionKind
) -> None:
  """Raises `Unsupported` where cuDNN cannot attend to these."""
  if kind.soft_cap is not None:
    raise Unsupported(
      "attention: cuDNN is called without caps of scores here, got "
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
  _require_attention(q, k, segments, kind)
  supported()
  results: Any = cudnn.dot_product_attention(
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
  _require_attention(q, k, segments, kind)
  supported()
  unused = jnp.zeros(0, q.dtype)
  dq, dk, dv = cudnn._dot_product_attention_bwd_p_wrapper.bind(
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
    layout=cudnn.AttentionLayout.BTNH.value,
    sliding_window_length=kind.among(k.shape[1]).window,
  )
  return dq, dk, dv


def _mask_type(kind: AttentionKind):
  return cudnn.MaskType.CAUSAL if kind.causal else cudnn.MaskType.NO_MASK
