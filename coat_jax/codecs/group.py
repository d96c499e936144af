# SPDX-License-Identifier: Apache-2.0
"""The codecs of one moment: groups of the last axis to codes and statistics.

`codecs` pairs these up and says when to use which. All share `_Grouped`: it
splits rows into groups, takes signs off, calls the subclass for the statistics
and the codes of the magnitudes, and joins the groups again.

Stochastic rounding works on decoded values: with lower <= x <= upper the two
neighbours as `decode` gives them, P(upper) = (x - lower) / (upper - lower).
"""

import abc
import dataclasses
import math
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from coat_jax.formats import E4M3, neighbours, qmax, saturating_cast
from coat_jax.qtensor import join_groups, split_groups

Rounding = Literal["stochastic", "nearest"]

# k is stored in sixteenths as a uint8 (the reference's expand_min = 16).
_POWER_STEPS = 16
_SMALLEST_POWER, _LARGEST_POWER = 1, 255
_SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).tiny)
# A byte e stands for 2^(e - 127), as in E8M0, where 255 is NaN.
_NAN_EXPONENT = 255


class Encoded(NamedTuple):
  """A moment at rest.

  Attributes:
    codes: [..., n], one byte a value (or the plain value).
    amax: [..., ceil(n / group_size)], the group's upper bound: the largest
      magnitude in f32, or a power of two's biased exponent in uint8.
    range: same shape, uint8, how far the group reaches below it: the power k in
      sixteenths, or the biased exponent of the lower bound.
    A statistic that a codec does not have is a scalar zero.
  """

  codes: Array
  amax: Array
  range: Array


@runtime_checkable
class GroupCodec(Protocol):
  """Encodes and decodes one moment; implementations are frozen dataclasses."""

  @property
  def needs_noise(self) -> bool:
    """True where `encode` rounds stochastically."""
    ...

  def encode(self, x: Array, noise: Array | None) -> Encoded:
    """Encodes f32 [..., n], with uniform noise in (0, 1) of the same shape."""
    ...

  def decode(self, encoded: Encoded) -> Array:
    """Decodes to f32 of the codes' shape."""
    ...


@dataclasses.dataclass(frozen=True)
class Plain:
  """No codes at all: values kept in `dtype`, a dtype's name."""

  dtype: str

  @property
  def needs_noise(self) -> bool:
    return False

  def encode(self, x: Float[Array, "..."], noise: Array | None) -> Encoded:
    del noise
    return Encoded(x.astype(self.dtype), jnp.float32(0), jnp.uint8(0))

  def decode(self, encoded: Encoded) -> Array:
    return encoded.codes.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Grouped(abc.ABC):
  """What codecs with groups share. See the module's docstring.

  Magnitudes come as [..., groups, group_size], statistics with a last axis of 1
  where they meet them.
  """

  group_size: int
  rounding: Rounding

  @property
  def needs_noise(self) -> bool:
    return self.rounding == "stochastic"

  def encode(self, x: Float[Array, "*b n"], noise: Array | None) -> Encoded:
    if self.needs_noise != (noise is not None):
      raise ValueError(
        f"encode: rounding={self.rounding!r} "
        + ("needs noise, got None" if noise is None else "takes no noise")
      )
    groups = split_groups(x.astype(jnp.float32), self.group_size)
    magnitude = jnp.abs(groups)
    # Backends disagree on subnormals: count them as zero everywhere.
    magnitude = jnp.where(magnitude < _SMALLEST_NORMAL, 0.0, magnitude)
    if noise is not None:
      noise = split_groups(noise, self.group_size, fill=0.5)
    amax, range_ = self._statistics(magnitude)
    codes = self._codes(magnitude, amax[..., None], range_[..., None], noise)
    codes = join_groups(self._signed(codes, groups < 0), x.shape[-1])
    return Encoded(codes, amax, range_)

  @abc.abstractmethod
  def _statistics(self, magnitude: Array) -> tuple[Array, Array]:
    """amax and range of each group."""

  @abc.abstractmethod
  def _codes(
    self, magnitude: Array, amax: Array, range_: Array, noise: Array | None
  ) -> Array:
    """Codes of magnitudes."""

  @abc.abstractmethod
  def _signed(self, codes: Array, negative: Array) -> Array:
    """Codes of magnitudes, with their signs."""

  @abc.abstractmethod
  def _values(self, codes: Array, amax: Array, range_: Array) -> Array:
    """What signed codes stand for."""

  def decode(self, encoded: Encoded) -> Array:
    codes = split_groups(encoded.codes, self.group_size)
    values = self._values(
      codes, encoded.amax[..., None], encoded.range[..., None]
    )
    return join_groups(values, encoded.codes.shape[-1])


