# SPDX-License-Identifier: Apache-2.0
"""Tiles of groups in the registers of one warpgroup, and what PTX adds.

A tile is ROWS groups of 128 values. Each warp holds two groups at a time, each
lane 8 neighbouring values of one, so that

  lane       0        1    ...    15       16       17   ...    31
  values   0..7     8..15      120..127   0..7     8..15     120..127
           ---------- group 0 ----------  ---------- group 1 ----------

a code is loaded 8 bytes at a time, a statistic of a group is one register, and
reducing a group takes four shuffles among 16 lanes.

Pallas has no word for a few instructions that matter here; they are inlined as
PTX. The interpreter knows no PTX: with `interpret` the same functions are
written in jnp, which is also their definition.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from coat_jax.formats import E4M3, qmax

GROUP_SIZE = 128
ROWS = 8
_VECTOR = 8
_WARPS = 4
_ROWS_PER_WARP = 32 * _VECTOR // GROUP_SIZE

LAYOUT = plgpu.Layout.TILED(
  plgpu.Tiling(
    (
      (_WARPS * _ROWS_PER_WARP, GROUP_SIZE),
      (_ROWS_PER_WARP, GROUP_SIZE),
      (_VECTOR,),
    )
  ),
  warp_dims=(-5,),
  lane_dims=(-3, -2),
  vector_dim=-1,
)
GROUP_LAYOUT = LAYOUT.reduce(1)

TILE = (ROWS, GROUP_SIZE)


def load(ref, start) -> Array:
  """A tile, or its groups' statistics, from global memory."""
  layout = LAYOUT if ref.ndim == 2 else GROUP_LAYOUT
  rows = ref.at[pl.ds(start, ROWS)]
  return plgpu.load(rows, layout=layout, optimized=False)


def store(ref, start, x: Array) -> None:
  ref[pl.ds(start, ROWS)] = x


def spread(x: Array) -> Array:
  """[ROWS] to a tile: each group's statistic beside its values."""
  return lax.broadcast_in_dim(x, TILE, (0,))


def iota(axis: int) -> Array:
  """uint32 indices along an axis of a tile; of axis 0 as [ROWS]."""
  if axis == 0:
    return plgpu.broadcasted_iota(jnp.uint32, (ROWS,), 0, layout=GROUP_LAYOUT)
  return plgpu.broadcasted_iota(jnp.uint32, TILE, 1, layout=LAYOUT)


def as_bits(x: Array) -> Array:
  return lax.bitcast_convert_type(x, jnp.uint32)


def as_float(x: Array) -> Array:
  return lax.bitcast_convert_type(x, jnp.float32)


def as_dtype(x: Array, dtype: DTypeLike) -> Array:
  return lax.bitcast_convert_type(x, dtype)


@dataclasses.dataclass(frozen=True)
class Instructions:
  """What is one instruction on the GPU and a definition in the interpreter."""

  interpret: bool

  def reciprocal(self, x: Array) -> Array:
    """1 / x to 1 ulp; a subnormal quotient may be zero."""
    return 1 / x if self.interpret else _inline("rcp.approx.ftz.f32", x)

  def sqrt(self, x: Array) -> Array:
    return jnp.sqrt(x) if self.interpret else _inline("sqrt.approx.ftz.f32", x)

  def to_fp8(self, x: Array, dtype: DTypeLike) -> Array:
    """Rounds to nearest even, saturating. NaN stays NaN."""
    if self.interpret:
      # A GPU's conversions saturate by themselves.
      x = jnp.clip(x, -qmax(dtype), qmax(dtype))
    return x.astype(dtype)

  def e4m3_bits(self, x: Array, factor: float) -> Array:
    """The bits of y = x factor < 512 with E4M3's exponent in place of f32's.

    From bit 20 on they are the code of the neighbour below, subnormal or not.
    """
    if not self.interpret:
      # Below 2^-6 it is a subnormal, which a GPU's multiplication keeps.
      return as_bits(x * (factor * 2.0**-120))
    y = x * factor
    subnormal = (y * 2.0**29).astype(jnp.uint32)
    return jnp.where(y < 2.0**-6, subnormal, as_bits(y) - (120 << 23))

  def floor(self, x: Array) -> tuple[Array, Array]:
    """The integer below |x| < 2^22 as f32 and as int32; for an integer it may
    be the one before."""
    if self.interpret:
      whole = jnp.floor(x)
      return whole, whole.astype(jnp.int32)
    # Adding 1.5 2^23 leaves no bits for a fraction: it rounds, and puts the
    # integer into the lowest bits. XLA would simplify this.
    rounded = (x - 0.5) + 1.5 * 2**23
    integer = as_bits(rounded).astype(jnp.int32) - 0x4B400000
    return rounded - 1.5 * 2**23, integer

  def powers(
    self, significand: Array, exponent: Array, root: Array, scale: Array
  ) -> tuple[Array, Array, Array]:
    """Powers of small integers, which a group's lanes look up.

    With a = root, p(J) = (J / 8)^a:

    Args:
      significand: int32 tile, J in 0..15; the GPU looks at 4 bits.
      exponent: int32 tile, e in 0..15, where 0 counts as 1; as above.
      root: f32 [ROWS], above 0.
      scale: f32 [ROWS].

    Returns:
      2 p(J) - p(J + 1), p(J + 1) - p(J), and scale (448 2^(7 - e))^a, which is
      infinite for numbers 2^-126 / scale only.
    """
    top = 7 + math.log2(qmax(E4M3))
    if not self.interpret:
      return _look_up(significand, exponent, root, scale, top)
    root = spread(root)
    j = (significand & 15).astype(jnp.float32)
    e = jnp.maximum(exponent & 15, 1).astype(jnp.float32)
    lower = jnp.exp2(root * (jnp.log2(j) - 3))
    gap = jnp.exp2(root * (jnp.log2(j + 1) - 3)) - lower
    return lower - gap, gap, jnp.exp2(root * (top - e)) * spread(scale)


