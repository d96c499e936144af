# SPDX-License-Identifier: Apache-2.0
"""Interface of a codec for one moment, and the base class of group codecs."""

import abc
import dataclasses
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Inexact

from coat_jax.numerics.checks import (
  check_array,
  check_choice,
  check_group_size,
)
from coat_jax.numerics.qtensor import join_groups, split_groups

Rounding = Literal["stochastic", "nearest"]

SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).tiny)
# A byte e means 2^(e - 127), as in E8M0, where 255 is NaN.
NAN_EXPONENT = 255


class Encoded(NamedTuple):
  """An encoded moment, as it is stored.

  A field that a codec does not use is a scalar zero. The attributes below are
  for codecs with groups; `Factored` stores means of rows and columns instead.

  Attributes:
    codes: [..., n], one byte per value. A 4-bit codec uses int4; XLA stores two
      int4 values in a byte. `Plain` stores the values themselves.
    amax: [..., ceil(n / group_size)], each group's upper bound: its largest
      magnitude in f32, or the biased exponent of a power of two in uint8.
    range: uint8 [..., ceil(n / group_size)], each group's lower bound (the
      biased exponent of a power of two), or 16 k for its expansion's power k.
  """

  codes: Array
  amax: Array
  range: Array


@runtime_checkable
class GroupCodec(Protocol):
  """Encodes and decodes one moment; implementations are frozen dataclasses.

  A codec with statistics per group must have an attribute `group_size`, so that
  devices do not split groups.
  """

  @property
  def needs_noise(self) -> bool:
    """Returns whether `encode` rounds stochastically."""
    ...

  def encode(self, x: Array, noise: Array | None) -> Encoded:
    """Encodes f32 [..., n], given uniform noise in [0, 1) of the same shape.

    `noise` is None if `needs_noise` is False. All groups of zeros must get
    the same codes and statistics, whatever the noise; only the short group at
    the end of a row may differ. Optimizers rely on this: they encode one group
    of the initial zeros and repeat the result.
    """
    ...

  def decode(self, encoded: Encoded) -> Array:
    """Decodes to f32, in the shape of the array that was encoded."""
    ...


@dataclasses.dataclass(frozen=True)
class Plain:
  """Stores the values in `dtype`, rounded to nearest.

  `decode` casts real values to f32, and returns complex values unchanged.
  """

  dtype: str

  @property
  def needs_noise(self) -> bool:
    return False

  def encode(self, x: Inexact[Array, "..."], noise: Array | None) -> Encoded:
    del noise
    return Encoded(x.astype(self.dtype), jnp.float32(0), jnp.uint8(0))

  def decode(self, encoded: Encoded) -> Array:
    codes = encoded.codes
    return codes if jnp.iscomplexobj(codes) else codes.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Grouped(abc.ABC):
  """Base class of group codecs, such as those in `fp8` and `integers`.

  A subclass computes `_statistics`, encodes magnitudes (`_codes`) and decodes
  codes (`_values`). These methods get magnitudes and codes [..., groups,
  group_size] and statistics [..., groups, 1]. This class splits rows into
  groups, and adds signs to codes of signed dtypes.

  Attributes:
    group_size: number of values along the last axis that share statistics.
    rounding: "stochastic" or "nearest".
  """

  group_size: int
  rounding: Rounding

  def __post_init__(self):
    check_group_size("codecs", self.group_size, "128 is the default")
    check_choice("codecs", "rounding", self.rounding, get_args(Rounding))

  @property
  def needs_noise(self) -> bool:
    return self.rounding == "stochastic"

  def encode(self, x: Float[Array, "*b n"], noise: Array | None) -> Encoded:
    if self.needs_noise != (noise is not None):
      raise ValueError(
        f"encode: rounding={self.rounding!r} "
        + (
          "needs noise, got None; pass uniform noise in [0, 1)"
          if noise is None
          else "takes no noise, got some; pass None"
        )
      )
    check_array("encode", "x", x, "a floating-point array", remedy="cast it")
    if noise is not None and noise.shape != x.shape:
      raise ValueError(
        f"encode: noise must have the shape of x, {x.shape}, got "
        f"{noise.shape}; draw one number for each value"
      )
    groups = split_groups(x.astype(jnp.float32), self.group_size)
    if noise is not None:
      noise = split_groups(noise, self.group_size, fill=0.5)
    codes, amax, range_ = self.encode_groups(groups, noise)
    codes = join_groups(codes, x.shape[-1])
    return Encoded(codes, _without_last(amax), _without_last(range_))

  def statistics(self, x: Array) -> tuple[Array, Array]:
    """Returns amax and range [..., 1] of the groups in x, [..., group_size]."""
    amax, range_ = self._statistics(magnitude_of(x))
    return _with_last(amax), _with_last(range_)

  def encode_groups(
    self,
    x: Array,
    noise: Array | None,
    statistics: tuple[Array, Array] | None = None,
  ) -> Encoded:
    """Encodes f32 [..., group_size], one group per row.

    `statistics` are amax and range, [..., 1] each; None to compute them from x.
    Kernels call this method, so it uses only dtypes that TPUs support.
    """
    magnitude = magnitude_of(x)
    amax, range_ = statistics or self.statistics(x)
    codes = self._codes(magnitude, amax, range_, noise)
    if not jnp.issubdtype(codes.dtype, jnp.unsignedinteger):
      # TPUs cannot negate bytes.
      is_integer = jnp.issubdtype(codes.dtype, jnp.integer)
      wide = codes.astype(jnp.int32 if is_integer else jnp.float32)
      codes = jnp.where(x < 0, -wide, wide).astype(codes.dtype)
    return Encoded(codes, amax, range_)

  def decode_groups(self, encoded: Encoded) -> Array:
    """Decodes codes [..., group_size] with statistics [..., 1] to f32."""
    return self._values(*encoded)

  @abc.abstractmethod
  def _statistics(self, magnitude: Array) -> tuple[Array, Array]:
    """Returns amax and range, [..., groups]; an unused range is a scalar."""

  @abc.abstractmethod
  def _codes(
    self, magnitude: Array, amax: Array, range_: Array, noise: Array | None
  ) -> Array:
    """Encodes magnitudes; the result has no signs."""

  @abc.abstractmethod
  def _values(self, codes: Array, amax: Array, range_: Array) -> Array:
    """Decodes codes, including their signs."""

  def decode(self, encoded: Encoded) -> Array:
    codes = split_groups(encoded.codes, self.group_size)
    statistics = map(_with_last, encoded[1:])
    values = self.decode_groups(Encoded(codes, *statistics))
    return join_groups(values, encoded.codes.shape[-1])