@dataclasses.dataclass(frozen=True)
class _FP8(_Grouped):
  """FP8 codes of an image y in [0, qmax] of t = magnitude / bound in [0, 1].

  A subclass gives the bound and the maps from t to y and from y to t.
  """

  dtype: DTypeLike = E4M3

  def _codes(self, magnitude, amax, range_, noise):
    t = _share(magnitude, self._bound(amax))
    y = self._expand(t, amax, range_)
    if noise is not None:
      lower, upper = neighbours(y, self.dtype)
      below = self._contract(lower, amax, range_)
      above = self._contract(upper, amax, range_)
      y = jnp.where(t - below > noise * (above - below), upper, lower)
    return saturating_cast(y, self.dtype)

  @abc.abstractmethod
  def _bound(self, amax: Array) -> Array:
    """The largest magnitude that a group can hold."""

  @abc.abstractmethod
  def _expand(self, t: Array, amax: Array, range_: Array) -> Array:
    """t to y."""

  @abc.abstractmethod
  def _contract(self, y: Array, amax: Array, range_: Array) -> Array:
    """y to t."""

  def _signed(self, codes, negative):
    return jnp.where(negative, -codes, codes)

  def _values(self, codes, amax, range_):
    y = codes.astype(jnp.float32)
    magnitude = self._contract(jnp.abs(y), amax, range_) * self._bound(amax)
    return jnp.where(y < 0, -magnitude, magnitude)


@dataclasses.dataclass(frozen=True)
class ScaledFP8(_FP8):
  """x = q amax / qmax: one f32 amax per group, no expansion.

  Groups whose amax / qmax is below 2^-126 may count as zero.
  """

  def _statistics(self, magnitude):
    return _amax(magnitude), jnp.uint8(0)

  def _bound(self, amax):
    return amax

  def _expand(self, t, amax, range_):
    return t * qmax(self.dtype)

  def _contract(self, y, amax, range_):
    return y * (1 / qmax(self.dtype))

  def _values(self, codes, amax, range_):
    # As XLA would reorder y / qmax * amax anyway, in some programs.
    scale = amax * jnp.float32(1 / qmax(self.dtype))
    return codes.astype(jnp.float32) * scale


@dataclasses.dataclass(frozen=True)
class ExpandedFP8(_FP8):
  """x = sign(q) (|q| / qmax)^(1/k) amax; amax f32, k uint8 of sixteenths.

  k = clip(floor(log2(qmax^2 / 2) / log2(amax / amin) * 16) / 16, 1/16, 255/16)
  with amin the smallest nonzero magnitude; qmax^2 / 2 is the reference's range
  of the format, 2.3 times less than qmax / smallest subnormal. Magnitudes below
  amax * 2^-126 count as zero.
  """

  def _statistics(self, magnitude):
    amax, amin = _amax(magnitude), _nonzero_amin(magnitude)
    # A group of zeros is a group of one magnitude: ratio 1, the largest power.
    ratio = jnp.where(amax > 0, amax / amin, 1.0)
    power = jnp.floor(_log2_range(self.dtype) / jnp.log2(ratio) * _POWER_STEPS)
    power = jnp.clip(power, _SMALLEST_POWER, _LARGEST_POWER)
    return amax, power.astype(jnp.uint8)

  def _bound(self, amax):
    return amax

  def power(self, amax: Array, range_: Array) -> Array:
    """k of groups from their two statistics, f32 of their shape."""
    del amax
    return range_.astype(jnp.float32) * (1 / _POWER_STEPS)

  def _root(self, amax, range_):
    return 1 / self.power(amax, range_)

  def _expand(self, t, amax, range_):
    return jnp.exp2(self.power(amax, range_) * jnp.log2(t)) * qmax(self.dtype)

  def _contract(self, y, amax, range_):
    # jnp.power is good to the last bit where exp2(log2(y) / k) is off by up to
    # five: where b1 * m + (1 - b1) * g cancels, those five move amin, hence k.
    root = self._root(amax, range_)
    return jnp.power(y * (1 / qmax(self.dtype)), root)


@dataclasses.dataclass(frozen=True)
class BoundedFP8(ExpandedFP8):
  """x = sign(q) (|q| / qmax)^(1/k) 2^upper, k from the group's octaves.

  Bounds are 2^lower <= amin and amax <= 2^upper, each a biased exponent in a
  byte; k = log2(qmax^2 / 2) / max(upper - lower, 1) lies on a coarse grid by
  itself. Magnitudes above 2^127 saturate.
  """

  def _statistics(self, magnitude):
    return _exponent_bounds(magnitude)

  def _bound(self, amax):
    return _exp2_biased(amax)

  def power(self, amax: Array, range_: Array) -> Array:
    return _log2_range(self.dtype) / _octaves(amax, range_)

  def _root(self, amax, range_):
    # Rounded once, where the inverse of a power would be twice or, as XLA
    # rewrites it, once.
    return _octaves(amax, range_) * (1 / _log2_range(self.dtype))


