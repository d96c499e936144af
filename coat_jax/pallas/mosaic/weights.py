# SPDX-License-Identifier: Apache-2.0
"""Parameters on tiles of registers: `optimizer.weights` for kernels.

The same bits, with fewer instructions: what is rounded was computed just now,
so that a NaN is a quiet one.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from coat_jax.pallas.mosaic.registers import Instructions, as_bits, as_float

# The largest f32 that no 8 random bits take to an infinite bf16.
_LARGEST = float(np.uint32(0x7F7F7F00).view(np.float32))


def in_f32(on: Instructions, high: Array, low: Array | None = None) -> Array:
  """`weights.in_f32` of a tile: an array, or both of a `SplitWeight`."""
  x = on.in_f32(high)
  if low is None:
    return x
  added = (low.astype(jnp.int32) << 8).astype(jnp.uint32)
  joined = as_float(as_bits(x) + added)
  joined = jnp.where(joined == joined, joined, x)
  return jnp.where(jnp.abs(x) < jnp.inf, joined, x)


def round_like(
  refs, x: Array, draw: Callable[[], Array], on: Instructions
) -> tuple[Array, ...]:
  """`weights.round_like` of a tile.

  Args:
    refs: of an array, or the two of a `SplitWeight`.
    x: f32 tile.
    draw: gives the tile's random words.
    on: where this runs.

  Returns:
    A tile for each of `refs`, in its dtype.
  """
  if len(refs) == 2:
    return _split(x, draw(), on)
  if refs[0].dtype == jnp.bfloat16:
    return (on.round_to_bfloat16(x, draw()),)
  return (x.astype(refs[0].dtype),)


def _split(x: Array, words: Array, on: Instructions) -> tuple[Array, Array]:
  """`weights.split`."""
  bounded = jnp.clip(x, -_LARGEST, _LARGEST)
  noisy = as_bits(bounded) + (words >> 24)
  # Of what is not finite: an infinity, or the canonical NaN.
  other = as_bits(x) & jnp.uint32(0xFFC00000)
  bits = jnp.where(jnp.abs(x) < jnp.inf, noisy, other)
  return on.split(bits)
