# SPDX-License-Identifier: Apache-2.0
"""Operations on tiles in registers, for optimizer steps.

A tile consists of 8 groups (`ROWS`) of 128 values. Each of a warpgroup's 4
warps holds two groups, and each of its lanes holds 8 adjacent values of one
group:

  lane       0        1    ...    15       16       17   ...    31
  values   0..7     8..15      120..127   0..7     8..15     120..127
           ---------- group 0 ----------  ---------- group 1 ----------

So a lane loads 8 bytes of codes at a time, and a reduction over a group needs
four shuffles among 16 lanes.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E4M3, qmax
from coat_jax.pallas.mosaic import ptx, rows
from coat_jax.pallas.mosaic.ptx import GROUP_LAYOUT, LAYOUT, ROWS, TILE


def part(ref, start):
  """Returns the part of an array that belongs to the tile at group `start`."""
  return ref.at[pl.ds(start, ROWS)]


def load(part) -> Array:
  """Loads a tile, or the statistics of its groups, from any memory."""
  layout = LAYOUT if len(part.shape) == 2 else GROUP_LAYOUT
  return plgpu.load(part, layout=layout, optimized=False)


def store(ref, start, x: Array) -> None:
  rows.store(part(ref, start), x)


def spread(x: Array) -> Array:
  """Broadcasts statistics [ROWS] to a tile, along the values of each group."""
  return lax.broadcast_in_dim(x, TILE, (0,))


def iota(axis: int) -> Array:
  """Returns uint32 indices: of groups [ROWS] (axis 0) or of values (axis 1)."""
  if axis == 0:
    return plgpu.broadcasted_iota(jnp.uint32, (ROWS,), 0, layout=GROUP_LAYOUT)
  return plgpu.broadcasted_iota(jnp.uint32, TILE, 1, layout=LAYOUT)


def as_bits(x: Array) -> Array:
  return lax.bitcast_convert_type(x, jnp.uint32)


def as_float(x: Array) -> Array:
  return lax.bitcast_convert_type(x, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Instructions:
  """Operations that take fewer instructions on a GPU than plain jnp would.

  The interpreter cannot run PTX, so with `interpret` the methods run plain jnp.
  """

  interpret: bool

  def reciprocal(self, x: Array) -> Array:
    """Returns 1 / x, accurate to 1 ulp; a subnormal result may become zero."""
    return 1 / x if self.interpret else ptx.inline("rcp.approx.ftz.f32", x)

  def sqrt(self, x: Array) -> Array:
    return (
      jnp.sqrt(x) if self.interpret else ptx.inline("sqrt.approx.ftz.f32", x)
    )

  def to_fp8(self, x: Array, dtype: DTypeLike) -> Array:
    """Rounds to nearest even and saturates; NaN stays NaN."""
    if self.interpret:
      # A GPU's conversions saturate, but jnp's do not.
      x = jnp.clip(x, -qmax(dtype), qmax(dtype))
    return x.astype(dtype)

  def e4m3_bits(self, x: Array, factor: float) -> Array:
    """Returns the f32 bits of y = x * factor, but with E4M3's exponent bias.

    y must be in [0, 512). Bits 20 and up are the E4M3 code of y rounded down,
    even if that code is subnormal.
    """
    if not self.interpret:
      # If y is below 2^-6, the product is a subnormal f32. The GPU does not
      # flush it to zero.
      return as_bits(x * (factor * 2.0**-120))
    y = x * factor
    subnormal = (y * 2.0**29).astype(jnp.uint32)
    return jnp.where(y < 2.0**-6, subnormal, as_bits(y) - (120 << 23))

  def e4m3_codes(self, code: Array, x: Array | None) -> Array:
    """Casts uint32 codes 0..0x7F to bytes, and adds the signs of x if given.

    0x7F, the code of NaN, is replaced by 0x7E, the code of the largest number.
    """
    if not self.interpret:
      return ptx.e4m3_codes(code, x)
    code = jnp.minimum(code, jnp.uint32(0x7E))
    if x is not None:
      code = code | ((as_bits(x) >> 24) & jnp.uint32(0x80))
    return code.astype(jnp.uint8)

  def in_f32(self, x: Array) -> Array:
    """Converts an f32 or bf16 tile to f32."""
    if not self.interpret and x.dtype == jnp.bfloat16:
      return ptx.bfloat16_in_f32(x)
    return x.astype(jnp.float32)

  def round_to_bfloat16(self, x: Array, words: Array) -> Array:
    """Rounds like `stochastic.round_to_bfloat16`; all NaNs must be quiet."""
    if not self.interpret:
      return ptx.round_to_bfloat16(x, words)
    bits = as_bits(x)
    # Random bits added to an infinity do not carry into its upper half.
    noisy = jnp.where(x == x, bits + (words >> 16), bits)
    return as_float(noisy & jnp.uint32(0xFFFF0000)).astype(jnp.bfloat16)

  def split(self, bits: Array) -> tuple[Array, Array]:
    """Splits the upper 24 bits into the two arrays of a `SplitWeight`."""
    if not self.interpret:
      return ptx.split(bits)
    high = as_float((bits + jnp.uint32(0x8000)) & jnp.uint32(0xFFFF0000))
    # Let W be the upper 24 bits. W - (high << 8) has the bits of W's last byte.
    low = (bits >> 8).astype(jnp.int32).astype(jnp.int8)
    return high.astype(jnp.bfloat16), low

  def joint_extremes(
    self, largest: tuple[Array, Array], least: tuple[Array, Array]
  ) -> tuple[Array, Array]:
    """Returns each group's maxima of `largest` and minima of `least`.

    Each argument has one tile per moment, and each result is [2, ROWS].
    `largest` is f32, and NaN is larger than any number. `least` is uint32.
    """
    if not self.interpret:
      return ptx.joint_extremes(largest, least)
    return (
      jnp.stack([jnp.max(x, axis=1) for x in largest]),
      jnp.stack([jnp.min(x, axis=1) for x in least]),
    )

  def part(self, x: Array, i: int) -> Array:
    """Returns the statistics [ROWS] of moment i (0 or 1) from [2, ROWS]."""
    return x[i] if self.interpret else ptx.part(x, i)

  def round(self, x: Array, factor: Array) -> tuple[Array, Array]:
    """Rounds x * factor to the nearest integer; returns it as f32 and int32.

    The product must be below 2^22 in magnitude, or -inf, which gives a negative
    int32. If the int32 is cast to a byte, it must pass through another integer
    operation first. Otherwise ptxas 13 converts the f32 to a byte (F2IP), which
    saturates at 255.
    """
    if self.interpret:
      whole = jnp.round(x * factor)
      return whole, whole.astype(jnp.int32)
    # The sum has no fraction bits, and its lowest bits are the rounded integer.
    # XLA would simplify this away, so the interpreter rounds explicitly.
    rounded = x * factor + 1.5 * 2**23
    integer = as_bits(rounded).astype(jnp.int32) - 0x4B400000
    return rounded - 1.5 * 2**23, integer

  def powers(
    self, significand: Array, exponent: Array, root: Array, scale: Array
  ) -> tuple[Array, Array, Array]:
    """Computes powers of small integers; on a GPU, lanes look them up.

    With J = significand, e = exponent, a = root and p(J) = (J / 8)^a, this
    returns

      2 p(J) - p(J + 1), p(J + 1) - p(J) and scale (448 2^(7 - e))^a.

    J and e are int32 tiles, of which only the lowest 4 bits are used; e = 0 is
    treated as 1. `root` and `scale` are f32 [ROWS], and `root` is positive. The
    last result may overflow. When `fp8` encodes x, this happens only if
    |x| <= 2^(a - 128) max(1, 1 / |scale|).
    """
    top = 7 + math.log2(qmax(E4M3))
    if not self.interpret:
      return ptx.powers(significand, exponent, root, scale, top)
    root = spread(root)
    j = (significand & 15).astype(jnp.float32)
    e = jnp.maximum(exponent & 15, 1).astype(jnp.float32)
    lower = jnp.exp2(root * (jnp.log2(j) - 3))
    gap = jnp.exp2(root * (jnp.log2(j + 1) - 3)) - lower
    return lower - gap, gap, jnp.exp2(root * (top - e)) * spread(scale)
