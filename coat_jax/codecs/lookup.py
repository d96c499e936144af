# SPDX-License-Identifier: Apache-2.0
"""Splits codecs into stages, for a step that XLA compiles for a GPU.

A stage ends where XLA should write to memory. The first stage computes the
statistics. If a codec with dynamic range expansion rounds stochastically, it
looks up the two neighbours of each value. A second stage then computes the
indices (`draft`), because XLA generates slow code if it fuses them with
operations after the lookup.

XLA needs about 120 instructions for a power on a GPU, so the six powers per
parameter took longer than all memory accesses. But there are only 256 powers k
and 128 magnitudes of an E4M3 code, so we look up their roots in a table, which
gives the same bits.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from coat_jax.codecs.fp8 import BoundedFP8, ExpandedFP8
from coat_jax.codecs.group import Encoded, Grouped, magnitude_of, share
from coat_jax.numerics.formats import E4M3

Statistics = tuple[Array, Array]

_SIGN, _NAN = 0x80, 0x7F
_MAGNITUDES = 128  # Codes without a sign; the last one is NaN.


@dataclasses.dataclass(frozen=True)
class Stages:
  """A codec of groups, [..., group_size], with statistics [..., 1]."""

  codec: Grouped

  def decode(self, encoded: Encoded) -> Array:
    return self.codec.decode_groups(encoded)

  def statistics(self, x: Array) -> Statistics:
    return self.codec.statistics(x)

  def draft(self, x: Array, statistics: Statistics) -> Array | None:
    """Returns codes that `encode` starts from, or None if it needs none."""
    del x, statistics

  def encode(
    self,
    x: Array,
    noise: Array | None,
    statistics: Statistics,
    draft: Array | None,
  ) -> Encoded:
    del draft
    return self.codec.encode_groups(x, noise, statistics)


@dataclasses.dataclass(frozen=True)
class LookupStages(Stages):
  """`ExpandedFP8` with a table of its roots; a draft is rounded down."""

  codec: ExpandedFP8

  def decode(self, encoded):
    codes, amax, range_ = encoded
    code = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint32)
    t = self._contract(code & _NAN, amax, range_)
    magnitude = t * self.codec.bound(amax)
    return jnp.where(code >= _SIGN, -magnitude, magnitude)

  def draft(self, x, statistics):
    codec = self.codec
    if not codec.needs_noise:
      return None
    t = share(magnitude_of(x), codec.bound(statistics[0]))
    y = codec.expand(t, *statistics)
    # E4M3 has 3 bits of mantissa. Its exponent is biased by 7, f32's by 127,
    # and from 2^-6 down its values are multiples of 2^-9. An integer below 2^23
    # is in the last bits of the f32 that is larger by 2^23.
    bits = lax.bitcast_convert_type(y, jnp.uint32)
    steps = jnp.floor(y * 2.0**9) + 2.0**23
    subnormal = lax.bitcast_convert_type(steps, jnp.uint32) & 0xF
    code = jnp.where(y < 2.0**-6, subnormal, (bits >> 20) - ((127 - 7) << 3))
    code = jnp.where(jnp.isnan(y), _NAN, code)
    return jnp.where(x < 0, code | _SIGN, code).astype(jnp.uint8)

  def encode(self, x, noise, statistics, draft):
    codec, dtype = self.codec, self.codec.dtype
    if draft is None or noise is None:
      return super().encode(x, noise, statistics, draft)
    t = share(magnitude_of(x), codec.bound(statistics[0]))
    code = draft.astype(jnp.uint32)
    below = self._contract(code & _NAN, *statistics)
    # The code above the largest value is NaN, which is never chosen.
    above = self._contract((code & _NAN) + 1, *statistics)
    is_up = t - below > noise * (above - below)
    code = (code + is_up.astype(jnp.uint32)).astype(jnp.uint8)
    return Encoded(lax.bitcast_convert_type(code, dtype), *statistics)

  def _contract(self, code: Array, amax: Array, range_: Array) -> Array:
    """Returns t for codes without signs, uint32."""
    row = self.codec.root_index(amax, range_).astype(jnp.uint32)
    index = row * _MAGNITUDES + code
    return lax.gather(
      self._table(),
      index[..., None],
      lax.GatherDimensionNumbers((), (0,), (0,)),
      slice_sizes=(1,),
      mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )

  def _table(self) -> Array:
    """Returns t, flat f32: for each root, a row of codes without signs."""
    codec = self.codec
    codes = lax.iota(jnp.uint8, _MAGNITUDES)
    y = lax.bitcast_convert_type(codes, codec.dtype).astype(jnp.float32)[None]
    # 256 roots need 256 rows. With one more row, even the NaN that ends row 256
    # has a neighbour.
    root = codec.root_at(lax.iota(jnp.float32, 257)[:, None])
    # Without the barrier, XLA may compute a power for each lookup instead.
    return lax.optimization_barrier(codec.contract(y, root).reshape(-1))


def stages_of(codec: Grouped) -> Stages:
  """Returns the stages of a codec."""
  # A user's subclass may map codes in another way.
  is_known = type(codec) in (ExpandedFP8, BoundedFP8)
  if is_known and isinstance(codec, ExpandedFP8) and codec.dtype == E4M3:
    return LookupStages(codec)
  return Stages(codec)
