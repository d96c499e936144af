# SPDX-License-Identifier: Apache-2.0
"""The moment codec with integer codes, uniform in x, to compare with FP8.

It needs as many bytes as `fp8`. Close to amax its codes are 4 to 8 times finer
than E4M3, but values below half a step are lost, and most second moments of a
group are that small: E4M3 represents values down to 2^-19 of amax, this codec
only down to 2^-9.
"""

import dataclasses

import jax.numpy as jnp

from coat_jax.codecs.group import Grouped, finite_amax, share


@dataclasses.dataclass(frozen=True)
class LinearInt8(Grouped):
  """x = code amax / levels: int8 with 127 levels, or uint8 with 255.

  `signed` selects int8.
  """

  signed: bool

  @property
  def _levels(self) -> int:
    return 127 if self.signed else 255

  def _statistics(self, magnitude):
    return finite_amax(magnitude), jnp.uint8(0)

  def _codes(self, magnitude, amax, range_, noise):
    del range_
    y = share(magnitude, amax) * self._levels
    if noise is None:
      level = jnp.round(y)
    else:
      level = jnp.floor(y)
      # All steps are equal, so we need not decode the two neighbours.
      level = level + (y - level > noise)
    # Integers have no NaN; the group's amax is NaN instead.
    level = jnp.where(jnp.isnan(level), 0, level)
    return level.astype(jnp.int8 if self.signed else jnp.uint8)

  def _values(self, codes, amax, range_):
    del range_
    return codes.astype(jnp.float32) * (amax * jnp.float32(1 / self._levels))
