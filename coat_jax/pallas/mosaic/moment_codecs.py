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

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array

from coat_jax.codecs.group import NAN_EXPONENT, SMALLEST_NORMAL, GroupCodec
from coat_jax.pallas.mosaic.registers import (
  Instructions,
  as_bits,
  as_float,
)

_SIGN = 0x80000000


class Statistics(NamedTuple):
  """A group's statistics as they are stored, [ROWS]; None for what is not."""

  amax: Any
  range: Any


@runtime_checkable
class RegisterCodec(Protocol):
  """Encodes and decodes a tile of 8 groups of 128 values in registers."""

  def decode(
    self, codes: Array, statistics: Statistics, signed: bool, on: Instructions
  ) -> Array:
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
      noise: uint32 tile whose low 16 bits are random, or None.
      signed: whether x may be negative.
      on: what is one instruction on the GPU.

    Returns:
      Codes and statistics, in the dtypes that are stored.
    """
    ...


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


def one_and(noise: Array) -> Array:
  """1 + `stochastic.low_half` of the noise, which becomes a mantissa: exact."""
  bits = (noise & jnp.uint32(0xFFFF)) * jnp.uint32(128)
  return as_float(bits + jnp.uint32(0x3F800040))


def uniform_times(noise: Array, x: Array) -> Array:
  """The noise, in (0, 1), times x: one fused operation of a number in (1, 2).

  Were it two, it would be off by no more than 2^-23 x.
  """
  return one_and(noise) * x - x


def extremes(x: Array, signed: bool) -> tuple[Array, Array, Array]:
  """|x|, its amax, NaN where a value is not finite, and the nonzero amin.

  Where every value is zero amin's bits are those of no positive number, and
  larger than any as integers.
  """
  magnitude = jnp.abs(x) if signed else x
  amax = jnp.max(magnitude, axis=1)  # Mosaic's maximum carries a NaN.
  amax = jnp.where(amax < SMALLEST_NORMAL, 0.0, amax)
  amax = jnp.where(amax < jnp.inf, amax, jnp.nan)
  # Modulo 2^32 zero and subnormals come after all others.
  bits = as_bits(x)
  if signed:
    least = jnp.min((bits << 1) - jnp.uint32(0x01000000), axis=1) >> 1
  else:
    least = jnp.min(bits - jnp.uint32(0x00800000), axis=1)
  return magnitude, amax, as_float(least + jnp.uint32(0x00800000))


def exponent_bounds(amax: Array, amin: Array) -> Statistics:
  bits = as_bits(amax)
  upper = (bits >> 23) + jnp.where((bits & 0x7FFFFF) > 0, 1, 0).astype("uint32")
  upper = jnp.clip(upper.astype(jnp.int32), 1, NAN_EXPONENT - 1)
  lower = (as_bits(amin) >> 23).astype(jnp.int32)
  lower = jnp.minimum(jnp.maximum(lower, 1), upper)
  upper = jnp.where(amax == amax, upper, NAN_EXPONENT)
  return Statistics(upper.astype(jnp.uint8), lower.astype(jnp.uint8))


def octaves_between(statistics: Statistics) -> Array:
  upper = statistics.amax.astype(jnp.int32)
  lower = statistics.range.astype(jnp.int32)
  return jnp.maximum(upper - lower, 1).astype(jnp.float32)


def exp2_upper(statistics: Statistics) -> Array:
  """2^(amax - 127), f32: the bound whose exponent is stored as amax."""
  exponent = statistics.amax.astype(jnp.int32)
  value = as_float((exponent << 23).astype(jnp.uint32))
  return jnp.where(exponent == NAN_EXPONENT, jnp.nan, value)
