# SPDX-License-Identifier: Apache-2.0
"""Computes a tensor's scale from the maxima of its tiles, in one launch.

A kernel that looks for a tensor's largest magnitude writes one maximum per
program, and the next kernel needs the scale before it can write its first code.
XLA takes two or three launches for that, a two-stage reduction and then the
elementwise part; each takes some microseconds with nothing else to run. Here
one program does all of it.

      maxima [P]  ->  largest  ->  scale = largest / qmax  f32 [1]
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import amax_to_scale, bits_to_amax
from coat_jax.numerics.scaling import PerTensor, Scaling
from coat_jax.pallas.triton import tiles

# The largest program holds 64 values per thread: more would spill.
_MAX_MAXIMA = 2**16


def bits_to_scale(
  bits: Array,
  dtype: DTypeLike = E4M3,
  *,
  axis_names: tuple[str, ...],
  interpret: bool = False,
) -> Array:
  """`qtensor.amax_to_scale` for nonnegative int32 `tiles.amax_bits`: f32 []."""
  return _scale_of(bits, dtype, 1, axis_names, interpret)[0]


def output_scale(
  bits: Array, output: Scaling, *, interpret: bool = False
) -> Array | None:
  """`Scaling.find_scale` from the maxima of its tiles; None for blocks."""
  if type(output) is not PerTensor:
    return None
  return bits_to_scale(
    bits, output.dtype, axis_names=output.axis_names, interpret=interpret
  )


def bits_to_shared_scale(
  bits: Array,
  dtype: DTypeLike = E4M3,
  *,
  axis_names: tuple[str, ...],
  interpret: bool = False,
) -> tuple[Array, Array]:
  """`bits_to_scale` for an operand of two products: f32 [], and an array.

  Each product is multiplied by this scale and by the other operand's. XLA fuses
  both multiplications into one launch if they read the same array, but not if
  that array is a scalar. So the array, f32 [k], begins with the scale.
  """
  return _scale_of(bits, dtype, 2, axis_names, interpret)


def _scale_of(bits, dtype, count, axis_names, interpret) -> tuple[Array, Array]:
  # The devices of a mesh compare their maxima before there is a scale.
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
