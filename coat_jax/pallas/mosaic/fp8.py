# SPDX-License-Identifier: Apache-2.0
"""The FP8 codecs of moments on tiles of registers.

E4M3, stochastic: neighbours are J 2^e with J in 0..15, so that their decoded
values are products of two numbers out of tables of sixteen, made once a group
and looked up by shuffles among its 16 lanes: no logarithm and no exponential
where the definition takes two of each.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.codecs.fp8 import (
  BoundedFP8,
  ExpandedFP8,
  ScaledFP8,
  log2_range,
)
from coat_jax.formats import E4M3, qmax
from coat_jax.pallas.mosaic import registers
from coat_jax.pallas.mosaic.moment_codecs import (
  Statistics,
  exp2_upper,
  exponent_bounds,
  extremes,
  octaves_between,
  one_and,
  register,
  uniform_times,
  with_sign,
)
from coat_jax.pallas.mosaic.registers import (
  Instructions,
  as_bits,
  as_float,
  spread,
)


@register(ScaledFP8)
@dataclasses.dataclass(frozen=True)
class _Scaled:
  codec: ScaledFP8

  def decode(self, codes, statistics, signed, on):
    del signed, on
    y = codes.astype(jnp.float32)
    return y * spread(statistics.amax * jnp.float32(1 / qmax(self.codec.dtype)))

  def encode(self, x, noise, signed, on):
    dtype = self.codec.dtype
    magnitude, amax, _ = extremes(x, signed)
    scale = _inverse(amax, _power_of_two(amax), on)
    y = magnitude * spread(scale) * qmax(dtype)
    if noise is not None:
      lower, upper = _neighbours(y, dtype)
      up = y - lower > uniform_times(noise, upper - lower)
      y = jnp.where(up, upper, lower)
    codes = on.to_fp8(with_sign(y, x if signed else None), dtype)
    return codes, Statistics(amax, None)


@register(ExpandedFP8)
@dataclasses.dataclass(frozen=True)
class _Expanded:
  codec: ExpandedFP8

  def decode(self, codes, statistics, signed, on):
    y = codes.astype(jnp.float32)
    _, root = self._power_and_root(statistics, on)
    top = spread(root * -math.log2(qmax(self.codec.dtype)))
    t = jnp.exp2(jnp.log2(jnp.abs(y)) * spread(root) + top)
    value = with_sign(t, y if signed else None)
    return value * spread(self._bound(statistics))

  def encode(self, x, noise, signed, on):
    dtype, negative = self.codec.dtype, x if signed else None
    magnitude, amax, amin = extremes(x, signed)
    down = _power_of_two(amax)
    statistics = self._statistics(amax, amin, down, on)
    bound = self._bound(statistics)
    scale = _inverse(bound, down, on)
    power, root = self._power_and_root(statistics, on)
    shift = jnp.where(bound > 0, power * -jnp.log2(bound), 0.0)
    e = jnp.exp2(jnp.log2(magnitude) * spread(power) + spread(shift))
    if noise is not None and dtype == E4M3:
      codes = _looked_up_codes(magnitude, e, negative, root, scale, noise, on)
      return codes, statistics
    y = e * qmax(dtype)
    if noise is not None:
      lower, upper = _neighbours(y, dtype)
      top = spread(root * -math.log2(qmax(dtype)))
      below = jnp.exp2(jnp.log2(lower) * spread(root) + top)
      above = jnp.exp2(jnp.log2(upper) * spread(root) + top)
      t = magnitude * spread(scale)
      up = t - below > uniform_times(noise, above - below)
      y = jnp.where(up, upper, lower)
    return on.to_fp8(with_sign(y, negative), dtype), statistics

  def _statistics(self, amax, amin, down, on) -> Statistics:
    ratio = amax * down * on.reciprocal(amin * down)
    ratio = jnp.where(amax > 0, ratio, 1.0)
    # An approximate logarithm of 1 + ulp must not be negative.
    octaves = jnp.maximum(jnp.log2(ratio), 2.0**-24)
    power = on.reciprocal(octaves) * (log2_range(self.codec.dtype) * 16)
    power = jnp.clip(power, 1.0, 255.0).astype(jnp.int32)  # Rounds down.
    return Statistics(amax, power.astype(jnp.uint8))

  def _bound(self, statistics: Statistics) -> Array:
    return statistics.amax

  def _power_and_root(self, statistics: Statistics, on):
    sixteenths = statistics.range.astype(jnp.int32).astype(jnp.float32)
    return sixteenths * (1 / 16), on.reciprocal(sixteenths) * 16.0


@register(BoundedFP8)
@dataclasses.dataclass(frozen=True)
class _Bounded(_Expanded):
  def _statistics(self, amax, amin, down, on):
    del down, on
    return exponent_bounds(amax, amin)

  def _bound(self, statistics):
    return exp2_upper(statistics)

  def _power_and_root(self, statistics, on):
    octaves = octaves_between(statistics)
    power = on.reciprocal(octaves) * log2_range(self.codec.dtype)
    return power, octaves * (1 / log2_range(self.codec.dtype))


def _power_of_two(amax: Array) -> Array:
  """A factor for amax so that its reciprocal is not subnormal, hence zero.

  It is a power of two and loses nothing (amin may become zero: then the power
  is the least in any case).
  """
  return jnp.where(amax > 2.0**100, 2.0**-64, 1.0)


def _inverse(bound: Array, down: Array, on: Instructions) -> Array:
  """1 / bound: not infinite for a group of zeros; a NaN stays."""
  return jnp.minimum(on.reciprocal(bound * down), 2.0**127) * down


def _neighbours(y: Array, dtype: DTypeLike) -> tuple[Array, Array]:
  """`formats.neighbours`; above qmax the upper one is left to saturation."""
  info = jnp.finfo(dtype)
  drop = 23 - info.nmant
  smallest = float(info.smallest_normal)
  # Among subnormals a step is that of the first normals, smallest..2 smallest.
  offset = jnp.where(y < smallest, smallest, 0.0)
  lower = as_bits(y + offset) & jnp.uint32(0xFFFFFFFF >> drop << drop)
  upper = lower + jnp.uint32(1 << drop)
  return as_float(lower) - offset, as_float(upper) - offset


def _looked_up_codes(magnitude, e, x, root, scale, noise, on) -> Array:
  """E4M3 codes, stochastic, of t = magnitude scale and e = t^k.

  Args:
    magnitude: f32 tile.
    e: f32 tile; off by an ulp it moves t's neighbours, hence no expectation.
    x: f32 tile whose signs the codes get, or None.
    root, scale: 1 / k and 1 / bound, [ROWS].
    noise: as in `encode`.
    on: where this runs.
  """
  # From bit 20 on these are the code of the lower neighbour.
  bits = on.e4m3_bits(e, qmax(E4M3))
  # It is J 2^e with J its mantissa bits, and 8 more unless it is subnormal.
  # Then the minimum is what there is.
  normal = (bits & jnp.uint32(0x7FFFFF)) | jnp.uint32(0x800000)
  significand = jnp.minimum(bits, normal) >> 20
  rest, gap, unit = on.powers(
    significand.astype(jnp.int32),
    (bits >> 23).astype(jnp.int32),
    root,
    scale,
  )
  # Up where t - lower > noise (upper - lower), all in the unit of the lower
  # one's exponent: where this is negative. Two fused operations.
  rest = one_and(noise) * gap + (rest - magnitude * unit)
  code = (bits >> 20) + (as_bits(rest) >> 31)
  # 448 is the last code but one; the last is NaN.
  code = jnp.minimum(code, jnp.uint32(0x7E))
  if x is not None:
    code = code | ((as_bits(x) >> 24) & jnp.uint32(0x80))
  return registers.as_dtype(code.astype(jnp.uint8), E4M3)
