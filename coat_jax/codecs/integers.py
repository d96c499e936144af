# SPDX-License-Identifier: Apache-2.0
"""Moment codecs with integer codes: uniform in log x, or uniform in x."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.codecs.group import (
  Grouped,
  exp2_biased,
  exponent_bounds,
  finite_amax,
  octaves_between,
  share,
  split_float,
)


@dataclasses.dataclass(frozen=True)
class _Integer(Grouped):
  """Integer codes: int8 if values may be negative, otherwise uint8."""

  signed: bool

  @property
  def _levels(self) -> int:
    return 127 if self.signed else 255

  def _cast(self, level: Array) -> Array:
    return level.astype(jnp.int8 if self.signed else jnp.uint8)


@dataclasses.dataclass(frozen=True)
class LogUniform(_Integer):
  """Decodes a code to |x| = 2^(lower + (|code| - 1) step), and code 0 to 0.

  A group's magnitudes are between 2^lower and 2^upper, and
  step = (upper - lower) / (levels - 1). Signed values are stored as int8, with
  127 levels. Values that are never negative are stored as uint8, with 255
  levels. Magnitudes above 2^127 saturate.
  """

  def _statistics(self, magnitude):
    return exponent_bounds(magnitude)

  def _codes(self, magnitude, amax, range_, noise):
    octaves, steps = octaves_between(amax, range_), self._levels - 1
    whole, part = self._place(magnitude, amax, octaves)
    if noise is None:
      level = whole + jnp.round(part)
    else:
      # Let a and b be the decoded values of the levels around a magnitude x.
      # Round up if x - a > noise * (b - a). We divide both sides by a:
      # x / a = 2^(part * step) and b / a = 2^step.
      step = octaves * (1 / steps)
      up = jnp.exp2(part * step) - 1 > noise * (jnp.exp2(step) - 1)
      level = whole + up
    code = jnp.where(magnitude > 0, jnp.clip(level, 0, steps) + 1, 0)
    return self._cast(code)

  def _place(self, magnitude, amax, octaves):
    """Returns the whole part and the fraction of a magnitude's level.

    Levels are counted from the lower bound. Whole octaves are computed in
    integers, because a level in f32 would have only 16 bits of fraction, and
    backends would round it differently.
    """
    steps = self._levels - 1
    exponent, fraction = split_float(magnitude)
    mantissa = jax.lax.bitcast_convert_type(fraction | 0x3F800000, jnp.float32)
    octaves_int = octaves.astype(jnp.int32)
    above = exponent - (amax.astype(jnp.int32) - octaves_int)
    whole, rest = jnp.divmod(above * steps, octaves_int)
    part = (rest.astype(jnp.float32) + jnp.log2(mantissa) * steps) / octaves
    return whole.astype(jnp.float32) + jnp.floor(part), part - jnp.floor(part)

  def _values(self, codes, amax, range_):
    octaves = octaves_between(amax, range_).astype(jnp.int32)
    level = jnp.abs(codes.astype(jnp.int32)) - 1
    steps = self._levels - 1
    # Divide integers, so that decoding does not depend on f32 rounding.
    whole, rest = jnp.divmod(level * octaves, steps)
    # If both bounds are equal, `octaves` is 1 instead of 0. So count from the
    # upper bound, to which the highest level must decode.
    exponent = amax.astype(jnp.int32) - octaves + whole
    magnitude = jnp.exp2(rest * jnp.float32(1 / steps)) * exp2_biased(exponent)
    magnitude = jnp.where(level < 0, 0.0, magnitude)
    # This adds NaN if the group's upper bound is NaN, and 0 otherwise.
    magnitude += 0 * exp2_biased(amax)
    return jnp.where(codes < 0, -magnitude, magnitude)


@dataclasses.dataclass(frozen=True)
class LinearInt8(_Integer):
  """Decodes a code to code * amax / levels, with one f32 amax per group."""

  def _statistics(self, magnitude):
    return finite_amax(magnitude), jnp.uint8(0)

  def _codes(self, magnitude, amax, range_, noise):
    del range_
    y = share(magnitude, amax) * self._levels
    if noise is None:
      level = jnp.round(y)
    else:
      level = jnp.floor(y)
      # All steps are equal, so there is no need to decode the neighbors.
      level = level + (y - level > noise)
    # Integers have no NaN; the group's amax is NaN instead.
    level = jnp.where(jnp.isnan(level), 0, level)
    return self._cast(level)

  def _values(self, codes, amax, range_):
    del range_
    return codes.astype(jnp.float32) * (amax * jnp.float32(1 / self._levels))
