# SPDX-License-Identifier: Apache-2.0
"""Computes scales from maxima (`pallas.scales`) in Mosaic GPU."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from coat_jax.pallas.magnitudes import tensor_scale
from coat_jax.pallas.mosaic import rows
from coat_jax.pallas.mosaic.row_ptx import LANES, THREAD_LAYOUT, WARPS
from coat_jax.pallas.scales import ScaleFinder

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


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _scales(bits, dtype, count, interpret) -> Array:
  # A copy is stored by one thread, or several by all of a warpgroup.
  copies = 1 if count == 1 else _THREADS
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


_finder = ScaleFinder(_scales)
bits_to_scale = _finder.scale
output_scale = _finder.output_scale
bits_to_shared_scale = _finder.shared_scale
