# SPDX-License-Identifier: Apache-2.0
"""The logarithmic codec of moments on tiles of registers."""

import dataclasses

import jax.numpy as jnp

from coat_jax.codecs.group import SMALLEST_NORMAL
from coat_jax.codecs.log8 import LogUniform
from coat_jax.pallas.mosaic.moment_codecs import (
  exp2_upper,
  exponent_bounds,
  extremes,
  octaves_between,
  one_and,
  register,
  with_sign,
)
from coat_jax.pallas.mosaic.registers import as_bits, spread


@register(LogUniform)
@dataclasses.dataclass(frozen=True)
class _Log:
  codec: LogUniform

  @property
  def _steps(self) -> int:
    return 126 if self.codec.signed else 254

  def decode(self, codes, statistics, signed, on):
    del signed, on
    level = codes.astype(jnp.int32).astype(jnp.float32)
    sign = level if self.codec.signed else None
    level = jnp.abs(level) if self.codec.signed else level
    bound = exp2_upper(statistics)
    half_step = octaves_between(statistics) * (0.5 / self._steps)
    # From the upper bound down, up to 253 octaves: in two halves, for 2^-253 is
    # zero where 2^127 2^-253 is not.
    root = jnp.exp2((level - (self._steps + 1)) * spread(half_step))
    # Code 0 is zero, in a group that holds a NaN it is NaN: a product, not a
    # choice.
    magnitude = root * spread(bound) * (root * jnp.minimum(level, 1.0))
    return with_sign(magnitude, sign)

  def encode(self, x, noise, signed, on):
    steps = self._steps
    magnitude, amax, amin = extremes(x, signed)
    statistics = exponent_bounds(amax, amin)
    octaves = octaves_between(statistics)
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
      rest = one_and(noise) * spread(gap) + rest
      level = level + (as_bits(rest) >> 31).astype(jnp.int32)
    code = level + 1
    code = jnp.clip(code, 1, steps + 1)
    code = jnp.where(magnitude >= SMALLEST_NORMAL, code, 0)
    if self.codec.signed:
      return jnp.where(x < 0, -code, code).astype(jnp.int8), statistics
    return code.astype(jnp.uint8), statistics
