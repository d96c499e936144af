# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes moments in registers with the logarithmic codec."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from coat_jax.codecs.group import Encoded
from coat_jax.codecs.integers import LogUniform
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

# Values at most this many octaves below a level always round up to that level.
_JUST_BELOW = 2.0**-16


class _Fit(NamedTuple):
  """The parameters with which a group's values are encoded."""

  upper: Array  # Biased exponent of the group's upper bound, int32.
  lower: Array  # Biased exponent of the group's lower bound, int32.
  octaves: Array  # Octaves between the bounds; 1 if they are equal.
  inverse: Array  # 1 / octaves.
  base: Array  # Unbiased exponent of the upper bound, minus octaves, f32.


@register(LogUniform)
@dataclasses.dataclass(frozen=True)
class _Log(FittedCodec):
  codec: LogUniform

  @property
  def _steps(self) -> int:
    return 126 if self.codec.signed else 254

  def decode(self, encoded, signed, on):
    del signed, on
    level = encoded.codes.astype(jnp.int32).astype(jnp.float32)
    sign = level if self.codec.signed else None
    level = jnp.abs(level) if self.codec.signed else level
    upper, lower = from_bytes(encoded)
    bound = exp2_upper(upper)
    half_step = octaves_between(upper, lower) * (0.5 / self._steps)
    # A value may be 2^-253 times the bound, and this factor would underflow. So
    # the bound (at most 2^127) is multiplied twice by the factor's square root.
    root = jnp.exp2((level - (self._steps + 1)) * spread(half_step))
    # Code 0 stands for zero. Multiply by 0 instead of selecting 0, so that
    # code 0 decodes to NaN in a group that contains NaN.
    last = with_sign(root * jnp.minimum(level, 1.0), sign)
    return Decoded(root, bound, last)

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
      # Subtract half a step, so that rounding to nearest rounds down. Because
      # the logarithm is off by up to 2^-17, also add `_JUST_BELOW`. Otherwise a
      # value at the lowest level could be rounded down to zero.
      above = jnp.log2(magnitude) - spread(base + 0.5 * step - _JUST_BELOW)
      whole, level = on.round(above, spread(inverse))
      # Let a and b be the values of the levels below and above |x|, and
      #   rest = (noise - 1) (b - a) - (|x| - a),
      # where noise is uniform in [1, 2). Round up if `rest` is negative. All
      # terms of `rest` are multiplied by exp2(_JUST_BELOW) / sqrt(a b).
      lower = jnp.exp2(_JUST_BELOW - 0.5 * step)
      gap = jnp.exp2(_JUST_BELOW + 0.5 * step) - lower
      part = jnp.exp2(above + whole * spread(-step))
      rest = noise * spread(gap) + (spread(lower - gap) - part)
      level = level + (as_bits(rest) >> 31).astype(jnp.int32)
    # The logarithm of zero is minus infinity, so its code is clipped to 0.
    code = jnp.clip(level + 1, 0, steps + 1)
    if self.codec.signed:
      code = jnp.where(x < 0, -code, code).astype(jnp.int8)
    else:
      code = code.astype(jnp.uint8)
    return Encoded(code, *statistics)