@dataclasses.dataclass(frozen=True)
class LogUniform(_Grouped):
  """x = sign 2^(lower + (code - 1) step): codes uniform in log x, 0 for zero.

  step = (upper - lower) / (levels - 1) octaves, with 255 levels in a uint8
  where values have no sign and 127 in an int8 where they have. Magnitudes above
  2^127 saturate.
  """

  signed: bool

  @property
  def _levels(self) -> int:
    return 127 if self.signed else 255

  def _statistics(self, magnitude):
    return _exponent_bounds(magnitude)

  def _codes(self, magnitude, amax, range_, noise):
    octaves, steps = _octaves(amax, range_), self._levels - 1
    whole, part = self._place(magnitude, amax, octaves)
    if noise is None:
      level = whole + jnp.round(part)
    else:
      # All over the lower neighbour: x / lower = 2^(part of a step).
      step = octaves * (1 / steps)
      up = jnp.exp2(part * step) - 1 > noise * (jnp.exp2(step) - 1)
      level = whole + up
    code = jnp.where(magnitude > 0, jnp.clip(level, 0, steps) + 1, 0)
    return code.astype(jnp.int8 if self.signed else jnp.uint8)

  def _place(self, magnitude, amax, octaves):
    """Levels above the lower bound, as a whole number and a part in [0, 1).

    Whole octaves are counted in integers: in one f32 up to 254 levels leave
    only 2^-16 for the part, and backends would round up at different words.
    """
    steps = self._levels - 1
    exponent, fraction = _split_float(magnitude)
    mantissa = jax.lax.bitcast_convert_type(fraction | 0x3F800000, jnp.float32)
    octaves_int = octaves.astype(jnp.int32)
    above = exponent - (amax.astype(jnp.int32) - octaves_int)
    whole, rest = jnp.divmod(above * steps, octaves_int)
    part = (rest.astype(jnp.float32) + jnp.log2(mantissa) * steps) / octaves
    return whole.astype(jnp.float32) + jnp.floor(part), part - jnp.floor(part)

  def _signed(self, codes, negative):
    return jnp.where(negative, -codes, codes) if self.signed else codes

  def _values(self, codes, amax, range_):
    octaves = _octaves(amax, range_).astype(jnp.int32)
    level = jnp.abs(codes.astype(jnp.int32)) - 1
    steps = self._levels - 1
    # In integers, so that decoding does not depend on how a quotient rounds.
    whole, rest = jnp.divmod(level * octaves, steps)
    # From the upper bound: with both bounds equal there is an octave all the
    # same, and the highest level is the bound.
    exponent = amax.astype(jnp.int32) - octaves + whole
    magnitude = jnp.exp2(rest * jnp.float32(1 / steps)) * _exp2_biased(exponent)
    magnitude = jnp.where(level < 0, 0.0, magnitude)
    # 0 for an ordinary group, NaN for one that holds a NaN.
    magnitude += 0 * _exp2_biased(amax)
    return jnp.where(codes < 0, -magnitude, magnitude)


def _log2_range(dtype: DTypeLike) -> float:
  return math.log2(qmax(dtype) ** 2 / 2)


def _share(magnitude: Array, bound: Array) -> Array:
  """magnitude / bound, at most 1; below 2^-126, and for bound 0, it is 0."""
  bound = jnp.where(bound == 0, 1.0, bound)
  # XLA multiplies by 1 / bound, which is subnormal, hence perhaps zero, above
  # 2^126. The factor is a power of two and loses nothing.
  down = jnp.where(bound > 2.0**100, 2.0**-64, 1.0)
  share = magnitude * down / (bound * down)
  # The minimum lets a NaN through.
  return jnp.where(share < _SMALLEST_NORMAL, 0.0, jnp.minimum(share, 1.0))


def _amax(magnitude: Array) -> Array:
  """Largest magnitude per group, NaN where any is not finite."""
  amax = jnp.max(magnitude, axis=-1)
  # Reductions need not carry a NaN; a test of every value does.
  return jnp.where(jnp.all(jnp.isfinite(magnitude), axis=-1), amax, jnp.nan)


def _nonzero_amin(magnitude: Array) -> Array:
  """Smallest nonzero magnitude per group, infinity where there is none."""
  return jnp.min(jnp.where(magnitude > 0, magnitude, jnp.inf), axis=-1)


def _exponent_bounds(magnitude: Array) -> tuple[Array, Array]:
  """Biased exponents of 2^upper >= amax and 2^lower <= nonzero amin, uint8."""
  amax = _amax(magnitude)
  upper, fraction = _split_float(amax)
  upper = jnp.clip(upper + (fraction > 0), 1, _NAN_EXPONENT - 1)
  lower, _ = _split_float(_nonzero_amin(magnitude))
  lower = jnp.clip(lower, 1, upper)
  upper = jnp.where(jnp.isnan(amax), _NAN_EXPONENT, upper)
  return upper.astype(jnp.uint8), lower.astype(jnp.uint8)


def _octaves(upper: Array, lower: Array) -> Array:
  """Octaves between two biased exponents, at least 1, f32."""
  octaves = upper.astype(jnp.int32) - lower.astype(jnp.int32)
  return jnp.maximum(octaves, 1).astype(jnp.float32)


def _split_float(x: Array) -> tuple[Array, Array]:
  """Biased exponent and fraction bits of a positive f32, as int32."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return bits >> 23, bits & 0x7FFFFF


def _exp2_biased(exponent: Array) -> Array:
  """2^(exponent - 127) from its bits, exact; NaN for 255."""
  bits = exponent.astype(jnp.int32) << 23
  value = jax.lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where(exponent == _NAN_EXPONENT, jnp.nan, value)