def _with_last(statistic: Array) -> Array:
  """Adds a last axis of size 1, unless the statistic is an unused scalar."""
  return statistic[..., None] if statistic.ndim else statistic


def _without_last(statistic: Array) -> Array:
  return statistic[..., 0] if statistic.ndim else statistic


def magnitude_of(x: Array) -> Array:
  """Returns f32 magnitudes, with subnormal numbers replaced by zero.

  Without this, backends would disagree: TPUs treat subnormal numbers as zero.
  """
  magnitude = jnp.abs(x)
  return jnp.where(magnitude < SMALLEST_NORMAL, 0.0, magnitude)


def share(magnitude: Array, bound: Array) -> Array:
  """Divides magnitudes [..., group_size] by their group's bound [..., 1], f32.

  The result is at most 1. A quotient below 2^-126 becomes 0; so does 0 / 0.
  """
  quotient = divided(magnitude, bound)
  # jnp.minimum propagates NaN.
  return jnp.where(quotient < SMALLEST_NORMAL, 0.0, jnp.minimum(quotient, 1.0))


def divided(x: Array, by: Array) -> Array:
  """Divides non-negative f32 arrays; replaces `by` below 2^-126 with 1."""
  # Replacing only 0 would not suffice: a GPU may keep a subnormal `by`, and
  # 1 / by may be infinite.
  by = jnp.where(by < SMALLEST_NORMAL, 1.0, by)
  # XLA multiplies by 1 / by. If `by` is above 2^126, this factor is subnormal
  # and may be flushed to zero, so we first scale both numbers down by a power
  # of two, which is exact.
  down = jnp.where(by > 2.0**100, 2.0**-64, 1.0)
  return x * down / (by * down)


def finite_amax(magnitude: Array) -> Array:
  """Returns each group's largest magnitude, [..., group_size] to [...].

  If any magnitude is not finite, the result is NaN, and so the whole group
  decodes to NaN.
  """
  # A maximum of floats may drop a NaN. So take the maximum of the bits, which
  # are ordered like the magnitudes, with NaN above infinity. The mask clears
  # the sign bit: XLA removes abs() of a square, so a NaN may have a sign.
  bits = jax.lax.bitcast_convert_type(magnitude, jnp.int32) & 0x7FFFFFFF
  amax = jnp.max(bits, axis=-1)
  amax = jax.lax.bitcast_convert_type(amax, jnp.float32)
  return jnp.where(amax < jnp.inf, amax, jnp.nan)


def nonzero_amin(magnitude: Array) -> Array:
  """Returns each group's smallest nonzero magnitude; infinity if all are 0."""
  return jnp.min(jnp.where(magnitude > 0, magnitude, jnp.inf), axis=-1)


def exponent_bounds(magnitude: Array) -> tuple[Array, Array]:
  """Returns powers of two that bound the nonzero magnitudes of each group.

  Magnitudes are f32 [..., group_size]. The results are biased exponents, uint8
  [...], of 2^upper >= amax (but at most 2^127) and 2^lower <= nonzero amin. If
  a magnitude is not finite, the first result is NAN_EXPONENT.
  """
  amax = finite_amax(magnitude)
  upper, fraction = split_float(amax)
  upper = jnp.clip(upper + (fraction > 0), 1, NAN_EXPONENT - 1)
  lower, _ = split_float(nonzero_amin(magnitude))
  lower = jnp.clip(lower, 1, upper)
  upper = jnp.where(jnp.isnan(amax), NAN_EXPONENT, upper)
  return upper.astype(jnp.uint8), lower.astype(jnp.uint8)


def octaves_between(upper: Array, lower: Array) -> Array:
  """Returns the octaves between two biased exponents, f32, at least 1."""
  octaves = upper.astype(jnp.int32) - lower.astype(jnp.int32)
  return jnp.maximum(octaves, 1).astype(jnp.float32)


def split_float(x: Array) -> tuple[Array, Array]:
  """Returns the biased exponent and fraction bits of a positive f32, int32."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return bits >> 23, bits & 0x7FFFFF


def exp2_biased(exponent: Array) -> Array:
  """Returns 2^(exponent - 127) exactly; 0 for exponent 0, and NaN for 255."""
  bits = exponent.astype(jnp.int32) << 23
  value = jax.lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where(exponent == NAN_EXPONENT, jnp.nan, value)
