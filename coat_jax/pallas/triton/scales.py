# SPDX-License-Identifier: Apache-2.0
"""The scale of a tensor from the maxima of its tiles, in one launch.

A kernel that finds a tensor's largest magnitude writes one a program, and the
next needs the scale before its first code. XLA takes two or three launches to
get there, a reduction in two stages and what is elementwise behind it: some
microseconds each, with nothing else to run. Here one program does it.

      maxima [P]  ->  largest  ->  scale = largest / qmax  f32 [1]
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from coat_jax.formats import E4M3
from coat_jax.pallas.triton import tiles
from coat_jax.qtensor import amax_to_scale, bits_to_amax

# 64 values a thread of the largest program: more would spill.
_MAX_MAXIMA = 2**16


def bits_to_scale(
  bits: Array,
  dtype: DTypeLike = E4M3,
  *,
  axis_names: tuple[str, ...],
  interpret: bool = False,
) -> Array:
  """`qtensor.amax_to_scale` of the bits of tiles' maxima: f32 [].

  Args:
    bits: int32 of any shape, not negative, see `tiles.amax_bits`.
    dtype: of the codes.
    axis_names: as of `qtensor.tensor_amax`.
    interpret: whether JAX interprets the kernel.
  """
  return _scale_of(bits, dtype, 1, axis_names, interpret)[0]


def bits_to_shared_scale(
  bits: Array,
  dtype: DTypeLike = E4M3,
  *,
  axis_names: tuple[str, ...],
  interpret: bool = False,
) -> tuple[Array, Array]:
  """The same for an operand of two products, and what its kernel reads.

  Each product is multiplied by this scale and the other operand's. XLA makes
  one launch of both multiplications where they read one array, unless that is a
  scalar: so there are two of it in memory.

  Returns:
    The scale f32 [], and an array f32 [k] that begins with it.
  """
  return _scale_of(bits, dtype, 2, axis_names, interpret)


def _scale_of(bits, dtype, count, axis_names, interpret) -> tuple[Array, Array]:
  # Devices of a mesh compare their largest before there is a scale.
  if axis_names or bits.size > _MAX_MAXIMA:
    scale = amax_to_scale(bits_to_amax(bits, axis_names), dtype)
    return scale, scale.reshape(1)
  scales = _scales(bits, jnp.dtype(dtype), count, interpret)
  return scales[0], scales


@functools.partial(jax.jit, static_argnames=("dtype", "count", "interpret"))
def _scales(bits, dtype, count, interpret) -> Array:
  width = pl.next_power_of_2(bits.size)
  return pl.pallas_call(
    functools.partial(_kernel, size=bits.size, dtype=dtype),
    grid=(1,),
    in_specs=[pl.BlockSpec((width,), lambda i: (i,))],
    out_specs=pl.BlockSpec((count,), lambda i: (i,)),
    out_shape=jax.ShapeDtypeStruct((count,), jnp.float32),
    compiler_params=tiles.compiler_params(max(1, min(width // 128, 32))),
    interpret=interpret,
    name="scale",
  )(bits.reshape(-1))


def _kernel(bits_ref, scales_ref, *, size, dtype):
  mask = tiles.inside(bits_ref.shape, (size,), (0,))
  bits = jnp.max(tiles.load(bits_ref, mask, dtype=jnp.int32))
  scale = tiles.tensor_scale(bits, dtype)
  tiles.store(scales_ref, jnp.broadcast_to(scale, scales_ref.shape))
