# SPDX-License-Identifier: Apache-2.0
"""The codecs of `codecs.group` on blocks of registers.

`decode` and `encode` follow the definitions there, statistic by statistic. What
differs is how a quantity is computed, never which one it is:

  * A power is exp2(root log2 x) throughout.
  * |x| is compared by its bits: one minimum finds the smallest nonzero one.
  * A division by a statistic is a product with its reciprocal, one a group.
  * E4M3, stochastic: neighbours are J 2^e with J in 0..15, so that their
    decoded values are products of two numbers out of tables of sixteen, made
    once a group and looked up by shuffles among its 16 lanes: no logarithm and
    no exponential where the definition takes two of each.

So a value next to a rounding boundary may get the neighbouring code, and a
group next to a step of k another k: about as often as between two backends.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.codecs.fp8 import BoundedFP8, ExpandedFP8, ScaledFP8
from coat_jax.codecs.group import GroupCodec
from coat_jax.codecs.log8 import LogUniform
from coat_jax.formats import E4M3, qmax
from coat_jax.pallas.mosaic import registers
from coat_jax.pallas.mosaic.registers import (
  Instructions,
  as_bits,
  as_float,
  spread,
)

_TINY = float(jnp.finfo(jnp.float32).tiny)
_SIGN = 0x80000000
_NAN_EXPONENT = 255


class Statistics(NamedTuple):
  """A group's statistics as they rest, [ROWS]; None where there are none."""

  amax: Array
  range: Array | None


def decode(
  codec: GroupCodec,
  codes: Array,
  statistics: Statistics,
  signed: bool,
  on: Instructions,
) -> Array:
  """`codec.decode` of a block: f32."""
  if isinstance(codec, LogUniform):
    return _decode_log(codec, codes, statistics)
  assert isinstance(codec, ScaledFP8 | ExpandedFP8)
  y = codes.astype(jnp.float32)
  if isinstance(codec, ScaledFP8):
    return y * spread(statistics.amax * jnp.float32(1 / qmax(codec.dtype)))
  _, root = _power_and_root(codec, statistics, on)
  top = spread(root * -math.log2(qmax(codec.dtype)))
  t = jnp.exp2(jnp.log2(jnp.abs(y)) * spread(root) + top)
  return _with_sign(t, y if signed else None) * spread(
    _bound(codec, statistics)
  )


def encode(
  codec: GroupCodec,
  x: Array,
  noise: Array | None,
  signed: bool,
  on: Instructions,
) -> tuple[Array, Statistics]:
  """`codec.encode` of a block.

  Args:
    codec: with groups of 128.
    x: f32 block.
    noise: uint32 block whose low 16 bits are random, or None.
    signed: whether x may be negative.
    on: where this runs.

  Returns:
    Codes and statistics, as they rest.
  """
  magnitude = jnp.abs(x) if signed else x
  amax, amin = _extremes(x, magnitude, signed)
  if isinstance(codec, LogUniform):
    statistics = _exponent_bounds(amax, amin)
    return _log_codes(codec, x, magnitude, statistics, noise, on), statistics
  assert isinstance(codec, ScaledFP8 | ExpandedFP8)
  # A subnormal reciprocal would be zero. The factor is a power of two and loses
  # nothing (amin may become zero: then the power is the least in any case).
  down = jnp.where(amax > 2.0**100, 2.0**-64, 1.0)
  statistics = _statistics(codec, amax, amin, down, on)
  bound = _bound(codec, statistics)
  # Not infinite for a group of zeros; a NaN stays.
  scale = jnp.minimum(on.reciprocal(bound * down), 2.0**127) * down
  dtype, negative = codec.dtype, x if signed else None
  if isinstance(codec, ScaledFP8):
    y = magnitude * spread(scale) * qmax(dtype)
    if noise is not None:
      lower, upper = _neighbours(y, dtype)
      up = y - lower > _uniform_times(noise, upper - lower)
      y = jnp.where(up, upper, lower)
    return on.to_fp8(_with_sign(y, negative), dtype), statistics
  power, root = _power_and_root(codec, statistics, on)
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
    up = t - below > _uniform_times(noise, above - below)
    y = jnp.where(up, upper, lower)
  return on.to_fp8(_with_sign(y, negative), dtype), statistics


def _with_sign(magnitude: Array, x: Array | None) -> Array:
  if x is None:
    return magnitude
  return as_float(as_bits(magnitude) | (as_bits(x) & jnp.uint32(_SIGN)))


def _one_and(noise: Array) -> Array:
  """1 + `stochastic.low_half` of the noise, which becomes a mantissa: exact."""
  bits = (noise & jnp.uint32(0xFFFF)) * jnp.uint32(128)
  return as_float(bits + jnp.uint32(0x3F800040))


def _uniform_times(noise: Array, x: Array) -> Array:
  """The noise, in (0, 1), times x: one fused operation of a number in (1, 2).

  Were it two, it would be off by no more than 2^-23 x.
  """
  return _one_and(noise) * x - x


def _extremes(x: Array, magnitude: Array, signed: bool) -> tuple[Array, Array]:
  """amax, NaN where a value is not finite, and the nonzero amin.

  Where every value is zero amin's bits are those of no positive number, and
  larger than any as integers.
  """
  amax = jnp.max(magnitude, axis=1)  # Mosaic's maximum carries a NaN.
  amax = jnp.where(amax < _TINY, 0.0, amax)
  amax = jnp.where(amax < jnp.inf, amax, jnp.nan)
  # Modulo 2^32 zero and subnormals come after all others.
  bits = as_bits(x)
  if signed:
    least = jnp.min((bits << 1) - jnp.uint32(0x01000000), axis=1) >> 1
  else:
    least = jnp.min(bits - jnp.uint32(0x00800000), axis=1)
  return amax, as_float(least + jnp.uint32(0x00800000))


