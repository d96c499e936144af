# SPDX-License-Identifier: Apache-2.0
"""Quantized arrays: one scale per tensor, or per group of a row.

A `QTensor` is a pair (qvalue, scale) with x ≈ qvalue * scale. `scale` always
dequantizes (scale = amax / qmax); it is never the multiplier on the way in.
Groups run along the last axis and never across rows, so that the scale has a
row for each row of x and both are sharded alike; the last group may be short.

Two granularities are enough (arXiv:2410.19313, section 5):
  * operands of a matmul have one f32 scale for the tensor, found in two stages
    (Group Scaling): the maxima of groups, then their maximum;
  * inputs of non-linear operations have a BF16 scale per 16 values. BF16 scales
    are rounded *up* and x is divided by the stored scale, so a quotient never
    exceeds qmax and dequantizing is the exact inverse of what was divided.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from coat_jax.formats import E4M3, qmax, saturating_cast

# Below this, f32 and BF16 are subnormal and accelerators flush them to zero.
_SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)


class QTensor(NamedTuple):
  """A quantized array and what multiplies it back: x ≈ qvalue * scale.

  Attributes:
    qvalue: [..., n] in FP8 or another of `formats`.
    scale: [] for one scale per tensor, else [..., ceil(n / group_size)].
  """

  qvalue: Array
  scale: Array


def num_groups(n: int, group_size: int) -> int:
  """Groups in a row of `n` values, the last one possibly short."""
  return -(-n // group_size)


def split_groups(x: Array, group_size: int, fill: float = 0) -> Array:
  """[..., n] to [..., groups, group_size], a short last group filled up."""
  n = x.shape[-1]
  groups = num_groups(n, group_size)
  missing = groups * group_size - n
  if missing:
    pad = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    x = jnp.pad(x, pad, constant_values=fill)
  return x.reshape(*x.shape[:-1], groups, group_size)


def join_groups(x: Array, n: int) -> Array:
  """[..., groups, group_size] to [..., n]: the inverse of `split_groups`."""
  *rows, groups, size = x.shape
  return x.reshape(*rows, groups * size)[..., :n]


def group_amax(x: Float[Array, "*b n"], group_size: int) -> Array:
  """Largest magnitude of each group: f32 [..., ceil(n / group_size)].

  NaN where a group holds one.
  """
  bits = _magnitude_bits(split_groups(x, group_size))
  return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)


def tensor_amax(
  x: Float[Array, "*s"], *, axis_names: tuple[str, ...] = ()
) -> Array:
  """Largest magnitude of a tensor: f32 scalar, NaN where it holds one.

  A kernel that has the values in registers anyway finds those of its tiles for
  nothing, and this is then taken of those few (Group Scaling).

  Args:
    x: of any shape.
    axis_names: inside `jax.shard_map`, the axes that the tensor is split over:
      devices along them compare one number each. Of other axes, such as stages
      of a pipeline, each device has a tensor of its own.
  """
  return bits_to_amax(_magnitude_bits(x), axis_names)


def bits_to_amax(bits: Array, axis_names: tuple[str, ...] = ()) -> Array:
  """`tensor_amax` of magnitudes given as the int32 with their f32's bits."""
  largest = jnp.max(bits, initial=0)
  if axis_names:
    largest = jax.lax.pmax(largest, axis_names)
  return jax.lax.bitcast_convert_type(largest, jnp.float32)


def _magnitude_bits(x: Array) -> Array:
  """|x| as the int32 with the bits of its f32.

  Magnitudes compare as their bits do, and a NaN's are above infinity's: the
  largest of integers is the same everywhere and carries a NaN, where backends'
  largest floats do not agree on that.
  """
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
  return bits & 0x7FFFFFFF


def amax_to_scale(
  amax: Array, dtype: DTypeLike = E4M3, scale_dtype: DTypeLike = jnp.float32
) -> Array:
  """Scale of a group from its largest magnitude: amax * float32(1 / qmax).

  Written as a multiplication, since compilers turn the division by a constant
  into one, and then not all alike. A group of zeros has scale 1.

  Args:
    amax: f32 array, not negative.
    dtype: the format of the codes.
    scale_dtype: float32, or bfloat16 (rounded up).

  Returns:
    Array of amax's shape in `scale_dtype`.
  """
  scale = jnp.maximum(amax * jnp.float32(1 / qmax(dtype)), _SMALLEST_SCALE)
  scale = jnp.where(amax == 0, jnp.float32(1), scale)
  if jnp.dtype(scale_dtype) == jnp.bfloat16:
    return _bfloat16_rounded_up(scale)
  return scale.astype(scale_dtype)


