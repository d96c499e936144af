# SPDX-License-Identifier: Apache-2.0
"""Computes a tensor's scale from the maxima of its tiles, in one launch.

A kernel that looks for a tensor's largest magnitude writes the bits of one
maximum per program. To compute a scale from them, XLA would launch two or three
kernels, and the GPU would idle for some microseconds in each. Here one program
computes it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from coat_jax.numerics.qtensor import amax_to_scale, bits_to_amax
from coat_jax.numerics.scaling import PerTensor, Scaling
from coat_jax.pallas.magnitudes import tensor_scale
from coat_jax.pallas.triton import matrix, tiles

# The largest program holds 64 values per thread: more would spill.
_MAX_MAXIMA = 2**16


def bits_to_scale(bits: Array, scaling: Scaling, interpret: bool) -> Array:
  """Returns the scale, f32 [], from int32 `tiles.amax_bits`."""
  return _scale_and_copies(bits, scaling, 1, interpret)[0]


def output_scale(bits: Array, output: Scaling, interpret: bool) -> Array | None:
  """Returns `bits_to_scale`, or None for blocks, which find their own."""
  if type(output) is not PerTensor:
    return None
  return bits_to_scale(bits, output, interpret)


def bits_to_shared_scale(
  bits: Array, scaling: Scaling, interpret: bool
) -> tuple[Array, Array]:
  """Returns `bits_to_scale`, and an array f32 [k] that begins with the scale.

  Use both if two products read the operand. Each product is multiplied by this
  scale and by the other operand's. XLA fuses both multiplications into one
  launch if they read the same array, but not if that array is a scalar.
  """
  return _scale_and_copies(bits, scaling, 2, interpret)


def _scale_and_copies(
  bits: Array, scaling: Scaling, count: int, interpret: bool
) -> tuple[Array, Array]:
  # The devices of a mesh compare their maxima before there is a scale.
  if scaling.axis_names or bits.size > _MAX_MAXIMA:
    amax = bits_to_amax(bits, scaling.axis_names)
    scale = amax_to_scale(amax, scaling.dtype)
    return scale, scale.reshape(1)
  scales = _scales(bits, jnp.dtype(scaling.dtype), count, interpret)
  return scales[0], scales


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
