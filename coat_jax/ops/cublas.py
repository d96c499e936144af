# SPDX-License-Identifier: Apache-2.0
"""Matrix products in FP8, asked for in the form that reaches cuBLASLt.

XLA makes one call of a dot product with an FP8 algorithm, both operands with
the summed axis last, a result in the dtype that is wanted and a scalar factor
in that dtype. In any other form a separate pass over the result, or over an
operand, comes with it. A bias becomes part of the call, and so does a matrix
that is added behind it, not before. The factor and the sums are f32 in it:
XLA:GPU drops the roundings to BF16.

There is one factor in the call, so the two scales are multiplied with each
other first. A product of them below f32's smallest normal number (1.2e-38; of
gradients whose largest value is below about 1e-29) is inexact or 0, and the
result with it. For a float16 result that bound is float16's: 6e-5, and below
6e-8 the result is 0. The definition in `ops.linear` has no such bound.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.formats import is_fp8
from coat_jax.ops.dispatch import supported
from coat_jax.ops.types import BlockScales, Operand, Unsupported

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


def _scalar(op: str, a: Operand, b: Operand) -> Array:
  """Returns the one number that a product of codes is multiplied by."""
  scales = a.scale, b.scale
  if isinstance(scales[0], BlockScales) or isinstance(scales[1], BlockScales):
    raise Unsupported(
      f"{op}: cuBLASLt takes one scale per tensor, got scales of blocks"
    )
  return scales[0] * scales[1]


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
  bias: Array | None = None,
) -> Array:
  """`ops.linear_fwd`."""
  if add is not None and add.dtype != dtype:
    raise Unsupported(
      "linear_fwd: cuBLASLt adds what has the dtype of the result, got "
      f"{add.dtype} for {jnp.dtype(dtype)}"
    )
  assert x.rows is not None and w.columns is not None
  scale = _scalar("linear_fwd", x, w)
  _require_product("linear_fwd", x.rows, w.columns, dtype)
  supported()
  y = _matmul(_rows(x.rows), w.columns, scale, dtype, _FAST)
  if bias is not None:
    y = y + bias.astype(dtype)[None]
  if add is not None:
    y = y + _rows(add)
  return y.reshape(*x.rows.shape[:-1], w.columns.shape[0])


def linear_dgrad(
  g: Operand, w: Operand, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """`ops.linear_dgrad`."""
  assert g.rows is not None and w.rows is not None
  scale = _scalar("linear_dgrad", g, w)
  _require_product("linear_dgrad", g.rows, w.rows, dtype)
  supported()
  dx = _matmul(_rows(g.rows), w.rows, scale, dtype, _PRECISE)
  return dx.reshape(*g.rows.shape[:-1], w.rows.shape[0])


def linear_wgrad(
  x: Operand, g: Operand, *, dtype: DTypeLike = jnp.float32
) -> Array:
  """`ops.linear_wgrad`."""
  assert x.columns is not None and g.columns is not None
  scale = _scalar("linear_wgrad", x, g)
  _require_product("linear_wgrad", x.columns, g.columns, dtype)
  supported()
  return _matmul(x.columns, g.columns, scale, dtype, _PRECISE)
