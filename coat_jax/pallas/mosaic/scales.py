# SPDX-License-Identifier: Apache-2.0
"""Computes a tensor's scale from the largest magnitudes of its parts.

Each program of an earlier kernel has written the largest magnitude of its part,
as int32 bits. One more kernel computes the scale from these maxima. XLA would
launch two or three kernels, and each launch leaves the GPU idle for some
microseconds.
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
_MOST = 64 * _THREADS  # Each thread loads up to 64 maxima at a time.


def maxima(programs: int) -> jax.ShapeDtypeStruct:
  """Returns the type of the array to which programs write their maxima.

  The kernel that reads it needs at least one maximum for each of 128 threads.
  If there are fewer programs, each writes its maximum 128 times.
  """
  copies = 1 if programs >= _THREADS else _THREADS
  return jax.ShapeDtypeStruct((programs, copies), jnp.int32)


def store_maximum(bits_gmem, program: Array, bits: Array) -> None:
  """Writes a program's maximum to an array of type `maxima(programs)`."""
  bits_gmem[program] = jnp.full((bits_gmem.shape[1],), bits)


def bits_to_scale(bits: Array, scaling: Scaling, interpret: bool) -> Array:
  """Returns the scale, f32 [], given the bits of the maxima, int32."""
  return _scale_and_copies(bits, scaling, 1, interpret)[0]


def output_scale(bits: Array, output: Scaling, interpret: bool) -> Array | None:
  """Returns the output's scale, or None if it has one scale per block."""
  if type(output) is not PerTensor:
    return None
  return bits_to_scale(bits, output, interpret)


def bits_to_shared_scale(
  bits: Array, scaling: Scaling, interpret: bool
) -> tuple[Array, Array]:
  """Returns the scale as a scalar, f32 [], and as an array of copies, f32 [k].

  Kernels read the array. XLA multiplies the results of two matmuls by the
  scalar, and fuses these multiplications into one kernel only if the scalar is
  an element of a larger array. On a mesh, k is 1.
  """
  return _scale_and_copies(bits, scaling, _THREADS, interpret)


def _scale_and_copies(
  bits: Array, scaling: Scaling, copies: int, interpret: bool
) -> tuple[Array, Array]:
  # On a mesh, XLA computes both the maximum over all devices and the scale.
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
    kernel_name="scale",
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
