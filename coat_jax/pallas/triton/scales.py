# SPDX-License-Identifier: Apache-2.0
"""Computes scales from maxima (`pallas.scales`) in Triton."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from coat_jax.pallas.magnitudes import tensor_scale
from coat_jax.pallas.scales import ScaleFinder
from coat_jax.pallas.triton import matrix, tiles

# The largest program holds 64 values per thread: more would spill.
_MAX_MAXIMA = 2**16


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _scales(bits, dtype, count, interpret) -> Array:
  width = pl.next_power_of_2(bits.size)
  [scales] = matrix.run(
    functools.partial(_kernel, size=bits.size, dtype=dtype),
    [matrix.vector(width, bits.size, bits)],
    [matrix.vector(count, count, jnp.float32)],
    grid=(1,),
    warps=max(1, min(width // 128, 32)),
    interpret=interpret,
    name="scale",
  )
  return scales


def _kernel(bits_ref, scales_ref, *, size, dtype):
  mask = tiles.inside(bits_ref.shape, (size,), (0,))
  bits = jnp.max(tiles.load(bits_ref, mask, dtype=jnp.int32))
  scale = tensor_scale(bits, dtype)
  tiles.store(scales_ref, jnp.broadcast_to(scale, scales_ref.shape))


_finder = ScaleFinder(_scales, _MAX_MAXIMA)
bits_to_scale = _finder.scale
output_scale = _finder.output_scale
bits_to_shared_scale = _finder.shared_scale
