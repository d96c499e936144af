# SPDX-License-Identifier: Apache-2.0
"""Checks of a kernel's arguments.

Each function returns why the kernel does not support the arguments, or None.
"""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E4M3, E5M2, is_fp8
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import (
  Blocks,
  BlockScales,
  Groups,
  Layout,
  PerTensor,
  Scaling,
)
from coat_jax.ops.activation import Parts
from coat_jax.ops.types import Activation

# Indices are int32. Leave room for tiles that would reach past the array's end.
MAX_ELEMENTS = 2**31 - 2**20

_GROUP_SIZES = (16, 32, 64, 128)


def why_not_shape(shape: tuple[int, ...]) -> str | None:
  """Checks the shape [..., n] of an array."""
  size = math.prod(shape)
  if not shape or shape[-1] % 16 or not size:
    return (
      "the kernel needs a last axis that is a multiple of 16, and no empty "
      f"axis, got shape {shape}"
    )
  if size > MAX_ELEMENTS:
    return (
      f"the kernel supports up to {MAX_ELEMENTS} values (it indexes in int32), "
      f"got shape {shape}"
    )
  return None


def why_not_groups(
  shape: tuple[int, ...], group_size: int | None
) -> str | None:
  """Checks the group size and shape of an array."""
  if group_size not in _GROUP_SIZES:
    sizes = ", ".join(map(str, _GROUP_SIZES))
    return f"the kernel supports group sizes {sizes}, got {group_size}"
  if shape and shape[-1] % group_size:
    return (
      "the kernel needs a last axis that is a multiple of the group size "
      f"{group_size}, got {shape[-1]}"
    )
  return why_not_shape(shape)


def why_not_values(x: QTensor) -> str | None:
  """Checks an input that was quantized in groups."""
  *leading, n = x.qvalue.shape
  group_size = x.group_size
  reason = why_not_format(x.qvalue.dtype, E4M3, E5M2) or why_not_groups(
    x.qvalue.shape, group_size
  )
  if reason is not None or group_size is None:
    return reason
  if x.scale.shape != (*leading, n // group_size):
    return (
      f"the kernel needs one scale per {group_size} values, got scales of "
      f"shape {x.scale.shape} for values of shape {x.qvalue.shape}"
    )
  return None


def why_not_dtype(*dtypes: DTypeLike) -> str | None:
  """Checks the dtypes of arrays that are not quantized."""
  for dtype in dtypes:
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
      return f"the kernel supports bfloat16 and float32, got {dtype}"
  return None


def why_not_format(dtype: DTypeLike, *known: DTypeLike) -> str | None:
  """Checks an FP8 format."""
  if dtype in known:
    return None
  names = " and ".join(jnp.dtype(x).name for x in known)
  return f"the kernel supports {names}, got {jnp.dtype(dtype).name}"


def why_not_fp8(*dtypes: DTypeLike) -> str | None:
  """Checks that the operands of a matmul are FP8."""
  if all(map(is_fp8, dtypes)):
    return None
  names = " and ".join(jnp.dtype(dtype).name for dtype in dtypes)
  return f"the kernel multiplies FP8 arrays, got {names}"


def why_not_scaling(scaling: Scaling, *known: DTypeLike) -> str | None:
  """Checks the scaling of an operand that the kernel writes."""
  if type(scaling) is not PerTensor:
    return (
      "the kernel writes operands with one scale per tensor, got "
      f"{type(scaling).__name__}"
    )
  return why_not_format(scaling.dtype, *known)


def why_not_columns(shape: tuple[int, ...], layout: Layout) -> str | None:
  """Checks the number of rows if the kernel writes the column layout."""
  rows = math.prod(shape[:-1])
  if layout != "rows" and rows % 16:
    return (
      "the kernel writes the column layout only if the number of rows is a "
      f"multiple of 16, got {rows}"
    )
  return None


def why_not_read(
  x, shape: tuple[int, ...], groups: Groups, output: Scaling
) -> str | None:
  """Checks `output`, and an input that the kernel quantizes in groups.

  `shape` is the shape of x, or of gate if x contains gate and up.
  """
  # With `Blocks`, a later operation computes the output's scales.
  if type(output) is not Blocks:
    reason = why_not_scaling(output, E4M3)
    if reason is not None:
      return reason
  return (
    why_not_format(groups.dtype, E4M3)
    or why_not_dtype(x.dtype)
    or why_not_groups(shape, groups.size)
  )


def why_not_written(
  shape: tuple[int, ...], output: Scaling, scale, layout: Layout
) -> str | None:
  """Checks an operand that the kernel writes in E4M3 with a given scale."""
  reason = why_not_scaling(output, E4M3) or why_not_columns(shape, layout)
  if reason is not None:
    return reason
  if scale is None or isinstance(scale, BlockScales):
    got = "none" if scale is None else "one scale per block"
    return f"the kernel needs one scale for the operand, got {got}"
  return None


# --- Activation functions ----------------------------------------------------


def why_not_activation_input(
  x, activation: Activation, gated: bool, groups: Groups, output: Scaling, **_
) -> str | None:
  """Checks the arguments of `activation_input`."""
  *leading, n = x.shape
  if gated and n % 2:
    return (
      f"gate and up must have the same width, got an odd total width of {n}"
    )
  f = n // 2 if gated else n
  return (
    _why_not_activation(activation)
    or why_not_read(x, (*leading, f), groups, output)
    or why_not_shape(x.shape)
  )


def why_not_activation_fwd(
  parts: Parts,
  activation: Activation,
  output: Scaling,
  scale,
  **_,
) -> str | None:
  """Checks the arguments of `activation_fwd`."""
  return (
    _why_not_activation(activation)
    or _why_not_parts(parts)
    or why_not_written(parts[0].qvalue.shape, output, scale, "rows")
  )


def why_not_activation_bwd(
  dy,
  parts: Parts,
  activation: Activation,
  gradient: Scaling,
  output: Scaling,
  scale,
  has_sums: bool,
  **_,
) -> str | None:
  """Checks the arguments of `activation_bwd_operands`."""
  (*leading, f), shape = dy.shape, parts[0].qvalue.shape
  if dy.shape != shape:
    return f"dy must have the input's shape {shape}, got {dy.shape}"
  if has_sums and len(parts) > 1:
    return "the kernel computes a bias gradient for x, but not for gate and up"
  return (
    why_not_scaling(gradient, E5M2)
    or _why_not_activation(activation)
    or why_not_dtype(dy.dtype)
    or _why_not_parts(parts)
    or why_not_shape((*leading, len(parts) * f))
    or why_not_written(dy.shape, output, scale, "both")
  )


def _why_not_activation(activation: Activation) -> str | None:
  if activation != "gelu":
    return None
  return (
    "Pallas cannot lower erf for a GPU, so the kernel supports 'silu', "
    "'gelu_tanh' and 'gelu_quick', got 'gelu'"
  )


def _why_not_parts(parts: Parts) -> str | None:
  x, *others = parts
  for up in others:
    if x.qvalue.shape != up.qvalue.shape:
      return (
        f"gate and up must have the same shape, got {x.qvalue.shape} and "
        f"{up.qvalue.shape}"
      )
    if x.group_size != up.group_size:
      return (
        f"gate and up must have the same group size, got {x.group_size} and "
        f"{up.group_size}"
      )
  return next(filter(None, map(why_not_values, parts)), None)