def _statistics(codec, amax, amin, down, on: Instructions) -> Statistics:
  if isinstance(codec, ScaledFP8):
    return Statistics(amax, None)
  if isinstance(codec, BoundedFP8):
    return _exponent_bounds(amax, amin)
  ratio = amax * down * on.reciprocal(amin * down)
  ratio = jnp.where(amax > 0, ratio, 1.0)
  # An approximate logarithm of 1 + ulp must not be negative.
  octaves = jnp.maximum(jnp.log2(ratio), 2.0**-24)
  log2_range = math.log2(qmax(codec.dtype) ** 2 / 2)
  power = on.reciprocal(octaves) * (log2_range * 16)
  power = jnp.clip(power, 1.0, 255.0).astype(jnp.int32)  # Rounds down.
  return Statistics(amax, power.astype(jnp.uint8))


def _exponent_bounds(amax: Array, amin: Array) -> Statistics:
  bits = as_bits(amax)
  upper = (bits >> 23) + jnp.where((bits & 0x7FFFFF) > 0, 1, 0).astype("uint32")
  upper = jnp.clip(upper.astype(jnp.int32), 1, _NAN_EXPONENT - 1)
  lower = (as_bits(amin) >> 23).astype(jnp.int32)
  lower = jnp.minimum(jnp.maximum(lower, 1), upper)
  upper = jnp.where(amax == amax, upper, _NAN_EXPONENT)
  return Statistics(upper.astype(jnp.uint8), lower.astype(jnp.uint8))


def _octaves(statistics: Statistics) -> Array:
  assert statistics.range is not None
  upper = statistics.amax.astype(jnp.int32)
  lower = statistics.range.astype(jnp.int32)
  return jnp.maximum(upper - lower, 1).astype(jnp.float32)


def _bound(codec: GroupCodec, statistics: Statistics) -> Array:
  """f32: amax, or 2^(amax - 127)."""
  if not isinstance(codec, BoundedFP8 | LogUniform):
    return statistics.amax
  exponent = statistics.amax.astype(jnp.int32)
  value = as_float((exponent << 23).astype(jnp.uint32))
  return jnp.where(exponent == _NAN_EXPONENT, jnp.nan, value)


def _power_and_root(codec, statistics: Statistics, on: Instructions):
  if isinstance(codec, BoundedFP8):
    log2_range = math.log2(qmax(codec.dtype) ** 2 / 2)
    octaves = _octaves(statistics)
    power = on.reciprocal(octaves) * log2_range
    return power, octaves * (1 / log2_range)
  assert statistics.range is not None
  sixteenths = statistics.range.astype(jnp.int32).astype(jnp.float32)
  return sixteenths * (1 / 16), on.reciprocal(sixteenths) * 16.0


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
    magnitude: f32 block.
    e: f32 block; off by an ulp it moves t's neighbours, hence no expectation.
    x: f32 block whose signs the codes get, or None.
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
  rest = _one_and(noise) * gap + (rest - magnitude * unit)
  code = (bits >> 20) + (as_bits(rest) >> 31)
  # 448 is the last code but one; the last is NaN.
  code = jnp.minimum(code, jnp.uint32(0x7E))
  if x is not None:
    code = code | ((as_bits(x) >> 24) & jnp.uint32(0x80))
  return registers.as_dtype(code.astype(jnp.uint8), E4M3)


def _decode_log(codec: LogUniform, codes: Array, statistics: Statistics):
  steps = 126 if codec.signed else 254
  level = codes.astype(jnp.int32).astype(jnp.float32)
  sign = level if codec.signed else None
  level = jnp.abs(level) if codec.signed else level
  bound = _bound(codec, statistics)
  half_step = _octaves(statistics) * (0.5 / steps)
  # From the upper bound down, up to 253 octaves: in two halves, for 2^-253 is
  # zero where 2^127 2^-253 is not.
  root = jnp.exp2((level - (steps + 1)) * spread(half_step))
  # Code 0 is zero, in a group that holds a NaN it is NaN: a product, not a
  # choice.
  magnitude = root * spread(bound) * (root * jnp.minimum(level, 1.0))
  return _with_sign(magnitude, sign)


def _log_codes(codec, x, magnitude, statistics: Statistics, noise, on) -> Array:
  steps = 126 if codec.signed else 254
  octaves = _octaves(statistics)
  step = octaves * (1 / steps)
  inverse = on.reciprocal(octaves) * steps
  base = statistics.amax.astype(jnp.int32).astype(jnp.float32) - 127 - octaves
  above = jnp.log2(magnitude) - spread(base)
  place = above * spread(inverse)
  if noise is None:
    _, level = on.floor(place + 0.5)
  else:
    whole, level = on.floor(place)
    # All over the lower neighbour: x / lower = 2^(part of a step). Up where
    # 2^part - 1 > noise (2^step - 1), which is where this is negative.
    gap = jnp.exp2(step) - 1
    rest = spread(1 - gap) - jnp.exp2(above - whole * spread(step))
    rest = _one_and(noise) * spread(gap) + rest
    level = level + (as_bits(rest) >> 31).astype(jnp.int32)
  code = level + 1
  code = jnp.clip(code, 1, steps + 1)
  code = jnp.where(magnitude >= _TINY, code, 0)
  if codec.signed:
    return jnp.where(x < 0, -code, code).astype(jnp.int8)
  return code.astype(jnp.uint8)
