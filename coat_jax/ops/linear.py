# SPDX-License-Identifier: Apache-2.0
"""Matrix products of operands in plain jnp, forward and backward.

Their formats are the operands' own; `dtype` is that of the result.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.formats import accumulator
from coat_jax.ops.dispatch import op
from coat_jax.ops.types import Operand


def _check_linear(x: Operand, w: Operand, **kwargs) -> None:
  del kwargs
  if x.rows is None or w.columns is None or w.columns.ndim != 2:
    raise ValueError(
      "linear: needs x in rows and a weight [D, F] in columns, got "
      f"{_layout_of(x)} and {_layout_of(w)}"
    )
  if x.rows.shape[-1] != w.columns.shape[1]:
    raise ValueError(
      "linear: x [..., D] needs a weight [D, F], got x "
      f"{x.rows.shape} and weight {w.columns.shape[::-1]}"
    )


def _layout_of(operand: Operand) -> str:
  shapes = [None if x is None else x.shape for x in operand[:2]]
  return f"rows {shapes[0]} and columns {shapes[1]}"


def _matmul(
  a: Array,
  b: Array,
  scale: Array,
  dtype: DTypeLike,
  add: Array | None = None,
) -> Array:
  """a [m, k] b [n, k]^T of codes times a scalar, plus `add`, in f32: [m, n]."""
  out = jax.lax.dot_general(
    a,
    b,
    (((1,), (1,)), ((), ())),
    preferred_element_type=accumulator(a.dtype),
  )
  out = out.astype(jnp.float32) * scale
  if add is not None:
    out = out + add.astype(jnp.float32)
  return out.astype(dtype)


def _rows(x: Array) -> Array:
  """[..., n] to [rows, n]."""
  return x.reshape(-1, x.shape[-1])


@op(check=_check_linear, cublas="cublas")
def linear_fwd(
  x: Operand,
  w: Operand,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  add: Array | None = None,
) -> Array:
  """y [..., F] = x w: x.rows [..., D], w.columns [F, D].

  `add` [..., F], the residual stream, is added in f32, before y is rounded.
  """
  assert x.rows is not None and w.columns is not None
  if add is not None:
    add = _rows(add)
  y = _matmul(_rows(x.rows), w.columns, x.scale * w.scale, dtype, add)
  return y.reshape(*x.rows.shape[:-1], w.columns.shape[0])


@op(cublas="cublas")
def linear_dgrad(
  g: Operand, w: Operand, *, dtype: DTypeLike = jnp.bfloat16
) -> Array:
  """dx [..., D] = g w^T: g.rows [..., F], w.rows [D, F]."""
  assert g.rows is not None and w.rows is not None
  dx = _matmul(_rows(g.rows), w.rows, g.scale * w.scale, dtype)
  return dx.reshape(*g.rows.shape[:-1], w.rows.shape[0])


@op(cublas="cublas")
def linear_wgrad(
  x: Operand, g: Operand, *, dtype: DTypeLike = jnp.float32
) -> Array:
  """dw [D, F] = x^T g: x.columns [D, m], g.columns [F, m]."""
  assert x.columns is not None and g.columns is not None
  return _matmul(x.columns, g.columns, x.scale * g.scale, dtype)
