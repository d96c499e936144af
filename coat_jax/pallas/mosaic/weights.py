# SPDX-License-Identifier: Apache-2.0
"""Reads and rounds parameters in kernels, as `optimizer.weights` does.

The results have the same bits. Kernels need fewer instructions, because they
round values that they have just computed, among which every NaN is quiet.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from coat_jax.pallas.mosaic.registers import Instructions, as_bits, as_float

# The largest f32 that stays finite in bf16 after 8 random bits are added.
_LARGEST = float(np.uint32(0x7F7F7F00).view(np.float32))


def in_f32(on: Instructions, high: Array, low: Array | None = None) -> Array:
  """Converts a tile to f32; `low` is the second array of a `SplitWeight`."""
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
  """Rounds an f32 tile to the dtypes of `refs`, as `optimizer.weights` does.

  `refs` contains one ref, or the two of a `SplitWeight`. `draw` returns the
  tile's random words.
  """
  if len(refs) == 2:
    return _split(x, draw(), on)
  if refs[0].dtype == jnp.bfloat16:
    return (on.round_to_bfloat16(x, draw()),)
  return (x.astype(refs[0].dtype),)


def _split(x: Array, words: Array, on: Instructions) -> tuple[Array, Array]:
  """Splits an f32 tile as `optimizer.weights.split` splits an array."""
  bounded = jnp.clip(x, -_LARGEST, _LARGEST)
  noisy = as_bits(bounded) + (words >> 24)
  # Infinities stay as they are, and NaNs keep only their sign.
  other = as_bits(x) & jnp.uint32(0xFFC00000)
  bits = jnp.where(jnp.abs(x) < jnp.inf, noisy, other)
  return on.split(bits)
