# SPDX-License-Identifier: Apache-2.0
"""Moment codecs for kernels: a `RegisterCodec` encodes tiles in registers.

A register codec has different rounding errors than its definition in
`coat_jax.codecs`. For example, it computes powers as exp2(root log2 x), and
instead of dividing by a statistic, it multiplies by the reciprocal (computed
once per group). So a value close to a rounding boundary may get the neighboring
code, and a group may get the neighboring power k. Such differences are about as
frequent as those between two XLA backends.

A subclass of a registered group codec may encode differently, so it runs in
plain JAX until you `register` a register codec for the subclass.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.codecs.group import (
  NAN_EXPONENT,
  SMALLEST_NORMAL,
  Encoded,
  GroupCodec,
)
from coat_jax.pallas.mosaic.registers import (
  Instructions,
  as_bits,
  as_float,
  spread,
)

_SIGN = 0x80000000


class Decoded(NamedTuple):
  """A decoded moment, as factors that are not yet multiplied together.

  `times` first multiplies the scalar by each group's factor, which saves a
  multiplication per value.

  Attributes:
    values: f32 tile.
    factor: f32 [8], one per group; None means 1.
    last: f32 tile that is multiplied last; None means 1.
  """

  values: Array
  factor: Array | None = None
  last: Array | None = None

  def times(self, scalar: Array) -> Array:
    """Returns the moment times a scalar, as an f32 tile."""
    factor = scalar if self.factor is None else spread(self.factor * scalar)
    product = self.values * factor
    return product if self.last is None else product * self.last


@runtime_checkable
class RegisterCodec(Protocol):
  """Encodes and decodes a tile of 8 groups of 128 values in registers.

  Statistics are [8], or None if the codec does not store them. Values may be
  negative only if `signed`. `on` runs operations in PTX or in jnp.
  """

  def decode(self, encoded: Encoded, signed: bool, on: Instructions) -> Decoded:
    """Decodes a tile."""
    ...

  def encode(
    self, x: Array, noise: Array | None, signed: bool, on: Instructions
  ) -> Encoded:
    """Encodes an f32 tile to the dtypes in which it is stored.

    `noise` is a tile, uniform in [1, 2), or None.
    """
    ...


class FittedCodec(abc.ABC):
  """A register codec that first fits parameters to each group.

  If the codecs of two moments have the same `fit`, both moments are fitted at
  once.
  """

  def encode(
    self, x: Array, noise: Array | None, signed: bool, on: Instructions
  ) -> Encoded:
    """See `RegisterCodec`."""
    amax, amin = extremes(x, signed)
    return self.codes(x, self.fit(amax, amin, on), noise, signed, on)

  def fits_as(self, other: Any) -> bool:
    """Returns whether another register codec has the same `fit`."""
    return type(other) is type(self)

  @abc.abstractmethod
  def fit(self, amax: Array, amin: Array, on: Instructions) -> Any:
    """Returns a pytree of parameters: 32-bit arrays of the shape of amax."""

  @abc.abstractmethod
  def codes(
    self,
    x: Array,
    fit: Any,
    noise: Array | None,
    signed: bool,
    on: Instructions,
  ) -> Encoded:
    """Encodes a tile like `RegisterCodec.encode`, given `fit`'s result."""


# Maps a group codec's type to the constructor of its register codec.
_REGISTER_CODECS: dict[type, Callable[[Any], RegisterCodec]] = {}


def register(group_codec: type) -> Callable[[type], type]:
  """Registers a `RegisterCodec` class for group codecs of exactly this type.

  The constructor of the class must accept the group codec:

    @moment_codecs.register(MyGroupCodec)
    @dataclasses.dataclass(frozen=True)
    class MyRegisterCodec:
      codec: MyGroupCodec

      def decode(self, encoded, signed, on): ...
      def encode(self, x, noise, signed, on): ...
  """

  def add(register_codec: type) -> type:
    _REGISTER_CODECS[group_codec] = register_codec
    return register_codec

  return add


def is_registered(codec: GroupCodec) -> bool:
  """Returns whether the codec's exact type is registered."""
  return type(codec) in _REGISTER_CODECS


def on_registers(codec: GroupCodec) -> RegisterCodec:
  """Returns the register codec of a group codec that `is_registered`."""
  return _REGISTER_CODECS[type(codec)](codec)


def with_sign(magnitude: Array, x: Array | None) -> Array:
  if x is None:
    return magnitude
  return as_float(as_bits(magnitude) | (as_bits(x) & jnp.uint32(_SIGN)))


