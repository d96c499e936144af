# SPDX-License-Identifier: Apache-2.0
"""Moment codecs on tiles of registers, one `RegisterCodec` a group codec.

They follow the definitions in `coat_jax.codecs`, statistic by statistic. What
differs is how a quantity is computed, never which one it is:

  * A power is exp2(root log2 x) throughout.
  * |x| is compared by its bits: one minimum finds the smallest nonzero one.
  * A division by a statistic is a product with its reciprocal, one a group.

So a value next to a rounding boundary may get the neighbouring code, and a
group next to a step of k another k: about as often as between two backends.

A codec is found by its exact type: a subclass may encode otherwise, and runs in
plain JAX until it has a register codec of its own (`register`).
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.codecs.group import NAN_EXPONENT, SMALLEST_NORMAL, GroupCodec
from coat_jax.pallas.mosaic.registers import (
  Instructions,
  as_bits,
  as_float,
  spread,
)

_SIGN = 0x80000000


class Statistics(NamedTuple):
  """A group's statistics as they are stored, [ROWS]; None for what is not."""

  amax: Any
  range: Any


class Decoded(NamedTuple):
  """A moment that is a product, not yet multiplied.

  An optimizer multiplies it next: with a number of a group, which costs nothing
  a value, in place of first with one of these and then with its own.

  Attributes:
    values: f32 tile.
    factor: f32 [ROWS], of groups; None for 1.
    last: f32 tile that is multiplied last; None for 1.
  """

  values: Array
  factor: Array | None = None
  last: Array | None = None

  def times(self, scalar: Array) -> Array:
    """The moment times a scalar, an f32 tile."""
    factor = scalar if self.factor is None else spread(self.factor * scalar)
    product = self.values * factor
    return product if self.last is None else product * self.last


@runtime_checkable
class RegisterCodec(Protocol):
  """Encodes and decodes a tile of 8 groups of 128 values in registers."""

  def decode(
    self, codes: Array, statistics: Statistics, signed: bool, on: Instructions
  ) -> Array | Decoded:
    """Decodes a tile to f32.

    Args:
      codes: a tile.
      statistics: of its groups.
      signed: whether values may be negative.
      on: what is one instruction on the GPU.
    """
    ...

  def encode(
    self, x: Array, noise: Array | None, signed: bool, on: Instructions
  ) -> tuple[Array, Statistics]:
    """Encodes a tile.

    Args:
      x: f32 tile.
      noise: f32 tile, uniform in [1, 2), or None.
      signed: whether x may be negative.
      on: what is one instruction on the GPU.

    Returns:
      Codes and statistics, in the dtypes that are stored.
    """
    ...


class FittedCodec(abc.ABC):
  """A register codec whose groups are fitted before their values are encoded.

  Two moments that it `fits_as` each other share the fit: `encode_moments`.
  """

  def encode(
    self, x: Array, noise: Array | None, signed: bool, on: Instructions
  ) -> tuple[Array, Statistics]:
    """See `RegisterCodec`."""
    _, amax, amin = extremes(x, signed)
    return self.codes(x, self.fit(amax, amin, on), noise, signed, on)

  @abc.abstractmethod
  def fits_as(self, other: Any) -> bool:
    """Whether `fit` of another register codec is this one's."""

  @abc.abstractmethod
  def fit(self, amax: Array, amin: Array, on: Instructions) -> Any:
    """What encoding takes of groups: a pytree of 32 bits, of amax' shape."""

  @abc.abstractmethod
  def codes(
    self,
    x: Array,
    fit: Any,
    noise: Array | None,
    signed: bool,
    on: Instructions,
  ) -> tuple[Array, Statistics]:
    """Encodes a tile: as `RegisterCodec.encode`, its groups fitted."""


# What makes a register codec of a group codec, by the group codec's type.
_REGISTER_CODECS: dict[type, Callable[[Any], RegisterCodec]] = {}


def register(group_codec: type) -> Callable[[type], type]:
  """Makes a class the register codec of group codecs of exactly this type.

  Args:
    group_codec: such as `ExpandedFP8`; has an attribute `group_size`.

  Returns:
    A decorator of a `RegisterCodec` whose constructor takes the group codec.

  Examples:
    @moment_codecs.register(MyGroupCodec)
    @dataclasses.dataclass(frozen=True)
    class MyRegisterCodec:
      codec: MyGroupCodec

      def decode(self, codes, statistics, signed, on): ...
      def encode(self, x, noise, signed, on): ...
  """

  def add(register_codec: type) -> type:
    _REGISTER_CODECS[group_codec] = register_codec
    return register_codec

  return add


def is_registered(codec: GroupCodec) -> bool:
  """Whether kernels know a group codec: by its exact type."""
  return type(codec) in _REGISTER_CODECS