def power_of_two_scale(amax: Array, dtype: DTypeLike = E4M3) -> Array:
  """The smallest power of two with which a group of this amax fits qmax.

  A floating-point code times such a scale has the code's mantissa, whatever the
  scale: values quantized once can be quantized again in other groups and stay
  what they are, but those near the format's smallest.

  Args:
    amax: f32 array, not negative.
    dtype: the format of the codes.

  Returns:
    f32 of amax's shape; 1 for a group of zeros, and amax where that is NaN or
    infinite.
  """
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  # As integers f32 values count up, 2^23 of them to a factor of two.
  of_qmax = np.float32(qmax(dtype)).view(np.int32)
  exponent = (bits - of_qmax + jnp.int32(2**23 - 1)) >> 23
  biased = jnp.clip(exponent + 127, 1, 254) << 23
  scale = jax.lax.bitcast_convert_type(biased, jnp.float32)
  scale = jnp.where(amax == 0, jnp.float32(1), scale)
  return jnp.where(amax < jnp.inf, scale, amax)


def _bfloat16_rounded_up(x: Array) -> Array:
  """Positive f32 to the nearest bfloat16 that is not smaller."""
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
  """Quantizes with scales already known: qvalue = rne(clip(x / scale, ±qmax)).

  Args:
    x: Float [..., n].
    scale: [] where group_size is None, else [..., ceil(n / group_size)].
    group_size: values that share one scale; None for one scale per tensor.
    dtype: E4M3, E5M2 or INT8.

  Returns:
    QTensor of x's shape with this scale.

  Raises:
    ValueError: the scale's shape is not that of x and group_size.
  """
  divisor = _spread_scale("quantize_with_scale", scale, x.shape, group_size)
  return QTensor(saturating_cast(x.astype(jnp.float32) / divisor, dtype), scale)


def quantize(
  x: Float[Array, "*b n"],
  *,
  group_size: int | None,
  dtype: DTypeLike = E4M3,
  scale_dtype: DTypeLike = jnp.float32,
) -> QTensor:
  """Quantizes with one scale per `group_size` values of the last axis.

  scale = amax * float32(1 / qmax), 1 for a group of zeros, rounded up where it
  is stored in BF16; qvalue = rne(clip(x / scale, ±qmax)).

  Args:
    x: Float [..., n]. A NaN stays a NaN and touches no other group.
    group_size: at least 1; the last group may be short; None gives one scale
      for the whole array, inside `jax.shard_map` for each device's shard.
    dtype: E4M3, E5M2 or INT8.
    scale_dtype: float32 or bfloat16.

  Returns:
    QTensor: qvalue [..., n] in `dtype`, scale [..., ceil(n / group_size)] or
    [].

  Raises:
    ValueError: group_size below 1.

  Source: arXiv:2410.19313, section 5; docs/deviations.md 1 and 2.
  """
  if group_size is None:
    amax = tensor_amax(x)
  else:
    _check_group_size("quantize", group_size)
    amax = group_amax(x, group_size)
  scale = amax_to_scale(amax, dtype, scale_dtype)
  return quantize_with_scale(x, scale, group_size=group_size, dtype=dtype)


def dequantize(
  q: QTensor,
  *,
  group_size: int | None,
  dtype: DTypeLike = jnp.float32,
) -> Array:
  """The values that codes stand for: qvalue * scale, computed in f32.

  Args:
    q: what `quantize` returned.
    group_size: as it was given to `quantize`.
    dtype: dtype of the result.

  Returns:
    Array of qvalue's shape in `dtype`.

  Raises:
    ValueError: the scale's shape is not that of qvalue and group_size.
  """
  scale = _spread_scale("dequantize", q.scale, q.qvalue.shape, group_size)
  return (q.qvalue.astype(jnp.float32) * scale).astype(dtype)


def times_scales(x: Array, a: Array | float, b: Array | float) -> Array:
  """x a b, of sums of products of codes that have these two scales.

  The scales are multiplied in one after the other, the smaller one first: of
  gradients near 1e-34 the product of both is below f32's smallest number.
  """
  return x * jnp.minimum(a, b) * jnp.maximum(a, b)


def _check_group_size(op: str, group_size: int) -> None:
  if group_size < 1:
    raise ValueError(
      f"{op}: group_size must be at least 1, got {group_size}; pass "
      "group_size=None for one scale per tensor"
    )


def _spread_scale(op, scale, shape, group_size) -> Array:
  """Scale per value, f32: [] or [..., groups] to what broadcasts to `shape`."""
  if group_size is None:
    want = ()
  else:
    _check_group_size(op, group_size)
    want = (*shape[:-1], num_groups(shape[-1], group_size))
  if scale.shape != want:
    raise ValueError(
      f"{op}: values of shape {tuple(shape)} with group_size={group_size} have "
      f"scales of shape {want}, got {scale.shape}; pass the group_size that "
      "they were quantized with"
    )
  scale = scale.astype(jnp.float32)
  if group_size is None:
    return scale
  return jnp.repeat(scale, group_size, axis=-1)[..., : shape[-1]]
