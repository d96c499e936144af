# SPDX-License-Identifier: Apache-2.0
"""Moment codecs with FP8 codes, with and without dynamic range expansion.

In this file, "the reference" is the code of COAT's authors.
"""

import abc
import dataclasses
import math

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.codecs.group import (
  Grouped,
  exp2_biased,
  exponent_bounds,
  finite_amax,
  nonzero_amin,
  octaves_between,
  share,
)
from coat_jax.numerics.formats import E4M3, neighbours, qmax, saturating_cast

# The power k is stored as a uint8, in units of 1/16 (in the reference,
# expand_min = 16).
_POWER_STEPS = 16
_SMALLEST_POWER, _LARGEST_POWER = 1, 255


def log2_range(dtype: DTypeLike) -> float:
  """Returns a format's range in octaves, as the reference defines it."""
  return math.log2(qmax(dtype) ** 2 / 2)


@dataclasses.dataclass(frozen=True)
class _FP8(Grouped):
  """Encodes t = magnitude / bound, in [0, 1], as an FP8 value y in [0, qmax].

  A subclass defines the maps from t to y and from y to t, and may override the
  bound, which is amax by default.
  """

  dtype: DTypeLike = E4M3

  def _codes(self, magnitude, amax, range_, noise):
    t = share(magnitude, self.bound(amax))
    y = self.expand(t, amax, range_)
    if noise is not None:
      lower, upper = neighbours(y, self.dtype)
      below = self._contract(lower, amax, range_)
      above = self._contract(upper, amax, range_)
      y = jnp.where(t - below > noise * (above - below), upper, lower)
    return saturating_cast(y, self.dtype)

  def bound(self, amax: Array) -> Array:
    """Returns the largest magnitude that a group can hold."""
    return amax

  @abc.abstractmethod
  def expand(self, t: Array, amax: Array, range_: Array) -> Array:
    """Maps t to y."""

  @abc.abstractmethod
  def _contract(self, y: Array, amax: Array, range_: Array) -> Array:
    """Maps y to t."""

  def _values(self, codes, amax, range_):
    y = codes.astype(jnp.float32)
    magnitude = self._contract(jnp.abs(y), amax, range_) * self.bound(amax)
    return jnp.where(y < 0, -magnitude, magnitude)


@dataclasses.dataclass(frozen=True)
class ScaledFP8(_FP8):
  """Decodes a code q to q amax / qmax, with one f32 amax per group.

  Groups with amax / qmax below 2^-126 may decode to zero.
  """

  def _statistics(self, magnitude):
    return finite_amax(magnitude), jnp.uint8(0)

  def expand(self, t, amax, range_):
    return t * qmax(self.dtype)

  def _contract(self, y, amax, range_):
    return y * (1 / qmax(self.dtype))

  def _values(self, codes, amax, range_):
    # In some programs, XLA would rewrite y / qmax * amax to this formula. We
    # use the formula ourselves, so that all programs round alike.
    scale = amax * jnp.float32(1 / qmax(self.dtype))
    return codes.astype(jnp.float32) * scale


@dataclasses.dataclass(frozen=True)
class ExpandedFP8(_FP8):
  """Decodes a code q to sign(q) (|q| / qmax)^(1/k) amax.

  Each group stores amax in f32, and 16 k as a uint8:
  k = clip(floor(log2(qmax^2 / 2) / log2(amax / amin) * 16) / 16, 1/16, 255/16)
  where amin is the group's smallest nonzero magnitude. As in the reference,
  qmax^2 / 2 stands for the range of the format; the true range, qmax / smallest
  subnormal, is 2.3 times larger. Magnitudes below amax * 2^-126 are encoded as
  zero.
  """

  def _statistics(self, magnitude):
    amax, amin = finite_amax(magnitude), nonzero_amin(magnitude)
    # A group of zeros gets the largest power.
    ratio = jnp.where(amax > 0, amax / amin, 1.0)
    power = jnp.floor(log2_range(self.dtype) / jnp.log2(ratio) * _POWER_STEPS)
    power = jnp.clip(power, _SMALLEST_POWER, _LARGEST_POWER)
    return amax, power.astype(jnp.uint8)

  def power(self, amax: Array, range_: Array) -> Array:
    """Returns the groups' k, f32, from their two statistics."""
    del amax
    return range_.astype(jnp.float32) * (1 / _POWER_STEPS)

  def root_index(self, amax: Array, range_: Array) -> Array:
    """Returns for each group the integer below 256 that determines 1/k."""
    del amax
    return range_

  def root_at(self, index: Array) -> Array:
    """Returns 1/k for each `root_index`, f32."""
    return 1 / (index * (1 / _POWER_STEPS))

  def expand(self, t, amax, range_):
    return jnp.exp2(self.power(amax, range_) * jnp.log2(t)) * qmax(self.dtype)

  def _contract(self, y, amax, range_):
    index = self.root_index(amax, range_).astype(jnp.float32)
    return self.contract(y, self.root_at(index))

  def contract(self, y: Array, root: Array) -> Array:
    """Maps y to t, given 1/k for each group."""
    # jnp.power is accurate to the last bit, whereas exp2(log2(y) / k) can be
    # off by more than 100 ulps. If the terms of the next moment nearly cancel,
    # such an error can change the group's next amin, and thus its k.
    return jnp.power(y * (1 / qmax(self.dtype)), root)


@dataclasses.dataclass(frozen=True)
class BoundedFP8(ExpandedFP8):
  """Decodes a code q to sign(q) (|q| / qmax)^(1/k) 2^upper.

  A group's bounds, 2^lower <= amin and 2^upper >= amax, are each stored as a
  biased exponent in one byte. k = log2(qmax^2 / 2) / max(upper - lower, 1)
  changes only if a bound changes, so it is not rounded. Magnitudes above 2^127
  saturate.
  """

  def _statistics(self, magnitude):
    return exponent_bounds(magnitude)

  def bound(self, amax):
    return exp2_biased(amax)

  def power(self, amax: Array, range_: Array) -> Array:
    return log2_range(self.dtype) / octaves_between(amax, range_)

  def root_index(self, amax, range_):
    return octaves_between(amax, range_)

  def root_at(self, index):
    # This rounds once. 1 / power(...) would round once or twice, depending on
    # whether XLA rewrites the expression.
    return index * (1 / log2_range(self.dtype))