def on_registers(codec: GroupCodec) -> RegisterCodec:
  """The register codec of a group codec that `is_registered`."""
  return _REGISTER_CODECS[type(codec)](codec)


def with_sign(magnitude: Array, x: Array | None) -> Array:
  if x is None:
    return magnitude
  return as_float(as_bits(magnitude) | (as_bits(x) & jnp.uint32(_SIGN)))


def uniform_times(noise: Array, x: Array) -> Array:
  """(noise - 1) x: one fused operation, off by no more than 2^-23 x."""
  return noise * x - x


def encode_moments(
  codecs: Sequence[RegisterCodec],
  xs: Sequence[Array],
  noises: Sequence[Array | None],
  on: Instructions,
) -> list[tuple[Array, Statistics]]:
  """Encodes one moment, or two of which the first alone is signed.

  Args:
    codecs: one a moment.
    xs: f32 tiles.
    noises: as `RegisterCodec.encode` takes them.
    on: what is one instruction on the GPU.

  Returns:
    Codes and statistics of each.
  """
  fitted = [codec for codec in codecs if isinstance(codec, FittedCodec)]
  if len(fitted) != 2 or not fitted[0].fits_as(fitted[1]):
    return [
      codec.encode(x, noise, i == 0, on)
      for i, (codec, x, noise) in enumerate(
        zip(codecs, xs, noises, strict=True)
      )
    ]
  # What belongs to groups is computed once for both, in half of the lanes each.
  mu, nu = xs
  amax, least = on.joint_extremes(
    (jnp.abs(mu), nu), (_twice_order(mu), _twice_order(nu))
  )
  amax, amin = _cleaned(amax, least >> 1)
  fit = fitted[0].fit(amax, amin, on)
  fits = [
    jax.tree.map(lambda x, i=i: on.part(x, i), fit) for i in range(len(fitted))
  ]
  return [
    codec.codes(x, fit, noise, i == 0, on)
    for i, (codec, x, fit, noise) in enumerate(
      zip(fitted, xs, fits, noises, strict=True)
    )
  ]


def extremes(x: Array, signed: bool) -> tuple[Array, Array, Array]:
  """|x|, its amax, NaN where a value is not finite, and the nonzero amin.

  Where every value is zero amin is zero.
  """
  magnitude = jnp.abs(x) if signed else x
  if signed:
    least = jnp.min(_twice_order(x), axis=1) >> 1
  else:
    least = jnp.min(as_bits(x) - jnp.uint32(0x00800000), axis=1)
  # Mosaic's maximum carries a NaN.
  return magnitude, *_cleaned(jnp.max(magnitude, axis=1), least)


def _twice_order(x: Array) -> Array:
  """Twice the bits of |x|, less those of the smallest normal.

  Modulo 2^32: zero and subnormals come after all others.
  """
  return (as_bits(x) << 1) - jnp.uint32(0x01000000)


def _cleaned(amax: Array, least: Array) -> tuple[Array, Array]:
  """amax and amin of the largest and of the least normal one, less 2^-126."""
  amax = jnp.where(amax < SMALLEST_NORMAL, 0.0, amax)
  amax = jnp.where(amax < jnp.inf, amax, jnp.nan)
  return amax, as_float(least + jnp.uint32(0x00800000))


def exponent_bounds(amax: Array, amin: Array) -> tuple[Array, Array]:
  """Biased exponents of 2^upper >= amax and of 2^lower <= amin, int32."""
  bits = as_bits(amax)
  upper = (bits >> 23) + jnp.where((bits & 0x7FFFFF) > 0, 1, 0).astype("uint32")
  upper = jnp.clip(upper.astype(jnp.int32), 1, NAN_EXPONENT - 1)
  lower = (as_bits(amin) >> 23).astype(jnp.int32)
  lower = jnp.minimum(jnp.maximum(lower, 1), upper)
  return jnp.where(amax == amax, upper, NAN_EXPONENT), lower


def in_bytes(upper: Array, lower: Array) -> Statistics:
  """Exponents as they are stored."""
  return Statistics(upper.astype(jnp.uint8), lower.astype(jnp.uint8))


def from_bytes(statistics: Statistics) -> tuple[Array, Array]:
  """The inverse of `in_bytes`."""
  upper, lower = statistics
  return upper.astype(jnp.int32), lower.astype(jnp.int32)


def octaves_between(upper: Array, lower: Array) -> Array:
  return jnp.maximum(upper - lower, 1).astype(jnp.float32)


def exp2_upper(upper: Array) -> Array:
  """2^(upper - 127), f32, NaN for `NAN_EXPONENT`."""
  value = as_float((upper << 23).astype(jnp.uint32))
  return jnp.where(upper == NAN_EXPONENT, jnp.nan, value)
