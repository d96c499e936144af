# SPDX-License-Identifier: Apache-2.0
"""Moment codecs for `studies.codec_race` that are not part of the library.

To train with one of them, pass for example `--optim.codec
studies.race_codecs:log4`. Bytes are per parameter, for both moments together.

  companded      INT8 codes of softsign(m) and of sqrt(v), f32 amax  2.06 bytes
  log4           4 bits: m in powers of 2, v in equal log steps      1.06 bytes
  e2m1           4 bits: m in E2M1, v as in log4                     1.06 bytes
  e2m1_factored  m as in e2m1; the means of v's rows and columns    ~0.58 bytes

4-bit codes have the dtype int4 and the parameter's shape. XLA stores two 4-bit
codes in a byte.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from coat_jax.codecs import MomentCodec
from coat_jax.codecs.factored import Factored
from coat_jax.codecs.group import Grouped, Rounding, finite_amax, share
from coat_jax.codecs.integers import LogUniform


@dataclasses.dataclass(frozen=True)
class Grid(Grouped):
  """Base class of codecs with a fixed grid of magnitudes.

  Each code stands for a level 0, 1, ..., and each level stands for a fraction
  of the group's amax, called the level's share.
  """

  def _statistics(self, magnitude):
    return finite_amax(magnitude), jnp.uint8(0)

  def _codes(self, magnitude, amax, range_, noise):
    t = share(magnitude, amax.astype(jnp.float32))
    # If t is NaN, the group's amax is NaN too, so any code will do.
    t = jnp.where(jnp.isnan(t), 0.0, t)
    lower = self._below(t)
    below, above = self._share(lower), self._share(lower + 1)
    limit = (above - below) * (0.5 if noise is None else noise)
    return self._stored(lower + (t - below > limit), magnitude)

  def _values(self, codes, amax, range_):
    magnitude = self._share(jnp.abs(codes.astype(jnp.float32)))
    magnitude *= amax.astype(jnp.float32)
    return jnp.where(codes < 0, -magnitude, magnitude)

  def _stored(self, level: Array, magnitude: Array) -> Array:
    """Casts levels to codes."""
    return level.astype(jnp.int8)

  def _below(self, t: Array) -> Array:
    """Returns the highest level, except the last one, with a share <= t."""
    raise NotImplementedError

  def _share(self, level: Array) -> Array:
    """Returns the share of amax that a level stands for."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Softsign(Grid):
  """Stores 127 * 2 * t / (1 + t), signed like x, as int8; t = |x| / amax."""

  def _below(self, t):
    return jnp.minimum(jnp.floor(127 * (2 * t / (1 + t))), 126)

  def _share(self, level):
    return level / (254 - level)


@dataclasses.dataclass(frozen=True)
class SquareRoot(Grid):
  """Stores 255 * sqrt(x / amax) as uint8, but at least 1 for values above 0.

  If a second moment became 0, the update would be divided by eps alone.
  """

  def _below(self, t):
    return jnp.minimum(jnp.floor(255 * jnp.sqrt(t)), 254)

  def _share(self, level):
    return jnp.square(level * (1 / 255))

  def _stored(self, level, magnitude):
    least = jnp.where(magnitude > 0, 1, 0)
    return jnp.maximum(level, least).astype(jnp.uint8)


@dataclasses.dataclass(frozen=True)
class Table4(Grid):
  """Stores a sign and an index into the table `shares` as int4.

  amax is rounded up to BF16.

  Attributes:
    shares: the table: ascending shares of amax from 0 to 1.
  """

  shares: tuple[float, ...]

  def _statistics(self, magnitude):
    amax, unused = super()._statistics(magnitude)
    # The rounded bound must not be below amax, so add half an ulp.
    bound = jnp.minimum(amax * (1 + 2.0**-8), _LARGEST)
    return bound.astype(jnp.bfloat16), unused

  def _below(self, t):
    level = sum((t >= x).astype(jnp.float32) for x in self.shares[1:-1])
    return jnp.asarray(level)

  def _share(self, level):
    return jnp.asarray(self.shares, jnp.float32)[level.astype(jnp.int32)]

  def _stored(self, level, magnitude):
    return level.astype(jnp.int4)


@dataclasses.dataclass(frozen=True)
class LogUniform4(LogUniform):
  """`LogUniform` without a sign and with 15 levels, as int4.

  The levels span at most 21 octaves; smaller values get the lowest level. The
  code of zero is -8. Codes are not uint4, because TensorStore, which writes
  checkpoints, does not support this dtype.
  """

  signed: bool = False

  @property
  def _levels(self) -> int:
    return 15

  def _statistics(self, magnitude):
    upper, lower = super()._statistics(magnitude)
    return upper, jnp.maximum(lower, upper - jnp.minimum(upper, 21))

  def _codes(self, magnitude, amax, range_, noise):
    codes = super()._codes(magnitude, amax, range_, noise)
    return (codes.astype(jnp.int32) - 8).astype(jnp.int4)

  def _values(self, codes, amax, range_):
    return super()._values(codes.astype(jnp.int32) + 8, amax, range_)


_LARGEST = float(jnp.finfo(jnp.bfloat16).max)
# The magnitudes of 4-bit formats, divided by the largest magnitude.
POWERS = (0.0, *(2.0**-i for i in reversed(range(7))))
E2M1 = tuple(x / 6 for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


def companded(
  group_size: int = 128, rounding: Rounding = "stochastic"
) -> MomentCodec:
  """Returns FlashOptim's companded INT8: 2 + 8 / group_size bytes/parameter.

  The paper (arXiv:2602.23349) rounds to nearest, in groups of 32 with FP16
  scales. By default, this codec rounds stochastically, in groups of 128 with
  f32 scales, like the library's codecs.
  """
  return MomentCodec(
    name="companded",
    mu=Softsign(group_size, rounding),
    nu=SquareRoot(group_size, rounding),
  )


def log4(group_size: int = 64) -> MomentCodec:
  """Stores m in powers of 2 and v in `LogUniform4`: 1 + 4/group_size bytes."""
  return _four_bits("log4", group_size, POWERS)


def e2m1(group_size: int = 64) -> MomentCodec:
  """Stores m in E2M1 and v in `LogUniform4`: 1 + 4/group_size bytes."""
  return _four_bits("e2m1", group_size, E2M1)


def e2m1_factored() -> MomentCodec:
  """Stores m in E2M1, and the means of v's rows and columns."""
  return MomentCodec(name="e2m1_factored", mu=e2m1().mu, nu=Factored())


def _four_bits(name: str, group_size: int, shares: Any) -> MomentCodec:
  return MomentCodec(
    name=name,
    mu=Table4(group_size, "stochastic", shares),
    nu=LogUniform4(group_size, "stochastic"),
  )
