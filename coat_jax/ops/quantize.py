# SPDX-License-Identifier: Apache-2.0
"""Quantization to groups and to matmul operands, in plain jnp."""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E4M3, qmax
from coat_jax.numerics.qtensor import QTensor, quantize_with_scale
from coat_jax.numerics.scaling import (
  VALUES,
  Groups,
  Layout,
  Operand,
  Scales,
  Scaling,
)
from coat_jax.ops.capability import FP8, why_not_before
from coat_jax.ops.dispatch import kernel, op
from coat_jax.ops.tpu import in_groups


@op(mosaic="quantize")
def quantize_groups(x: Array, *, groups: Groups) -> QTensor:
  """Quantizes [..., n] to codes with a scale per 1 x G group."""
  return groups.quantize(in_groups(x, groups.size))


@op(mosaic="quantize")
def quantize_tensor(
  x: Array,
  *,
  scaling: Scaling = VALUES,
  scale: Scales | None = None,
  layout: Layout = "rows",
) -> Operand:
  """Quantizes [..., n] to an operand; `scale` may come from `tensor_scale`."""
  return scaling.quantize(x, scale, layout)


@op(mosaic="quantize")
def tensor_scale(x: Array, *, scaling: Scaling = VALUES) -> Scales | None:
  """Returns a tensor's scale; None if rows and columns have separate scales."""
  return scaling.find_scale(x)


def why_not_cast(dtype, **_) -> str | None:
  """Returns why a GPU cannot cast f32 to this dtype in one instruction."""
  if dtype == E4M3:
    return why_not_before(FP8, "a cast to E4M3 in one instruction")
  return (
    "only a cast to float8_e4m3fn is one instruction; others may go through "
    f"f16, got {jnp.dtype(dtype).name}"
  )


@kernel(why_not_cast)
def cast_rows(x: Array, *, scale: Array, dtype: DTypeLike = E4M3) -> Array:
  """Computes `quantize_rows` with the FP8 cast instruction of GPUs.

  XLA may split a cast, or drop it. That cannot happen to a cast to E4M3 in a
  fusion that also writes the codes to memory, which the barrier ensures. The
  cast is then one instruction, `cvt.rn.satfinite.e4m3x2.f32`.

  `formats.saturating_cast` needs no barrier, because it rounds to the format's
  grid in f32 before it casts. But with this rounding, the fusion would need 24
  instructions per value, and would run far below memory bandwidth.
  """
  values = x.astype(jnp.float32) / scale
  codes = jnp.clip(values, -qmax(dtype), qmax(dtype)).astype(dtype)
  return lax.optimization_barrier(codes)


@op(cuda=cast_rows)
def quantize_rows(x: Array, *, scale: Array, dtype: DTypeLike = E4M3) -> Array:
  """Quantizes [..., n] to the rows of `quantize_tensor`, in one XLA pass.

  XLA reads x in place, even if x is one layer of a stack. For a Pallas kernel,
  XLA would first copy x out of the stack.
  """
  return quantize_with_scale(x, scale, group_size=None, dtype=dtype).qvalue


@op()
def turn_operand(x: Operand, *, scaling: Scaling) -> Operand:
  """Computes an operand's columns from its rows; see `Scaling.turn`."""
  return scaling.turn(x)


@op(mosaic="codes")
def turn_codes(codes: Array) -> Array:
  """Transposes FP8 codes [..., m, n] to [..., n, m]."""
  return jnp.swapaxes(codes, -1, -2)


@op(mosaic="codes")
def join_columns(parts: Array) -> Array:
  """Joins column codes from P devices, stacked as [P, f, k], to [f, P k]."""
  return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], -1)
