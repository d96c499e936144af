# SPDX-License-Identifier: Apache-2.0
"""The logarithmic codec of moments on tiles of registers."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from coat_jax.codecs.log8 import LogUniform
from coat_jax.pallas.mosaic.moment_codecs import (
  Decoded,
  FittedCodec,
  exp2_upper,
  exponent_bounds,
  from_bytes,
  in_bytes,
  octaves_between,
  register,
  with_sign,
)
from coat_jax.pallas.mosaic.registers import as_bits, spread

# Octaves: a value so little below a level is rounded up, always.
_JUST_BELOW = 2.0**-16


class _Fit(NamedTuple):
  """What encoding takes of groups.

  Attributes:
    upper, lower: biased exponents of the bounds, int32.
    octaves, inverse: between them, and its reciprocal.
    base: the exponent of the lower one, f32.
  """

  upper: Array
  lower: Array
  octaves: Array
  inverse: Array
  base: Array


@register(LogUniform)
@dataclasses.dataclass(frozen=True)
class _Log(FittedCodec):
  codec: LogUniform

  @property
  def _steps(self) -> int:
    return 126 if self.codec.signed else 254

  def decode(self, codes, statistics, signed, on):
    del signed, on
    level = codes.astype(jnp.int32).astype(jnp.float32)
    sign = level if self.codec.signed else None
    level = jnp.abs(level) if self.codec.signed else level
    upper, lower = from_bytes(statistics)
    bound = exp2_upper(upper)
    half_step = octaves_between(upper, lower) * (0.5 / self._steps)
    # From the upper bound down, up to 253 octaves: in two halves, for 2^-253 is
    # zero where 2^127 2^-253 is not.
    root = jnp.exp2((level - (self._steps + 1)) * spread(half_step))
    # Code 0 is zero, in a group that holds a NaN it is NaN: a product, not a
    # choice.
    last = with_sign(root * jnp.minimum(level, 1.0), sign)
    return Decoded(root, bound, last)

  def fits_as(self, other):
    return type(other) is type(self)

  def fit(self, amax, amin, on):
    upper, lower = exponent_bounds(amax, amin)
    octaves = octaves_between(upper, lower)
    base = upper.astype(jnp.float32) - 127 - octaves
    return _Fit(upper, lower, octaves, on.reciprocal(octaves), base)

  def codes(self, x, fit, noise, signed, on):
    steps, base, statistics = self._steps, fit.base, in_bytes(*fit[:2])
    magnitude = jnp.abs(x) if signed else x
    step, inverse = fit.octaves * (1 / steps), fit.inverse * steps
    if noise is None:
      above = jnp.log2(magnitude) - spread(base)
      _, level = on.round(above, spread(inverse))
    else:
      # Half a step down, so that the nearest level is the one below. A value
      # just below a level counts as that one: by more than its logarithm is
      # off, 2^-17, or the first level might get the code of zero.
      above = jnp.log2(magnitude) - spread(base + 0.5 * step - _JUST_BELOW)
      whole, level = on.round(above, spread(inverse))
      # x and its neighbours, all over what is between these. Up where
      # x - lower > noise (upper - lower), which is where this is negative.
      lower = jnp.exp2(_JUST_BELOW - 0.5 * step)
      gap = jnp.exp2(_JUST_BELOW + 0.5 * step) - lower
      part = jnp.exp2(above + whole * spread(-step))
      rest = noise * spread(gap) + (spread(lower - gap) - part)
      level = level + (as_bits(rest) >> 31).astype(jnp.int32)
    # Of zero, whose logarithm is minus infinity, the level is far below.
    code = jnp.clip(level + 1, 0, steps + 1)
    if self.codec.signed:
      return jnp.where(x < 0, -code, code).astype(jnp.int8), statistics
    return code.astype(jnp.uint8), statistics
