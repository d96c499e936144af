# SPDX-License-Identifier: Apache-2.0
"""Checks that return why a kernel cannot run its arguments, or None."""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import QTensor
from coat_jax.numerics.scaling import (
  Blocks,
  BlockScales,
  Groups,
  Layout,
  PerTensor,
  Scales,
  Scaling,
)
from coat_jax.ops.activation import Parts
from coat_jax.ops.types import Activation

# Indices are int32, including those of the last tile past the array's end.
MAX_ELEMENTS = 2**31 - 2**20

_GROUP_SIZES = (16, 32, 64, 128)


def why_not_shape(shape: tuple[int, ...]) -> str | None:
  """Checks the shape [..., n] of an array."""
  size = math.prod(shape)
  if not shape or shape[-1] % 16 or not size:
    return (
      "the last axis must be a multiple of 16 and no axis empty for the kernel,"
      f" got {shape}"
    )
  if size > MAX_ELEMENTS:
    return f"the kernel indexes in int32, got shape {shape}"
  return None


def why_not_groups(
  shape: tuple[int, ...], group_size: int | None
) -> str | None:
  """Checks the shape of an array in groups along its last axis."""
  if group_size not in _GROUP_SIZES:
    return f"the kernel needs groups of {_GROUP_SIZES}, got {group_size}"
  if shape and shape[-1] % group_size:
    return (
      f"the last axis must be a multiple of the group size {group_size} for "
      f"the kernel, got {shape[-1]}"
    )
  return why_not_shape(shape)


def why_not_values(x: QTensor) -> str | None:
  """Checks quantized values that a kernel reads."""
  *leading, n = x.qvalue.shape
  group_size = x.group_size
  reason = why_not_format(x.qvalue.dtype, E4M3, E5M2) or why_not_groups(
    x.qvalue.shape, group_size
  )
  if reason is not None or group_size is None:
    return reason
  if x.scale.shape != (*leading, n // group_size):
    return (
      f"the kernel needs a scale per {group_size} values, got scales of "
      f"shape {x.scale.shape} for values of {x.qvalue.shape}"
    )
  return None


def why_not_dtype(*dtypes: DTypeLike) -> str | None:
  """Checks dtypes of values that are not quantized."""
  for dtype in dtypes:
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
      return f"the kernel reads bfloat16 and float32, got {dtype}"
  return None


def why_not_format(dtype: DTypeLike, *known: DTypeLike) -> str | None:
  """Checks the format of codes."""
  if dtype in known:
    return None
  names = " and ".join(jnp.dtype(x).name for x in known)
  return f"the kernel supports {names}, got {jnp.dtype(dtype).name}"


def why_not_scaling(scaling: Scaling, *known: DTypeLike) -> str | None:
  """Checks the scaling of an operand that a kernel writes."""
  if type(scaling) is not PerTensor:
    return (
      "kernels write operands with one scale per tensor, got "
      f"{type(scaling).__name__}"
    )
  return why_not_format(scaling.dtype, *known)


def why_not_columns(shape: tuple[int, ...], layout: Layout) -> str | None:
  """Checks the number of rows of an operand whose columns a kernel writes."""
  rows = math.prod(shape[:-1])
  if layout != "rows" and rows % 16:
    return f"the kernel writes columns of a multiple of 16 rows, got {rows}"
  return None


def why_not_read(
  x, shape: tuple[int, ...], groups: Groups, output: Scaling
) -> str | None:
  """Checks x, and the scaling of the output whose scale the kernel finds.

  The kernel quantizes x in groups, as one or several arrays of `shape`.
  """
  if type(output) is not Blocks:  # Blocks find their own scales.
    reason = why_not_scaling(output, E4M3)
    if reason is not None:
      return reason
  return (
    why_not_format(groups.dtype, E4M3)
    or why_not_dtype(x.dtype)
    or why_not_groups(shape, groups.size)
  )


def why_not_written(
  shape: tuple[int, ...], output: Scaling, scale: Scales | None, layout: Layout
) -> str | None:
  """Checks an operand of this shape that a kernel writes in E4M3."""
  reason = why_not_scaling(output, E4M3) or why_not_columns(shape, layout)
  if reason is None and (scale is None or isinstance(scale, BlockScales)):
    return "kernels write operands with one known scale, got none"
  return reason


# --- Activation functions ----------------------------------------------------


def why_not_activation_input(
  x, activation: Activation, gated: bool, groups: Groups, output: Scaling, **_
) -> str | None:
  """Checks the arguments of `activation_input`."""
  *leading, n = x.shape
  if gated and n % 2:
    return f"gate and up must be of one width, got {n} for both"
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
  scale: Scales | None,
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
  scale: Scales | None,
  has_sums: bool,
  **_,
) -> str | None:
  """Checks the arguments of `activation_bwd_operands`."""
  (*leading, f), shape = dy.shape, parts[0].qvalue.shape
  if dy.shape != shape:
    return f"dy must have the input's shape {shape}, got {dy.shape}"
  if has_sums and len(parts) > 1:
    return "kernels sum the gradient of x, not of gate and up"
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
    "kernels support SiLU and GELU's tanh and sigmoid approximations, since "
    "Pallas cannot lower erf for a GPU; got activation='gelu'"
  )


def _why_not_parts(parts: Parts) -> str | None:
  x, *others = parts
  for up in others:
    if x.qvalue.shape != up.qvalue.shape:
      return (
        f"gate and up must be of one shape, got {x.qvalue.shape} and "
        f"{up.qvalue.shape}"
      )
    if x.group_size != up.group_size:
      return (
        f"gate and up must have groups of one size, got {x.group_size} and "
        f"{up.group_size}"
      )
  return next(filter(None, map(why_not_values, parts)), None)
