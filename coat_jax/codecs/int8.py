# SPDX-License-Identifier: Apache-2.0
"""The moment codec whose codes are integers, uniform in x: INT8 beside FP8.

x = code amax / levels with one f32 amax a group: 127 levels and a sign for the
first moment, 255 for the second. It takes the bytes of `fp8` and spends the
codes the other way round: a step is amax / levels everywhere, 4 to 8 times
finer than E4M3's near amax, and what is below half a step of it is lost. Of a
group of second moments that is most: E4M3 reaches 2^-19 of amax, this 2^-9.
"""

import dataclasses

import jax.numpy as jnp

from coat_jax.codecs.group import Grouped, Rounding, finite_amax, share
from coat_jax.codecs.registry import MomentCodec


@dataclasses.dataclass(frozen=True)
class LinearInt8(Grouped):
  """x = code amax / levels: int8 with 127 levels, or uint8 with 255.

  Attributes:
    signed: whether values may be negative, hence which of the two.
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
      # Equal steps: the share of a step is that between decoded neighbours.
      level = level + (y - level > noise)
    # An integer has no NaN; the amax of such a group has.
    level = jnp.where(jnp.isnan(level), 0, level)
    return level.astype(jnp.int8 if self.signed else jnp.uint8)

  def _signed(self, codes, negative):
    return jnp.where(negative, -codes, codes) if self.signed else codes

  def _values(self, codes, amax, range_):
    del range_
    return codes.astype(jnp.float32) * (amax * jnp.float32(1 / self._levels))


def int8(
  group_size: int = 128, rounding: Rounding = "stochastic"
) -> MomentCodec:
  """INT8, linear with one scale per group: a baseline, not advice.

  Second moments below a 255th of their group's largest become zero or are
  rounded up to it, and one that is zero divides its update by eps.

  Args:
    group_size: values along the last axis that share a scale.
    rounding: "stochastic" or "nearest".

  Returns:
    A codec of 2 + 8 / group_size bytes a parameter.

  Raises:
    ValueError: an argument outside its values.

  Examples:
    >>> import coat_jax
    >>> from coat_jax import codecs
    >>> optimizer = coat_jax.coat_adamw(3e-4, codec=codecs.int8())
  """
  return MomentCodec(
    name="int8",
    mu=LinearInt8(group_size, rounding, signed=True),
    nu=LinearInt8(group_size, rounding, signed=False),
  )
