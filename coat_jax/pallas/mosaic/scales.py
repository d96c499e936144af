# SPDX-License-Identifier: Apache-2.0
"""Computes a tensor's scale from the maxima of its parts, in one launch.

A kernel that looks for a tensor's largest magnitude writes the bits of one
maximum per program. To compute a scale from them, XLA would launch two or three
kernels, and the GPU would idle for some microseconds in each.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.numerics.qtensor import amax_to_scale, bits_to_amax
from coat_jax.numerics.scaling import PerTensor, Scaling
from coat_jax.pallas.mosaic import rows
from coat_jax.pallas.mosaic.magnitudes import tensor_scale
from coat_jax.pallas.mosaic.row_ptx import LANES, THREAD_LAYOUT, WARPS

_THREADS = WARPS * LANES
# A thread loads 64 maxima at a time.
_MOST = 64 * _THREADS


def maxima(programs: int) -> jax.ShapeDtypeStruct:
  """Returns the shape of the programs' maxima: at least one per thread here.

  If there are few programs, each writes its maximum several times.
  """
  copies = 1 if programs >= _THREADS else _THREADS
  return jax.ShapeDtypeStruct((programs, copies), jnp.int32)


def store_maximum(bits_gmem, program: Array, bits: Array) -> None:
  """Writes a program's maximum to an array like `maxima`."""
  bits_gmem[program] = jnp.full((bits_gmem.shape[1],), bits)


def bits_to_scale(bits: Array, scaling: Scaling, interpret: bool) -> Array:
  """Returns the scale, f32 [], from int32 maxima."""
  return _scale_and_copies(bits, scaling, 1, interpret)[0]


def output_scale(bits: Array, output: Scaling, interpret: bool) -> Array | None:
  """Returns `bits_to_scale`, or None for blocks, which find their own."""
  if type(output) is not PerTensor:
    return None
  return bits_to_scale(bits, output, interpret)


def bits_to_shared_scale(
  bits: Array, scaling: Scaling, interpret: bool
) -> tuple[Array, Array]:
  """Returns the scale, f32 [], and an array f32 [k] that begins with it.

  The kernel that writes the operand's codes reads the array. Two products read
  the operand, and each is multiplied by this scale. XLA fuses these
  multiplications into one launch only if the scale is an element of a larger
  array, which it is here.
  """
  return _scale_and_copies(bits, scaling, _THREADS, interpret)


def _scale_and_copies(
  bits: Array, scaling: Scaling, copies: int, interpret: bool
) -> tuple[Array, Array]:
  # The devices of a mesh compare their maxima before there is a scale.
  if scaling.axis_names:
    amax = bits_to_amax(bits, scaling.axis_names)
    scale = amax_to_scale(amax, scaling.dtype)
    return scale, scale.reshape(1)
  scales = _scales(bits, jnp.dtype(scaling.dtype), copies, interpret)
  return scales[0], scales


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _scales(bits, dtype, copies, interpret) -> Array:
  [scales] = rows.run(
    functools.partial(_kernel, dtype=dtype),
    [bits.reshape(-1)],
    [jax.ShapeDtypeStruct((copies,), jnp.float32)],
    grid=(1,),
    interpret=interpret,
    name="scale",
  )
  return scales


def _kernel(bits_gmem, scales_gmem, *, dtype):
  [count] = bits_gmem.shape
  size = min(count // _THREADS * _THREADS, _MOST)

  def step(i, largest):
    start = jnp.minimum(i * size, count - size)
    part = bits_gmem.at[pl.ds(start, size)]
    bits = plgpu.load(part, layout=THREAD_LAYOUT, optimized=False)
    return jnp.maximum(largest, jnp.max(bits))

  bits = lax.fori_loop(0, pl.cdiv(count, size), step, jnp.int32(0))
  # Mosaic has no bitcasts of scalars.
  bits = jnp.full(scales_gmem.shape, bits)
  scales_gmem[...] = tensor_scale(bits, dtype)
