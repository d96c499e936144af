# SPDX-License-Identifier: Apache-2.0
"""Quantization to groups and to operands of products, in plain jnp."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.formats import E4M3
from coat_jax.ops.dispatch import op
from coat_jax.ops.types import Layout, Operand
from coat_jax.qtensor import (
  QTensor,
  amax_to_scale,
  quantize,
  quantize_with_scale,
  tensor_amax,
)


@op(triton="quantize")
def quantize_groups(
  x: Array, *, group_size: int, dtype: DTypeLike = E4M3
) -> QTensor:
  """[..., n] to codes, a BF16 scale, rounded up, per 1 x group_size group."""
  return quantize(
    x, group_size=group_size, dtype=dtype, scale_dtype=jnp.bfloat16
  )


@op(triton="quantize")
def quantize_tensor(
  x: Array,
  *,
  dtype: DTypeLike = E4M3,
  scale: Array | None = None,
  layout: Layout = "rows",
  axis_names: tuple[str, ...] = (),
) -> Operand:
  """[..., n] to an operand with one f32 scale; `scale` given: with that one."""
  if scale is None:
    scale = tensor_scale.definition(x, dtype=dtype, axis_names=axis_names)
  codes = quantize_with_scale(x, scale, group_size=None, dtype=dtype).qvalue
  return _lay_out(codes, scale, layout)


@op(triton="quantize")
def tensor_scale(
  x: Array, *, dtype: DTypeLike = E4M3, axis_names: tuple[str, ...] = ()
) -> Array:
  """The f32 scale of [...] as one tensor."""
  return amax_to_scale(tensor_amax(x, axis_names=axis_names), dtype)


@op(cuda="cuda")
def quantize_rows(x: Array, *, scale: Array, dtype: DTypeLike = E4M3) -> Array:
  """[..., n] to the codes of `quantize_tensor`'s rows, in a pass of XLA's.

  XLA has an elementwise pass read x where it is, as in a stack of layers, of
  which a kernel would have it copy out the layer first.
  """
  return quantize_with_scale(x, scale, group_size=None, dtype=dtype).qvalue


def _lay_out(rows: Array, scale: Array, layout: Layout) -> Operand:
  """An operand of codes [..., n] in this layout."""
  return Operand(
    rows=None if layout == "columns" else rows,
    columns=None if layout == "rows" else rows.reshape(-1, rows.shape[-1]).T,
    scale=scale,
  )


@op(triton="join")
def join_columns(parts: Array) -> Array:
  """[P, f, k] to [f, P k]: columns, of which each of P devices had k values."""
  return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], -1)