def uniform_times(noise: Array, x: Array) -> Array:
  """Returns (noise - 1) * x as one fused multiply-add, for noise in [1, 2).

  The absolute error is at most 2^-23 |x|.
  """
  return noise * x - x


def encode_moments(
  codecs: Sequence[RegisterCodec],
  xs: Sequence[Array],
  noises: Sequence[Array | None],
  on: Instructions,
) -> list[Encoded]:
  """Encodes one or two moments, of which the second is never negative."""
  fitted = [codec for codec in codecs if isinstance(codec, FittedCodec)]
  if len(fitted) != 2 or not fitted[0].fits_as(fitted[1]):
    return [
      codec.encode(x, noise, i == 0, on)
      for i, (codec, x, noise) in enumerate(
        zip(codecs, xs, noises, strict=True)
      )
    ]
  # Fit both moments at once, each in half of the lanes.
  mu, nu = xs
  amax, least = on.joint_extremes(
    (jnp.abs(mu), nu), (_twice_order(mu), _twice_order(nu))
  )
  amax, amin = _cleaned(amax, least >> 1)
  both = fitted[0].fit(amax, amin, on)
  fits = [jax.tree.map(lambda x, i=i: on.part(x, i), both) for i in range(2)]
  return [
    codec.codes(x, fit, noise, i == 0, on)
    for i, (codec, x, fit, noise) in enumerate(
      zip(fitted, xs, fits, noises, strict=True)
    )
  ]


def extremes(x: Array, signed: bool) -> tuple[Array, Array]:
  """Returns amax and amin: each group's largest and smallest normal magnitude.

  Subnormals count as zero. A group's amax is NaN if a value is not finite. Its
  amin is below 2^-126 if all its values count as zero.
  """
  magnitude = jnp.abs(x) if signed else x
  if signed:
    least = jnp.min(_twice_order(x), axis=1) >> 1
  else:
    least = jnp.min(as_bits(x) - jnp.uint32(0x00800000), axis=1)
  # Mosaic's maximum propagates NaN.
  return _cleaned(jnp.max(magnitude, axis=1), least)


def _twice_order(x: Array) -> Array:
  """Returns uint32 keys that sort like |x|, but with zero and subnormals last.

  A key is 2 * (bits of |x| - bits of 2^-126), modulo 2^32.
  """
  return (as_bits(x) << 1) - jnp.uint32(0x01000000)


def _cleaned(amax: Array, least: Array) -> tuple[Array, Array]:
  """Returns amax and amin; makes a subnormal amax 0, and an infinite one NaN.

  `least` contains the bits of amin minus the bits of 2^-126.
  """
  amax = jnp.where(amax < SMALLEST_NORMAL, 0.0, amax)
  amax = jnp.where(amax < jnp.inf, amax, jnp.nan)
  return amax, as_float(least + jnp.uint32(0x00800000))


def exponent_bounds(amax: Array, amin: Array) -> tuple[Array, Array]:
  """Returns the biased exponents, int32, of a group's bounds.

  The upper bound is the smallest power of two >= amax (at most 2^127), or NaN
  if amax is NaN. The lower bound is the largest power of two <= amin (at least
  2^-126).
  """
  bits = as_bits(amax)
  upper = (bits >> 23) + jnp.where((bits & 0x7FFFFF) > 0, 1, 0).astype("uint32")
  upper = jnp.clip(upper.astype(jnp.int32), 1, NAN_EXPONENT - 1)
  lower = (as_bits(amin) >> 23).astype(jnp.int32)
  lower = jnp.minimum(jnp.maximum(lower, 1), upper)
  return jnp.where(amax == amax, upper, NAN_EXPONENT), lower


def in_bytes(upper: Array, lower: Array) -> tuple[Array, Array]:
  """Casts biased exponents to the bytes that are stored."""
  return upper.astype(jnp.uint8), lower.astype(jnp.uint8)


def from_bytes(encoded: Encoded) -> tuple[Array, Array]:
  """Inverts `in_bytes`."""
  return encoded.amax.astype(jnp.int32), encoded.range.astype(jnp.int32)


def octaves_between(upper: Array, lower: Array) -> Array:
  return jnp.maximum(upper - lower, 1).astype(jnp.float32)


def exp2_upper(upper: Array) -> Array:
  """Returns 2^(upper - 127) as f32, or NaN if `upper` is `NAN_EXPONENT`."""
  value = as_float((upper << 23).astype(jnp.uint32))
  return jnp.where(upper == NAN_EXPONENT, jnp.nan, value)
