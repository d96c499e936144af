# SPDX-License-Identifier: Apache-2.0
"""The moment codec with codes that are uniform in log x."""

import dataclasses

import jax
import jax.numpy as jnp

from coat_jax.codecs.group import (
  Grouped,
  exp2_biased,
  exponent_bounds,
  octaves_between,
  split_float,
)


@dataclasses.dataclass(frozen=True)
class LogUniform(Grouped):
  """x = sign 2^(lower + (code - 1) step): codes uniform in log x, 0 for zero.

  step = (upper - lower) / (levels - 1) octaves. Values without a sign have 255
  levels in a uint8, values with a sign have 127 levels in an int8. Magnitudes
  above 2^127 saturate.
  """

  signed: bool

  @property
  def _levels(self) -> int:
    return 127 if self.signed else 255

  def _statistics(self, magnitude):
    return exponent_bounds(magnitude)

  def _codes(self, magnitude, amax, range_, noise):
    octaves, steps = octaves_between(amax, range_), self._levels - 1
    whole, part = self._place(magnitude, amax, octaves)
    if noise is None:
      level = whole + jnp.round(part)
    else:
      # Divide everything by the lower neighbour: x / lower = 2^(fraction of a
      # step).
      step = octaves * (1 / steps)
      up = jnp.exp2(part * step) - 1 > noise * (jnp.exp2(step) - 1)
      level = whole + up
    code = jnp.where(magnitude > 0, jnp.clip(level, 0, steps) + 1, 0)
    return code.astype(jnp.int8 if self.signed else jnp.uint8)

  def _place(self, magnitude, amax, octaves):
    """Returns the level above the lower bound: a whole number and a fraction.

    Whole octaves are counted in integers: a single f32 would resolve the
    fraction only to 2^-16, and backends would round up at different words.
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
    # Use integers, so that decoding does not depend on how a quotient rounds.
    whole, rest = jnp.divmod(level * octaves, steps)
    # Count down from the upper bound: if both bounds are equal we still assume
    # one octave, and the highest level is the bound.
    exponent = amax.astype(jnp.int32) - octaves + whole
    magnitude = jnp.exp2(rest * jnp.float32(1 / steps)) * exp2_biased(exponent)
    magnitude = jnp.where(level < 0, 0.0, magnitude)
    # This adds 0 to an ordinary group, and NaN to a group that holds a NaN.
    magnitude += 0 * exp2_biased(amax)
    return jnp.where(codes < 0, -magnitude, magnitude)
