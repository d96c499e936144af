# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes moments in registers with the FP8 codecs.

For each value, stochastic rounding must decode the two neighboring codes. An
E4M3 code stands for J 2^i with J in 0..15. If range expansion has raised values
to the power k, the code decodes to (J 2^i)^a, where a = 1 / k. The kernel looks
up J^a and 2^(a i) in tables of 16 entries, which saves two logarithms and two
exponentials per value. Each of the 16 lanes that share a group computes one
entry of each table. A lane reads entries of the others with shuffles.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from coat_jax.codecs.fp8 import (
  BoundedFP8,
  ExpandedFP8,
  ScaledFP8,
  log2_range,
)
from coat_jax.codecs.group import Encoded
from coat_jax.numerics.formats import E4M3, qmax
from coat_jax.pallas.mosaic.moment_codecs import (
  Decoded,
  FittedCodec,
  exp2_upper,
  exponent_bounds,
  from_bytes,
  in_bytes,
  octaves_between,
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
class _Scaled(FittedCodec):
  codec: ScaledFP8

  def decode(self, encoded, signed, on):
    del signed, on
    scale = encoded.amax * jnp.float32(1 / qmax(self.codec.dtype))
    return Decoded(encoded.codes.astype(jnp.float32), scale)

  def fit(self, amax, amin, on):
    del amin
    return amax, _inverse(amax, on)

  def codes(self, x, fit, noise, signed, on):
    dtype, (amax, scale) = self.codec.dtype, fit
    magnitude = jnp.abs(x) if signed else x
    y = magnitude * spread(scale) * qmax(dtype)
    if noise is not None:
      lower, upper = _neighbours(y, dtype)
      up = y - lower > uniform_times(noise, upper - lower)
      y = jnp.where(up, upper, lower)
    codes = on.to_fp8(with_sign(y, x if signed else None), dtype)
    return Encoded(codes, amax, None)  # pyright: ignore[reportArgumentType]


class _Fit(NamedTuple):
  """The 32-bit parameters with which a group's values are encoded."""

  amax: Array  # The amax to store, not yet cast to its dtype in memory.
  range: Array  # The range to store, not yet cast either.
  power: Array  # k: x is mapped to 2^(k log2 |x| + shift).
  shift: Array
  root: Array  # 1 / k.
  scale: Array  # 1 / the group's upper bound.


@register(ExpandedFP8)
@dataclasses.dataclass(frozen=True)
class _Expanded(FittedCodec):
  codec: ExpandedFP8

  def decode(self, encoded, signed, on):
    y = encoded.codes.astype(jnp.float32)
    bound, root = self._bound_and_root(encoded, on)
    top = spread(root * -math.log2(qmax(self.codec.dtype)))
    t = jnp.exp2(jnp.log2(jnp.abs(y)) * spread(root) + top)
    return Decoded(with_sign(t, y if signed else None), bound)

  def fits_as(self, other):
    return super().fits_as(other) and other.codec.dtype == self.codec.dtype

  def codes(self, x, fit, noise, signed, on):
    dtype, negative = self.codec.dtype, x if signed else None
    magnitude = jnp.abs(x) if signed else x
    statistics = self._stored(fit)
    e = jnp.exp2(jnp.log2(magnitude) * spread(fit.power) + spread(fit.shift))
    if noise is not None and dtype == E4M3:
      codes = _looked_up_codes(magnitude, e, negative, fit, noise, on)
      return Encoded(codes, *statistics)
    y = e * qmax(dtype)
    if noise is not None:
      lower, upper = _neighbours(y, dtype)
      top = spread(fit.root * -math.log2(qmax(dtype)))
      below = jnp.exp2(jnp.log2(lower) * spread(fit.root) + top)
      above = jnp.exp2(jnp.log2(upper) * spread(fit.root) + top)
      t = magnitude * spread(fit.scale)
      up = t - below > uniform_times(noise, above - below)
      y = jnp.where(up, upper, lower)
    return Encoded(on.to_fp8(with_sign(y, negative), dtype), *statistics)

  def fit(self, amax, amin, on):
    log2_amax = jnp.log2(amax)
    # A group gets the largest power if its magnitudes are equal or all zero, or
    # if it contains NaN.
    octaves = jnp.maximum(log2_amax - jnp.log2(amin), 2.0**-24)
    octaves = jnp.where(amax > 0, octaves, 2.0**-24)
    power = on.reciprocal(octaves) * (log2_range(self.codec.dtype) * 16)
    # `power` is in sixteenths, and the definition rounds it down. Subtracting
    # 0.5 and rounding to nearest even does the same, except that it also lowers
    # odd integers above 1.
    power = jnp.clip(power - 0.5, 1.0, 255.0)
    sixteenths, _ = on.round(power, jnp.float32(1.0))
    root = on.reciprocal(sixteenths) * 16.0
    power = sixteenths * (1 / 16)
    return _Fit(
      amax,
      sixteenths,
      power,
      jnp.where(amax > 0, power * -log2_amax, 0.0),
      root,
      _inverse(amax, on),
    )

  def _stored(self, fit: _Fit) -> tuple[Array, Array]:
    # `range` is the f32 result of `Instructions.round`. A saturating cast to a
    # byte is correct for this result, which is at most 255, but not for the
    # int32 result.
    return fit.amax, fit.range.astype(jnp.int32).astype(jnp.uint8)

  def _bound_and_root(self, encoded: Encoded, on):
    sixteenths = encoded.range.astype(jnp.int32).astype(jnp.float32)
    return encoded.amax, on.reciprocal(sixteenths) * 16.0


@register(BoundedFP8)
@dataclasses.dataclass(frozen=True)
class _Bounded(_Expanded):
  def fit(self, amax, amin, on):
    upper, lower = exponent_bounds(amax, amin)
    octaves = octaves_between(upper, lower)
    power = on.reciprocal(octaves) * log2_range(self.codec.dtype)
    log2_bound = upper.astype(jnp.float32) - 127
    root = octaves * (1 / log2_range(self.codec.dtype))
    inverse = _inverse(exp2_upper(upper), on)
    return _Fit(upper, lower, power, power * -log2_bound, root, inverse)

  def _stored(self, fit):
    return in_bytes(fit.amax, fit.range)

  def _bound_and_root(self, encoded, on):
    del on
    upper, lower = from_bytes(encoded)
    root = octaves_between(upper, lower) * (1 / log2_range(self.codec.dtype))
    return exp2_upper(upper), root


def _inverse(bound: Array, on: Instructions) -> Array:
  """Returns 1 / bound, or a finite number if the bound is 0; NaN stays NaN."""
  # Scale large bounds down, because subnormal reciprocals are flushed to zero.
  down = jnp.where(bound > 2.0**100, 2.0**-64, 1.0)
  return jnp.minimum(on.reciprocal(bound * down), 2.0**127) * down


def _neighbours(y: Array, dtype: DTypeLike) -> tuple[Array, Array]:
  """Computes `formats.neighbours`, but the upper neighbor may exceed qmax."""
  info = jnp.finfo(dtype)
  drop = 23 - info.nmant
  smallest = float(info.smallest_normal)
  # Subnormals have the same spacing as numbers from `smallest` to 2 `smallest`.
  offset = jnp.where(y < smallest, smallest, 0.0)
  lower = as_bits(y + offset) & jnp.uint32(0xFFFFFFFF >> drop << drop)
  upper = lower + jnp.uint32(1 << drop)
  return as_float(lower) - offset, as_float(upper) - offset


def _looked_up_codes(magnitude, e, x, fit: _Fit, noise, on) -> Array:
  """Stochastically rounds t = magnitude * fit.scale to E4M3, given e = t^k.

  The codes get the signs of x unless x is None. If e is off by one ulp, the two
  neighbors of t may be wrong, but the expected decoded value is still t.
  """
  # Bits 20 and up are the code of the lower neighbor.
  bits = on.e4m3_bits(e, qmax(E4M3))
  code = bits >> 20
  # J is the lowest 3 bits of that code, plus 8 unless the code is subnormal.
  significand = code | jnp.minimum(code, jnp.uint32(8))
  rest, gap, unit = on.powers(
    significand.astype(jnp.int32),
    (bits >> 23).astype(jnp.int32),
    fit.root,
    -fit.scale,
  )
  # Round up if t - lower > (noise - 1) (upper - lower). The new `rest` is the
  # right side minus the left side, divided by (2^i)^a, so round up if `rest` is
  # negative. Two fused multiply-adds compute it.
  rest = noise * gap + (rest + magnitude * unit)
  code = code + (as_bits(rest) >> 31)
  return lax.bitcast_convert_type(on.e4m3_codes(code, x), E4M3)