def _inline(instruction: str, x: Array) -> Array:
  """An f32 instruction of one operand, on a tile or on statistics."""
  layout = LAYOUT if x.ndim == 2 else GROUP_LAYOUT

  @plgpu.inline_mgpu(
    arg_types=(layout,),
    return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
  )
  def apply(_, x):
    return x._pointwise(x._lift_fast_instr(instruction))

  return apply(x)  # pyright: ignore[reportCallIssue]


def _look_up(significand, exponent, root, scale, top: float):
  """`Instructions.powers`: lane j of 16 has the entries j of three tables."""
  tile = plgpu.ShapeDtypeStruct(TILE, jnp.float32, layout=LAYOUT)

  @plgpu.inline_mgpu(
    arg_types=(LAYOUT, LAYOUT, GROUP_LAYOUT, GROUP_LAYOUT),
    return_type=(tile,) * 3,
  )
  def apply(_, significand, exponent, root, scale):
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)

    def asm(code, *args):
      kinds = ",".join(["=f"] + ["f" if a.type == f32 else "r" for a in args])
      return llvm.inline_asm(f32, list(args), code, kinds)

    def number(value):
      return arith.constant(f32, ir.FloatAttr.get(f32, value))

    def exp2(x):
      return asm("ex2.approx.ftz.f32 $0, $1;", x)

    thread = llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r")
    lane = arith.andi(thread, arith.constant(i32, 15))
    j = arith.uitofp(f32, lane)
    log2 = [
      arith.subf(asm("lg2.approx.ftz.f32 $0, $1;", x), number(3.0))
      for x in (j, arith.addf(j, number(1.0)))
    ]
    e = arith.subf(number(top), arith.maximumf(j, number(1.0)))

    def gather(table, index):
      # Segments of 16 lanes: the index's upper bits do not count.
      code = "shfl.sync.idx.b32 $0, $1, $2, 0x101f, 0xffffffff;"
      return asm(code, table, index)

    def element(x, i):
      return vector.extract(x, dynamic_position=[], static_position=[i])

    outputs = [[], [], []]
    for a, factor, js, es in zip(
      root.registers.flat,
      scale.registers.flat,
      significand.registers.flat,
      exponent.registers.flat,
      strict=True,
    ):
      a, factor = (
        element(x, 0) if isinstance(x.type, ir.VectorType) else x
        for x in (a, factor)
      )
      lower, upper = (exp2(arith.mulf(a, x)) for x in log2)
      gap = arith.subf(upper, lower)
      unit = arith.mulf(exp2(arith.mulf(a, e)), factor)
      tables = arith.subf(lower, gap), gap, unit
      for output, table, indices in zip(
        outputs, tables, (js, js, es), strict=True
      ):
        [size] = ir.VectorType(indices.type).shape
        values = [gather(table, element(indices, i)) for i in range(size)]
        vector_type = ir.VectorType.get((size,), f32)
        output.append(vector.from_elements(vector_type, values))
    registers = significand.registers
    results = []
    for output in outputs:
      out = registers.copy()
      out.flat[:] = output
      results.append(
        mgpu.FragmentedArray(
          _registers=out, _layout=significand.layout, _is_signed=None
        )
      )
    return tuple(results)

  args = significand, exponent, root, scale
  return apply(*args)  # pyright: ignore[reportCallIssue]
