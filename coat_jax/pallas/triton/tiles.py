# SPDX-License-Identifier: Apache-2.0
"""Operations of kernels on tiles in registers.

Functions here work on arrays inside a kernel's body, in f32 unless they
document otherwise. They compute what `formats` and `qtensor` define, in the
same order:
  * Largest magnitudes are found as integers, which propagate NaN; Triton's
    maximum of floats drops it.
  * scale = amax * float32(1 / qmax), at least 2^-126, and 1 for zeros; a
    group's scale is rounded up to BF16.
  * Codes are x / scale, rounded to nearest even by the cast. XLA cannot drop or
    split a cast in a kernel, so we need not round in f32 first.

A tile at the edge of an array reaches beyond it if the array's axes are not
multiples of the tile's. Pallas does not mask such values on a GPU, so loads and
stores take the mask of `inside`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from coat_jax.numerics.formats import qmax
from coat_jax.numerics.scaling import (
  Blocks,
  BlockScales,
  Layout,
  PerTensor,
  Scales,
  Scaling,
)

# Indices are int32, including those past the end of the array in the last tile.
MAX_ELEMENTS = 2**31 - 2**20

GROUP_SIZES = (16, 32, 64, 128)

_TINY_BITS = 0x00800000  # 2^-126
_INFINITY_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000
_ONE_BITS = 0x3F800000


# --- Bounds, loads and stores ------------------------------------------------


def inside(
  tile: tuple[int, ...],
  shape: tuple[int, ...],
  index: tuple[Array | int, ...],
) -> Array | None:
  """Returns which values of tile `index` are in the array; None for all."""
  mask = None
  for axis, (size, n, i) in enumerate(zip(tile, shape, index, strict=True)):
    if n % size:
      position = i * size + jax.lax.broadcasted_iota(jnp.int32, tile, axis)
      mask = position < n if mask is None else mask & (position < n)
  return mask


def load(
  ref, mask: Array | None = None, *, dtype: DTypeLike = jnp.float32
) -> Array:
  """Loads a tile in `dtype`, with zeros where the mask is False."""
  zero = None if mask is None else jnp.zeros((), ref.dtype)
  return plt.load(ref, mask=mask, other=zero).astype(dtype)


def store(ref, x: Array, mask: Array | None = None) -> None:
  """Writes a tile in the dtype of `ref` where the mask is True.

  Don't use it to round to FP8: see `saturating_cast`, `quantize_groups`.
  """
  plt.store(ref, x.astype(ref.dtype), mask=mask)


def store_transposed(
  ref,
  x: Array,
  mask: Array | None = None,
  leading: tuple[Array, ...] = (),
  first: int = 0,
) -> None:
  """Writes x [rows, columns] to `ref[*leading, first:]`, transposed.

  `mask` tells which values of x to write, before the transpose. We don't write
  `ref[...] = x.T`: XLA would move the transpose up to the loads and compute
  everything in between twice if x is also stored as it is.
  """
  row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
  column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
  at = ref.at[(*leading, first + column, row)]
  plt.store(at, x.astype(ref.dtype), mask=mask)


def store_scalar(ref, x: Array) -> None:
  """Writes a value to a tile that holds a single value, of any rank."""
  ref[(0,) * len(ref.shape)] = x


# --- Magnitudes and scales ---------------------------------------------------


def magnitude_bits(x: Array) -> Array:
  """Returns the bits of |x| as int32, which compare as magnitudes do."""
  return jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def amax_bits(x: Array) -> Array:
  """Returns the bits of a tile's largest magnitude as an f32: int32 []."""
  return jnp.max(magnitude_bits(x))


def tensor_scale(bits: Array, dtype: DTypeLike) -> Array:
  """Returns a tensor's scale, f32, from the bits of its amax."""
  scale_bits = jnp.where(
    bits > _INFINITY_BITS, _NAN_BITS, _scale_bits(bits, dtype)
  )
  return jax.lax.bitcast_convert_type(scale_bits, jnp.float32)


