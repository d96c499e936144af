# SPDX-License-Identifier: Apache-2.0
"""Matmuls of operands in plain jnp, forward and backward.

If operands have block scales, kernels sum products of codes within each block
of 128, multiply each sum by both operands' scales, and add the results in f32.
The definitions in this file instead multiply codes by scales before the matmul.
That is exact in BF16, because block scales are powers of two.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.numerics.formats import accumulator
from coat_jax.numerics.qtensor import QTensor, times_scales
from coat_jax.numerics.scaling import BLOCK, BlockScales, Operand, block_values
from coat_jax.ops.dispatch import op


def _check_linear(x, w, *, bias=None, add=None, **_) -> None:
  if x.rows is None or w.columns is None or w.columns.ndim != 2:
    raise ValueError(
      "linear: needs x in rows and a weight [D, F] in columns, got "
      f"{shapes_of(x)} and {shapes_of(w)}; quantize them in these layouts"
    )
  if x.rows.shape[-1] != w.columns.shape[1]:
    raise ValueError(
      "linear: x [..., D] needs a weight [D, F], got x "
      f"{x.rows.shape} and weight {w.columns.shape[::-1]}; pass arrays whose D "
      "match"
    )
  columns = w.columns.shape[:1]
  for name, other, want in (
    ("bias", bias, columns),
    ("add", add, x.rows.shape[:-1] + columns),
  ):
    if other is not None and other.shape != want:
      raise ValueError(
        f"linear: {name} must have shape {want} to be added to the output, got "
        f"{other.shape}; pass one of this shape"
      )


def shapes_of(operand: Operand) -> str:
  """Returns the shapes of an operand's codes, for an error message."""
  shapes = [None if x is None else x.shape for x in operand[:2]]
  return f"rows {shapes[0]} and columns {shapes[1]}"


def _matmul(
  a: QTensor,
  b: QTensor,
  dtype: DTypeLike,
  add: Array | None = None,
  bias: Array | None = None,
) -> Array:
  """Returns `a @ b.T + bias + add` [m, n]; sums in f32, rounds to `dtype`."""
  if a.scale.ndim != b.scale.ndim:
    raise ValueError(
      "linear: operands must both have one scale, or both have block scales, "
      f"got {a.scale.shape} and {b.scale.shape}; quantize both with one recipe"
    )
  if a.scale.ndim:
    out = _dot(*(block_values(x.qvalue, x.scale, jnp.bfloat16) for x in (a, b)))
  else:
    out = times_scales(_dot(a.qvalue, b.qvalue), a.scale, b.scale)
  return in_sum(out, dtype, add, bias)


def in_sum(
  out: Array, dtype: DTypeLike, add: Array | None, bias: Array | None
) -> Array:
  """Returns out + bias + add in `dtype`, summed in f32.

  `out` is f32 [m, n]; `bias` [n] is first rounded to `dtype`.
  """
  if bias is not None:
    out = out + bias.astype(dtype).astype(jnp.float32)[None]
  if add is not None:
    out = out + add.astype(jnp.float32)
  return out.astype(dtype)


def _dot(a: Array, b: Array) -> Array:
  """Returns `a @ b.T` in f32 [m, n], for a [m, k] and b [n, k]."""
  total = jnp.float32 if a.dtype == jnp.bfloat16 else accumulator(a.dtype)
  out = jax.lax.dot_general(
    a, b, (((1,), (1,)), ((), ())), preferred_element_type=total
  )
  return out.astype(jnp.float32)


def _rows(x: Array) -> Array:
  """Reshapes [..., n] to [rows, n]."""
  return x.reshape(-1, x.shape[-1])


def in_rows(x: Operand) -> QTensor:
  """Returns an operand's rows [m, n] with their scales."""
  assert x.rows is not None
  if not isinstance(x.scale, BlockScales):
    return QTensor(_rows(x.rows), x.scale, None)
  assert x.scale.rows is not None
  return QTensor(_rows(x.rows), _rows(x.scale.rows), BLOCK)


def in_columns(x: Operand) -> QTensor:
  """Returns an operand's columns [n, m] with their scales."""
  assert x.columns is not None
  if not isinstance(x.scale, BlockScales):
    return QTensor(x.columns, x.scale, None)
  return QTensor(x.columns, x.scale.columns, BLOCK)


@op(check=_check_linear, cublas="cublas", mosaic="block_product")
def linear_fwd(
  x: Operand,
  w: Operand,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  add: Array | None = None,
  bias: Array | None = None,
) -> Array:
  """Computes y [..., F] = x w from x.rows [..., D] and w.columns [F, D].

  `bias` [F] and `add` [..., F], the residual stream, are added in f32.
  """
  assert x.rows is not None
  if add is not None:
    add = _rows(add)
  y = _matmul(in_rows(x), in_columns(w), dtype, add, bias)
  return y.reshape(*x.rows.shape[:-1], y.shape[-1])


@op(cublas="cublas", mosaic="block_product")
def linear_dgrad(
  g: Operand, w: Operand, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """Computes dx [..., D] = g w^T from g.rows [..., F] and w.rows [D, F]."""
  assert g.rows is not None
  dx = _matmul(in_rows(g), in_rows(w), dtype)
  return dx.reshape(*g.rows.shape[:-1], dx.shape[-1])


@op(cublas="cublas", mosaic="block_product")
def linear_wgrad(
  x: Operand, g: Operand, *, dtype: DTypeLike = jnp.float32
) -> Array:
  """Computes dw [D, F] = x^T g from x.columns [D, m] and g.columns [F, m]."""
  return _matmul(in_columns(x), in_columns(g), dtype)
