# SPDX-License-Identifier: Apache-2.0
"""A user's own codec in one file; codes are uniform in |x|^(1/4).

It shows what a user writes to add a codec. The codec's name is
`tests.codecs.own_codec:make`.
"""

import dataclasses

import jax.numpy as jnp

from coat_jax.codecs import MomentCodec
from coat_jax.codecs.group import Grouped, Rounding, finite_amax, share


@dataclasses.dataclass(frozen=True)
class FourthRoots(Grouped):
  """Decodes int8 codes to sign(code) * (code / 127)^4 * amax, in f32."""

  def _statistics(self, magnitude):
    return finite_amax(magnitude), jnp.uint8(0)

  def _codes(self, magnitude, amax, range_, noise):
    t = share(magnitude, amax)
    y = jnp.sqrt(jnp.sqrt(t)) * 127
    if noise is None:
      return jnp.round(y).astype(jnp.int8)
    lower = jnp.minimum(jnp.floor(y), 126)
    below, above = (lower / 127) ** 4, ((lower + 1) / 127) ** 4
    up = t - below > noise * (above - below)
    return jnp.where(up, lower + 1, lower).astype(jnp.int8)

  def _values(self, codes, amax, range_):
    root = codes.astype(jnp.float32) / 127
    return jnp.sign(root) * root**4 * amax


def make(
  group_size: int = 128, rounding: Rounding = "stochastic"
) -> MomentCodec:
  """Stores moments as fourth roots: 2 + 8 / group_size bytes per parameter."""
  group = FourthRoots(group_size, rounding)
  return MomentCodec(name="fourth_roots", mu=group, nu=group)