def group_scale(bits: Array, dtype: DTypeLike) -> Array:
  """Returns a group's scale from the bits of its amax: f32, exact in BF16."""
  # Round up; infinity stays as it is.
  up = (_scale_bits(bits, dtype) + 0xFFFF) & ~0xFFFF
  up = jnp.where(bits > _INFINITY_BITS, _NAN_BITS, up)
  return jax.lax.bitcast_convert_type(up, jnp.float32)


def _scale_bits(bits: Array, dtype: DTypeLike) -> Array:
  """Returns the bits of the scale of an amax that is not NaN."""
  amax = jax.lax.bitcast_convert_type(bits, jnp.float32)
  scale = amax * jnp.float32(1 / qmax(dtype))
  scale_bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
  return jnp.where(amax == 0, _ONE_BITS, jnp.maximum(scale_bits, _TINY_BITS))


# --- Casts, groups -----------------------------------------------------------


def saturating_cast(x: Array, dtype: DTypeLike) -> Array:
  """Casts f32 to an FP8 format, clipped to ±qmax; NaN is kept."""
  limit = qmax(dtype)
  clipped = jnp.minimum(jnp.maximum(x, -limit), limit)
  # Triton's min and max return the other operand for a NaN.
  return jnp.where(x != x, x, clipped).astype(dtype)


def split_groups(x: Array, group_size: int) -> Array:
  """Reshapes [..., n] to [..., groups, group_size]."""
  return x.reshape(*x.shape[:-1], -1, group_size)


def quantize_groups(
  x: Array, *, group_size: int, dtype: DTypeLike
) -> tuple[Array, Array]:
  """Quantizes f32 [..., n] to codes [..., n] and f32 scales [..., groups].

  Scales are BF16 values. They are rounded up, so a quotient exceeds qmax by at
  most its rounding error, which the cast rounds away: we need not clip.
  """
  groups = split_groups(x, group_size)
  bits = jnp.max(magnitude_bits(groups), axis=-1)
  scale = group_scale(bits, dtype)
  codes = (groups / scale[..., None]).astype(dtype)
  return codes.reshape(x.shape), scale


def dequantize_groups(codes: Array, scale: Array, *, group_size: int) -> Array:
  """Dequantizes codes [..., n] with scales [..., groups] to f32 [..., n]."""
  groups = split_groups(codes.astype(jnp.float32), group_size)
  values = groups * scale.astype(jnp.float32)[..., None]
  return values.reshape(codes.shape)


