# SPDX-License-Identifier: Apache-2.0
"""Operations on tiles in registers, for the bodies of kernels.

They compute in f32 unless documented otherwise, and match the definitions in
`formats` and `qtensor`. XLA cannot drop or split a cast in a kernel, so we need
not round in f32 before we cast to FP8.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from coat_jax.numerics.formats import qmax
from coat_jax.pallas.magnitudes import group_scale, magnitude_bits

# --- Bounds, loads and stores ------------------------------------------------


def iota(shape: tuple[int, ...], axis: int) -> Array:
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def inside(
  tile: tuple[int, ...],
  shape: tuple[int, ...],
  index: tuple[Array | int, ...],
) -> Array | None:
  """Returns the mask of tile `index`'s values in the array; None for all.

  Loads and stores need this mask: a tile at an array's edge may reach beyond
  it, and Pallas does not mask such values on a GPU.
  """
  mask = None
  for axis, (size, n, i) in enumerate(zip(tile, shape, index, strict=True)):
    if n % size:
      position = i * size + iota(tile, axis)
      mask = position < n if mask is None else mask & (position < n)
  return mask


def load(
  ref, mask: Array | None = None, *, dtype: DTypeLike = jnp.float32
) -> Array:
  """Loads a tile in `dtype`, with zeros where the mask is False."""
  zero = None if mask is None else jnp.zeros((), ref.dtype)
  return plt.load(ref, mask=mask, other=zero).astype(dtype)


def store(ref, x: Array, mask: Array | None = None) -> None:
  """Writes a tile in the dtype of `ref`; this cast does not saturate."""
  plt.store(ref, x.astype(ref.dtype), mask=mask)


def store_transposed(
  ref,
  x: Array,
  mask: Array | None = None,
  leading: tuple[Array, ...] = (),
  first: int = 0,
) -> None:
  """Writes x [rows, columns] to `ref[*leading, first:]`, transposed.

  The mask selects values of x. We don't write `ref[...] = x.T`: XLA would move
  the transpose up to the loads and compute everything in between twice if x is
  also stored as it is.
  """
  row, column = iota(x.shape, 0), iota(x.shape, 1)
  at = ref.at[(*leading, first + column, row)]
  plt.store(at, x.astype(ref.dtype), mask=mask)


def store_scalar(ref, x: Array) -> None:
  """Writes a value to a tile of any rank that holds a single value."""
  ref[(0,) * len(ref.shape)] = x


# --- Magnitudes ----------------------------------------------------------


def amax_bits(x: Array) -> Array:
  """Returns the f32 bits of a tile's largest magnitude, as int32 []."""
  return jnp.max(magnitude_bits(x))


# --- Casts and groups --------------------------------------------------------


def saturating_cast(x: Array, dtype: DTypeLike) -> Array:
  """Casts f32 to an FP8 format, clipped to ±qmax; NaN is kept."""
  limit = qmax(dtype)
  clipped = jnp.minimum(jnp.maximum(x, -limit), limit)
  # Triton's min and max return the other operand for a NaN.
  return jnp.where(x != x, x, clipped).astype(dtype)


def _split_groups(x: Array, group_size: int) -> Array:
  """Reshapes [..., n] to [..., groups, group_size]."""
  return x.reshape(*x.shape[:-1], -1, group_size)


def quantize_groups(
  x: Array, *, group_size: int, dtype: DTypeLike
) -> tuple[Array, Array]:
  """Quantizes f32 [..., n] to codes [..., n] and f32 scales [..., groups].

  Scales are BF16 values. They are rounded up, so a quotient exceeds qmax by at
  most its rounding error, which the cast rounds away: we need not clip.
  """
  groups = _split_groups(x, group_size)
  bits = jnp.max(magnitude_bits(groups), axis=-1)
  scale = group_scale(bits, dtype)
  codes = (groups / scale[..., None]).astype(dtype)
  return codes.reshape(x.shape), scale


def dequantize_groups(codes: Array, scale: Array, *, group_size: int) -> Array:
  """Dequantizes codes [..., n] with scales [..., groups] to f32 [..., n]."""
  groups = _split_groups(codes.astype(jnp.float32), group_size)
  values = groups * scale.astype(jnp.float32)[..., None]
  return values.reshape(codes.shape)


def dot(a: Array, b: Array, summed: tuple[int, int], precision=None) -> Array:
  """Sums products over one axis of a and one of b, in f32."""
  return jax.lax.dot_general(
    a,
    b,
    (((summed[0],), (summed[1],)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )
