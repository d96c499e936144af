# SPDX-License-Identifier: Apache-2.0
"""FP8 and INT8 formats: their limits, saturating casts, neighboring values.

By default, E4M3 (4 exponent bits, 3 mantissa bits, no infinity) is for
activations and weights, and E5M2 (more range, less precision) for gradients. No
kernel supports INT8.

A plain cast to FP8 has two traps:
  * A JAX cast does not saturate: 465 becomes NaN in E4M3, and 61440 becomes
    infinity in E5M2.
  * On a GPU, XLA drops pairs of conversions f32 -> FP8 -> f32 inside a jitted
    function ("excess precision"). XLA may also convert through f16, which
    rounds twice. A function would then compute with values that differ from
    those that it saves for the backward pass.
`saturating_cast` avoids both: it first clips and rounds to the format's values
in f32, so the cast is exact. All casts in this package use it, except in
kernels and in `ops.quantize`, where neither trap can occur.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from coat_jax.numerics.checks import dtype_of

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
INT8 = jnp.int8


def as_format(dtype: DTypeLike) -> DTypeLike:
  """Returns the format for a dtype or name; raises ValueError if unknown."""
  found = dtype_of(dtype)
  for known in (E4M3, E5M2, INT8):
    if found is not None and found == jnp.dtype(known):
      return known
  names = ", ".join(known.name for known in _FORMATS)
  got = repr(dtype) if found is None else found.name
  raise ValueError(
    f"formats: the dtype must be one of {names}, got {got}; pass one of these"
  )


def qmax(dtype: DTypeLike) -> float:
  """Returns the largest magnitude: 448 (E4M3), 57344 (E5M2) or 127 (INT8)."""
  return _format(dtype).qmax


def is_fp8(dtype: DTypeLike) -> bool:
  """Returns whether a dtype is one of the FP8 formats, E4M3 or E5M2."""
  return jnp.dtype(dtype) in (jnp.dtype(E4M3), jnp.dtype(E5M2))


def accumulator(dtype: DTypeLike) -> DTypeLike:
  """Returns the dtype in which matmuls accumulate: f32, or int32 for INT8."""
  return _format(dtype).accumulator


def array_bytes(shape: Sequence[int], dtype: np.dtype) -> int:
  """Counts the bytes of an array; XLA stores two int4 values in one byte."""
  size = math.prod(shape)
  return -(-size // 2) if dtype == jnp.int4 else size * dtype.itemsize


def saturating_cast(x: Float[Array, "*s"], dtype: DTypeLike) -> Array:
  """Casts floats to a format: clips them to ±qmax, rounds to nearest even.

  NaN stays NaN in FP8, and becomes 0 in INT8, which has no NaN. In both cases,
  the dequantized value is NaN, because a group with a NaN has the scale NaN.
  """
  x = jnp.clip(x.astype(jnp.float32), -qmax(dtype), qmax(dtype))
  return _format(dtype).nearest(x).astype(dtype)


def neighbours(x: Float[Array, "*s"], dtype: DTypeLike) -> tuple[Array, Array]:
  """Returns a format's largest value <= x, and its next larger value.

  x is f32 with 0 <= x <= qmax; both results are f32 and exact in `dtype`. If x
  is qmax, both results are qmax; if x is NaN, both are NaN.
  """
  lower, upper = _format(dtype).around(x)
  upper = jnp.minimum(upper, qmax(dtype))
  is_nan = jnp.isnan(x)
  return jnp.where(is_nan, x, lower), jnp.where(is_nan, x, upper)


# Gradients are clipped to this magnitude, so that their squares are finite.
ROOT_OF_LARGEST = 2.0**63


def with_finite_square(x: Array) -> Array:
  """Clips f32 to ±2^63; the result is NaN where x is not finite.

  Squares of the results are at most 2^126, so a sum of up to three of them is
  finite.
  """
  bound = jnp.clip(x, -ROOT_OF_LARGEST, ROOT_OF_LARGEST)
  return jnp.where(jnp.abs(x) < jnp.inf, bound, jnp.nan)


class _FP8:
  """A floating-point format with few mantissa bits and subnormal numbers."""

  accumulator = jnp.float32

  def __init__(self, dtype: DTypeLike):
    limits = jnp.finfo(dtype)
    self.qmax = float(limits.max)
    self._smallest = float(limits.smallest_subnormal)
    self._smallest_normal = float(limits.smallest_normal)
    # The number of f32's mantissa bits that the format lacks.
    self._dropped_bits = 23 - limits.nmant

  def nearest(self, x: Array) -> Array:
    """Rounds f32 within ±qmax to the nearest value, ties to even."""
    drop = self._dropped_bits
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Add half a step if the last kept bit is 1, else half a step minus 1. Ties
    # then round to even.
    half = jnp.uint32((1 << (drop - 1)) - 1) + ((bits >> drop) & jnp.uint32(1))
    normal = _truncated(bits + half, drop)
    step = self._smallest
    subnormal = jnp.round(x * (1 / step)) * step
    rounded = jnp.where(jnp.abs(x) < self._smallest_normal, subnormal, normal)
    return jnp.where(jnp.isnan(x), x, rounded)

  def around(self, x: Array) -> tuple[Array, Array]:
    """Returns the format's largest value <= x, and the next; x is f32 >= 0."""
    drop, step = self._dropped_bits, self._smallest
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    is_normal = x >= self._smallest_normal
    subnormal = jnp.floor(x * (1 / step)) * step
    lower = jnp.where(is_normal, _truncated(bits, drop), subnormal)
    above = _truncated(bits + jnp.uint32(1 << drop), drop)
    return lower, jnp.where(is_normal, above, subnormal + step)


class _Integer:
  """A symmetric signed integer format, which does not use -qmax - 1."""

  accumulator = jnp.int32

  def __init__(self, dtype: DTypeLike):
    self.qmax = float(jnp.iinfo(dtype).max)

  def nearest(self, x: Array) -> Array:
    return jnp.where(jnp.isnan(x), 0, jnp.round(x))

  def around(self, x: Array) -> tuple[Array, Array]:
    lower = jnp.floor(x)
    return lower, lower + 1


_FORMATS: dict[jnp.dtype, _FP8 | _Integer] = {
  jnp.dtype(E4M3): _FP8(E4M3),
  jnp.dtype(E5M2): _FP8(E5M2),
  jnp.dtype(INT8): _Integer(INT8),
}


def _format(dtype: DTypeLike) -> _FP8 | _Integer:
  return _FORMATS[jnp.dtype(as_format(dtype))]


def _truncated(bits: Array, drop: int) -> Array:
  """Clears the lowest `drop` bits of an f32, given as uint32."""
  kept = bits & jnp.uint32(0xFFFFFFFF >> drop << drop)
  return jax.lax.bitcast_convert_type(kept, jnp.float32)