# --- Matrices in tiles -------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tile:
  """A program's share of a matrix, and the order of programs.

  Attributes:
    rows, columns: powers of two, at least 16.
    warps: number of warps that share the tile.
    down: whether consecutive programs go down the rows instead of across the
      columns.
  """

  rows: int
  columns: int
  warps: int
  down: bool = True

  def grid(self, m: int, n: int) -> tuple[int, int]:
    """Returns the grid of programs for a matrix [m, n]."""
    down, across = pl.cdiv(m, self.rows), pl.cdiv(n, self.columns)
    return (down, across) if self.down else (across, down)

  def index(self) -> tuple[Array, Array]:
    """Returns which tile this program has, (down, across); for kernels."""
    first, second = pl.program_id(0), pl.program_id(1)
    return (first, second) if self.down else (second, first)

  def spec(
    self, shape: tuple[int, ...], axes: tuple[int | None, ...]
  ) -> pl.BlockSpec:
    """Returns the spec of tiles of `shape`; an axis of None stays at 0."""

    def index(first, second):
      tile = (first, second) if self.down else (second, first)
      return tuple(0 if axis is None else tile[axis] for axis in axes)

    return pl.BlockSpec(shape, index)

  def matrix(self, per_column: int = 1) -> pl.BlockSpec:
    """Returns the spec of tiles of [m, n], or of [m, n / per_column]."""
    return self.spec((self.rows, self.columns // per_column), (0, 1))

  def operand(
    self, m: int, n: int, dtype: DTypeLike, layout: Layout
  ) -> tuple[tuple, tuple]:
    """Returns output specs and shapes, each (rows or None, columns or None)."""
    rows = columns = None, None
    if layout != "columns":
      rows = self.matrix(), jax.ShapeDtypeStruct((m, n), dtype)
    if layout != "rows":
      columns = (
        self.spec((self.columns, self.rows), (1, 0)),
        jax.ShapeDtypeStruct((n, m), dtype),
      )
    specs, shapes = zip(rows, columns, strict=True)
    return specs, shapes


def scalar_spec() -> pl.BlockSpec:
  """Returns the spec of a [1] that every program reads."""
  return pl.BlockSpec((1,), lambda *_: (0,))


def store_operand(
  rows_ref, columns_ref, codes: Array, index, shape: tuple[int, int]
) -> None:
  """Writes a tile of codes of [m, n] to the layouts whose ref is not None."""
  mask = inside(codes.shape, shape, index)
  if rows_ref is not None:
    store(rows_ref, codes, mask)
  if columns_ref is not None:
    store_transposed(columns_ref, codes, mask)


def compiler_params(warps: int) -> plt.CompilerParams:
  return plt.CompilerParams(num_warps=warps, num_stages=1)


# --- Why a kernel cannot take its arguments; None if it can -----------------


def why_not_shape(shape: tuple[int, ...]) -> str | None:
  """Returns why kernels cannot take arrays [..., n] of this shape."""
  size = math.prod(shape)
  if not shape or shape[-1] % 16 or not size:
    return (
      "the last axis must be a multiple of 16 and no axis empty for the Triton "
      f"kernel, got {shape}"
    )
  if size > MAX_ELEMENTS:
    return f"the Triton kernel indexes in int32, got shape {shape}"
  return None


def why_not_groups(
  shape: tuple[int, ...], group_size: int | None
) -> str | None:
  """Returns why kernels cannot take this shape in groups of this size."""
  if group_size is None or group_size not in GROUP_SIZES:
    return f"the Triton kernel has groups of {GROUP_SIZES}, got {group_size}"
  if shape and shape[-1] % group_size:
    return (
      f"the last axis must be a multiple of the group size {group_size} for "
      f"the Triton kernel, got {shape[-1]}"
    )
  return why_not_shape(shape)


def why_not_dtype(*dtypes: DTypeLike) -> str | None:
  """Returns why kernels cannot read or write values of these dtypes."""
  for dtype in dtypes:
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
      return f"the Triton kernel reads bfloat16 and float32, got {dtype}"
  return None


def why_not_scale(scale: Scales | None) -> str | None:
  """Returns why kernels cannot write an operand: its scale must be known."""
  if scale is None or isinstance(scale, BlockScales):
    return "kernels write operands with one scale that is known, got none"
  return None


def why_not_scaling(scaling: Scaling, *known: DTypeLike) -> str | None:
  """Returns why kernels cannot write operands: one scale, a known format."""
  if type(scaling) is not PerTensor:
    return (
      "kernels write operands with one scale per tensor, got "
      f"{type(scaling).__name__}"
    )
  return why_not_format(scaling.dtype, *known)


def why_not_output(scaling: Scaling, *known: DTypeLike) -> str | None:
  """Like `why_not_scaling`, but allows blocks, which find their own scales."""
  if type(scaling) is Blocks:
    return None
  return why_not_scaling(scaling, *known)


def why_not_format(dtype: DTypeLike, *known: DTypeLike) -> str | None:
  """Returns why a kernel cannot read or write codes of this format."""
  if dtype in known:
    return None
  names = " and ".join(jnp.dtype(x).name for x in known)
  return f"the Triton kernel has {names}, got {jnp.dtype(dtype).name}"


def why_not_columns(shape: tuple[int, ...], layout: Layout) -> str | None:
  """Returns why kernels cannot write columns of this many rows."""
  rows = math.prod(shape[:-1])
  if layout != "rows" and rows % 16:
    return (
      f"the Triton kernel writes columns of a multiple of 16 rows, got {rows}"
    )
  return None
