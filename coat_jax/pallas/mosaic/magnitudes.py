# SPDX-License-Identifier: Apache-2.0
"""Computes the scales of `numerics.qtensor` from the bits of an amax.

Magnitudes are compared by their bits, as integers, so NaN is the largest.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.numerics.formats import qmax

_TINY_BITS = 0x00800000  # 2^-126
_INFINITY_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000


def magnitude_bits(x: Array) -> Array:
  """Returns the bits of |x| as int32, which sort like the magnitudes."""
  return jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def tensor_scale(bits: Array, dtype: DTypeLike) -> Array:
  """Returns the f32 scale of a tensor, given the bits of its amax."""
  scale_bits = jnp.where(
    bits > _INFINITY_BITS, _NAN_BITS, _scale_bits(bits, dtype)
  )
  return jax.lax.bitcast_convert_type(scale_bits, jnp.float32)


def group_scale(bits: Array, dtype: DTypeLike) -> Array:
  """Returns a group's f32 scale, rounded up to BF16, from its amax's bits."""
  up = (_scale_bits(bits, dtype) + 0xFFFF) & ~0xFFFF
  up = jnp.where(bits > _INFINITY_BITS, _NAN_BITS, up)
  return jax.lax.bitcast_convert_type(up, jnp.float32)


def _scale_bits(bits: Array, dtype: DTypeLike) -> Array:
  """Returns the bits of the scale max(amax * float32(1 / qmax), 2^-126)."""
  amax = jax.lax.bitcast_convert_type(bits, jnp.float32)
  scale = amax * jnp.float32(1 / qmax(dtype))
  scale_bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
  return jnp.maximum(scale_bits, _TINY_BITS)
