# SPDX-License-Identifier: Apache-2.0
"""Quantized arrays with one scale per tensor or per group of values.

Quantizing divides by the scale; dequantizing multiplies by it. The scale is
amax / qmax: the largest magnitude in the tensor or group, divided by the
format's largest number. A group is `group_size` consecutive values along the
last axis; the last group may be short.

COAT uses two granularities (arXiv:2410.19313, section 5):
  * Matmul operands have one f32 scale per tensor.
  * Inputs of non-linear operations have one BF16 scale per 16 values. The scale
    is rounded *up* to BF16 before the division, so no quotient exceeds qmax.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from coat_jax.numerics.checks import (
  check_array,
  check_float_dtype,
  check_group_size,
  dtype_of,
  refuse,
)
from coat_jax.numerics.formats import E4M3, qmax, saturating_cast

_ONE_SCALE = "pass group_size=None for one scale per tensor"
# Below this, f32 and BF16 are subnormal, and accelerators flush them to zero.
_SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["qvalue", "scale"],
  meta_fields=["group_size"],
)
@dataclasses.dataclass(frozen=True)
class QTensor:
  """A quantized array and its scale: x ≈ qvalue * scale.

  Attributes:
    qvalue: [..., n] in FP8 or another format of `formats`.
    scale: [] for one scale per tensor, else [..., ceil(n / group_size)].
    group_size: number of values that share a scale; None for one scale per
      tensor. This field is static: JAX transformations see only the two arrays.
  """

  # Any instead of Array, because JAX also puts specs and shapes here.
  qvalue: Any
  scale: Any
  group_size: int | None

  def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
    """Returns qvalue * scale, computed in f32 and cast to `dtype`.

    Raises:
      TypeError: `dtype` is not a floating dtype of 16 bits or more.
      ValueError: the scale's shape does not fit qvalue and group_size.
    """
    op, shape = "dequantize", self.qvalue.shape
    check_float_dtype(op, "dtype", dtype)
    scale = _checked_scale(op, self.scale, shape, self.group_size)
    if (size := self.group_size) is not None:
      scale = jnp.repeat(scale[..., 0], size, axis=-1)[..., : shape[-1]]
    return (self.qvalue.astype(jnp.float32) * scale).astype(dtype)

  def dequantize_groups(self) -> Array:
    """Dequantizes to f32 [..., groups, group_size]; pads a short last group.

    If the tensor has one scale, each row is one group.
    """
    shape, size = self.qvalue.shape, self.group_size
    scale = _checked_scale("dequantize", self.scale, shape, size)
    codes = split_groups(self.qvalue, shape[-1] if size is None else size)
    # If we repeated the scale to [..., n], XLA for TPUs would write the result
    # to memory.
    return codes.astype(jnp.float32) * scale


def num_groups(n: int, group_size: int) -> int:
  """Returns the number of groups for n values; the last one may be short."""
  return -(-n // group_size)


def split_groups(x: Array, group_size: int, fill: float = 0) -> Array:
  """Reshapes [..., n] to [..., groups, group_size]; pads a short last group."""
  n = x.shape[-1]
  groups = num_groups(n, group_size)
  missing = groups * group_size - n
  if missing:
    pad = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    x = jnp.pad(x, pad, constant_values=fill)
  return x.reshape(*x.shape[:-1], groups, group_size)


def join_groups(x: Array, n: int) -> Array:
  """Inverts `split_groups`: [..., groups, group_size] to [..., n]."""
  *rows, groups, size = x.shape
  return x.reshape(*rows, groups * size)[..., :n]


def group_amax(x: Float[Array, "*b n"], group_size: int) -> Array:
  """Returns each group's amax, f32 [..., groups]; NaN if the group has one."""
  bits = _magnitude_bits(split_groups(x, group_size))
  return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)


def tensor_amax(
  x: Float[Array, "*s"], *, axis_names: tuple[str, ...] = ()
) -> Array:
  """Returns a tensor's largest magnitude, f32 []; NaN if any value is NaN.

  Inside `jax.shard_map`, `axis_names` are the axes over which the tensor is
  split; devices along them exchange one number each.
  """
  return bits_to_amax(_magnitude_bits(x), axis_names)


def bits_to_amax(bits: Array, axis_names: tuple[str, ...] = ()) -> Array:
  """Computes `tensor_amax` from the f32 bits of magnitudes, given as int32."""
  largest = jnp.max(bits, initial=0)
  # `pmax` raises an error if the value varies over only some of the axes. If
  # it varies over none, shard_map may not know over which (check_vma=False).
  varying = jax.typeof(largest).manual_axis_type.varying
  axis_names = tuple(x for x in axis_names if not varying or x in varying)
  if axis_names:
    largest = jax.lax.pmax(largest, axis_names)
  return jax.lax.bitcast_convert_type(largest, jnp.float32)


def _magnitude_bits(x: Array) -> Array:
  """Returns the f32 bits of |x| as int32, which are ordered like magnitudes."""
  # As an integer, NaN is larger than infinity, so the maximum of integers
  # propagates NaN. The maximum of floats does so only on some backends.
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
  return bits & 0x7FFFFFFF


