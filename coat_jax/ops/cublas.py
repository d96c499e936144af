# SPDX-License-Identifier: Apache-2.0
"""FP8 matmuls written in the form that XLA compiles to one cuBLASLt call.

XLA compiles these operations, if all have the result's dtype, to one call:

  - a `dot_general` with an FP8 algorithm, over the last axis of both operands
  - a multiplication by a scalar
  - optionally, the addition of a bias, and then of a matrix

In any other form, XLA adds a pass over the result or an operand. If the result
is BF16, the scalar and the sums are nevertheless f32 inside the call.

The scalar is the product of both operands' scales, and may be too small for its
dtype. The definition in `ops.linear` has no such limit.

  BF16, f32 result  inexact or 0 below 1.2e-38 (gradients below about 1e-29)
  f16 result        inexact below 6e-5, 0 below 3e-8, because the scalar is f16
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.numerics.formats import is_fp8
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import BlockScales, Operand
from coat_jax.ops.capability import FP8, why_not_before
from coat_jax.ops.dispatch import kernel
from coat_jax.ops.linear import in_columns, in_rows

# The forward pass may accumulate with fewer bits, as is usual on Hopper. The
# backward pass may not.
_FAST = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
_PRECISE = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32


def _matmul(a: QTensor, b: QTensor, dtype: DTypeLike, algorithm) -> Array:
  """Returns `a @ b.T` [m, n] for a [m, k] and b [n, k], from one call."""
  scale = a.scale * b.scale
  product = jax.lax.dot_general(
    a.qvalue,
    b.qvalue,
    (((1,), (1,)), ((), ())),
    precision=algorithm,
    preferred_element_type=dtype,
  )
  return product * scale.astype(dtype)


def _why_not(a: Operand, b: Operand, arrays, dtype: DTypeLike) -> str | None:
  """Returns why one cuBLASLt call cannot multiply these operands, or None."""
  reason = why_not_before(FP8, "an FP8 matmul of cuBLASLt")
  if reason is not None:
    return reason
  if isinstance(a.scale, BlockScales) or isinstance(b.scale, BlockScales):
    return "cuBLASLt needs one scale per tensor, got block scales"
  wrong = {x.dtype.name for x in arrays if not is_fp8(x.dtype)}
  if wrong:
    names = " and ".join(sorted(wrong))
    return f"this cuBLASLt call multiplies only FP8 operands, got {names}"
  (*rows, k), n = arrays[0].shape, arrays[1].shape[0]
  m = math.prod(rows)
  if any(size % 16 or size == 0 for size in (m, n, k)):
    return (
      "cuBLASLt needs FP8 matrices whose sizes are multiples of 16, got "
      f"[{m}, {k}] times [{k}, {n}]"
    )
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
    return f"cuBLASLt writes bfloat16, float16 or float32, got {dtype}"
  return None


def _why_not_fwd(x, w, dtype, add, **_) -> str | None:
  if add is not None and add.dtype != dtype:
    return (
      "cuBLASLt adds only an array of the result's dtype, got "
      f"{add.dtype} for {jnp.dtype(dtype)}"
    )
  return _why_not(x, w, (x.rows, w.columns), dtype)


@kernel(_why_not_fwd)
def linear_fwd(
  x: Operand,
  w: Operand,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  add: Array | None = None,
  bias: Array | None = None,
) -> Array:
  """Computes `ops.linear_fwd`."""
  assert x.rows is not None
  y = _matmul(in_rows(x), in_columns(w), dtype, _FAST)
  if bias is not None:
    y = y + bias.astype(dtype)[None]
  if add is not None:
    y = y + add.reshape(y.shape)
  return y.reshape(*x.rows.shape[:-1], y.shape[-1])


@kernel(lambda g, w, dtype: _why_not(g, w, (g.rows, w.rows), dtype))
def linear_dgrad(
  g: Operand, w: Operand, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """Computes `ops.linear_dgrad`."""
  assert g.rows is not None
  dx = _matmul(in_rows(g), in_rows(w), dtype, _PRECISE)
  return dx.reshape(*g.rows.shape[:-1], dx.shape[-1])


@kernel(lambda x, g, dtype: _why_not(x, g, (x.columns, g.columns), dtype))
def linear_wgrad(
  x: Operand, g: Operand, *, dtype: DTypeLike = jnp.float32
) -> Array:
  """Computes `ops.linear_wgrad`."""
  return _matmul(in_columns(x), in_columns(g), dtype, _PRECISE)