def amax_to_scale(
  amax: Array, dtype: DTypeLike = E4M3, scale_dtype: DTypeLike = jnp.float32
) -> Array:
  """Returns the scale of a group from its amax: amax * float32(1 / qmax).

  A division by qmax would give different scales on different devices, because
  only some compilers replace it with this multiplication. The scale is at least
  f32's smallest normal number, also for a group of zeros. A bfloat16 scale is
  rounded up.
  """
  if dtype_of(scale_dtype) not in (jnp.float32, jnp.bfloat16):
    rule, remedy = "float32 or bfloat16", "pass one of these"
    refuse(ValueError, "quantize", "scale_dtype", rule, scale_dtype, remedy)
  scale = jnp.maximum(amax * jnp.float32(1 / qmax(dtype)), _SMALLEST_SCALE)
  if jnp.dtype(scale_dtype) == jnp.bfloat16:
    return _bfloat16_rounded_up(scale)
  return scale


def power_of_two_scale(amax: Array, dtype: DTypeLike = E4M3) -> Array:
  """Returns the smallest normal f32 power of two with amax / scale <= qmax.

  A group of zeros has scale 1. If amax is NaN or infinite, so is the scale.
  """
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  # Doubling a positive f32 adds 2^23 to its bits, read as an integer.
  of_qmax = np.float32(qmax(dtype)).view(np.int32)
  exponent = (bits - of_qmax + jnp.int32(2**23 - 1)) >> 23
  biased = jnp.clip(exponent + 127, 1, 254) << 23
  scale = jax.lax.bitcast_convert_type(biased, jnp.float32)
  scale = jnp.where(amax == 0, jnp.float32(1), scale)
  return jnp.where(amax < jnp.inf, scale, amax)


def _bfloat16_rounded_up(x: Array) -> Array:
  """Rounds a positive f32 to the nearest bfloat16 that is not smaller."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  up = (bits + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
  up = jnp.where(jnp.isfinite(x), up, bits)
  return jax.lax.bitcast_convert_type(up, jnp.float32).astype(jnp.bfloat16)


def quantize_with_scale(
  x: Float[Array, "*b n"],
  scale: Array,
  *,
  group_size: int | None,
  dtype: DTypeLike = E4M3,
) -> QTensor:
  """Quantizes with known scales, by the formula of `quantize`."""
  divisor = _checked_scale("quantize_with_scale", scale, x.shape, group_size)
  groups = x if group_size is None else split_groups(x, group_size)
  codes = saturating_cast(groups.astype(jnp.float32) / divisor, dtype)
  if group_size is not None:
    codes = join_groups(codes, x.shape[-1])
  return QTensor(codes, scale, group_size)


def quantize(
  x: Float[Array, "*b n"],
  *,
  group_size: int | None,
  dtype: DTypeLike = E4M3,
  scale_dtype: DTypeLike = jnp.float32,
) -> QTensor:
  """Quantizes with one scale per `group_size` values of the last axis.

  scale = max(amax * float32(1 / qmax), 2^-126), or 1 for a group of zeros; a
  BF16 scale is rounded up. qvalue = rne(clip(x / scale, ±qmax)), where rne
  rounds to the nearest value of `dtype`, ties to even.

  Args:
    x: float [..., n]. A NaN or infinity makes its whole group NaN.
    group_size: at least 1; the last group may be short. None for one scale per
      array or, inside `jax.shard_map`, per shard.
    dtype: E4M3, E5M2 or INT8.
    scale_dtype: float32 or bfloat16.

  Returns:
    A `QTensor`: qvalue [..., n] in `dtype`; scale [..., ceil(n / group_size)],
    or [] if group_size is None.

  Raises:
    TypeError: x is not a floating-point array, or group_size is not a whole
      number.
    ValueError: group_size is below 1 or given for a scalar x, or `dtype` or
      `scale_dtype` is not one of those listed above.

  Source: arXiv:2410.19313, section 5; docs/deviations.md 1 and 2.
  """
  check_array("quantize", "x", x, "a floating-point array", remedy="cast it")
  if group_size is None:
    amax = tensor_amax(x)
  else:
    check_group_size("quantize", group_size, _ONE_SCALE)
    if not x.ndim:
      rule = "an array with an axis to group"
      refuse(ValueError, "quantize", "x", rule, x, _ONE_SCALE)
    amax = group_amax(x, group_size)
  scale = amax_to_scale(amax, dtype, scale_dtype)
  return quantize_with_scale(x, scale, group_size=group_size, dtype=dtype)


def times_scales(x: Array, a: Array | float, b: Array | float) -> Array:
  """Returns x * a * b; x is a matmul of codes whose scales are a and b.

  We compute x * (a * b). If a * b is below f32's smallest normal number, as for
  gradients near 1e-34, we instead multiply x by a * b * 2^64 and then by 2^-64.
  """
  raised = jnp.minimum(a, b) * 2.0**64 * jnp.maximum(a, b)
  is_raised = raised < 2.0 ** (64 - 126)
  x = x * jnp.where(is_raised, raised, a * b)
  return x * jnp.where(is_raised, 2.0**-64, 1.0)


def _checked_scale(op, scale, shape, group_size) -> Array:
  """Checks a scale's shape; returns the scale, f32 [] or [..., groups, 1]."""
  if group_size is None:
    want = ()
  else:
    check_group_size(op, group_size, _ONE_SCALE)
    want = (*shape[:-1], num_groups(shape[-1], group_size))
  if scale.shape != want:
    raise ValueError(
      f"{op}: values of shape {tuple(shape)} with group_size={group_size} have "
      f"scales of shape {want}, got {scale.shape}; pass the group_size that "
      "they were quantized with"
    )
  scale = scale.astype(jnp.float32)
  return scale if group_size is None else scale[..., None]
