# SPDX-License-Identifier: Apache-2.0
"""Inlined PTX for the methods of `registers.Instructions`."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from coat_jax.pallas.mosaic import emit

GROUP_SIZE = 128
ROWS = 8  # Number of groups in a tile.
_VECTOR = 8  # Number of values per lane.
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

# The layout of statistics of two moments, [2, ROWS]. Of a group's 16 lanes, 8
# hold the first moment's statistic, and 8 hold the second moment's.
_LANES = 8
PAIR_LAYOUT = plgpu.Layout.TILED(
  plgpu.Tiling(((2, ROWS), (2, _ROWS_PER_WARP), (1,))),
  warp_dims=(-4,),
  lane_dims=(-2, -3, plgpu.Replicated(_LANES)),
  vector_dim=-1,
)
_LAYOUTS = {TILE: LAYOUT, (ROWS,): GROUP_LAYOUT, (2, ROWS): PAIR_LAYOUT}


def inline(instruction: str, x: Array) -> Array:
  """Applies a one-operand f32 instruction to a tile or to statistics."""

  @plgpu.inline_mgpu(
    arg_types=(_LAYOUTS[x.shape],), return_type=_type(x.shape, x.dtype)
  )
  def apply(_, x):
    return x._pointwise(x._lift_fast_instr(instruction))

  return apply(x)  # pyright: ignore


def joint_extremes(
  largest: tuple[Array, Array], least: tuple[Array, Array]
) -> tuple[Array, Array]:
  """Computes `Instructions.joint_extremes`, with one butterfly for two moments.

  In the butterfly's first step, half of a group's 16 lanes send values of the
  first moment, and the other half send values of the second moment.
  """
  pairs = _type((2, ROWS), jnp.float32), _type((2, ROWS), jnp.uint32)

  @plgpu.inline_mgpu(arg_types=(LAYOUT,) * 4, return_type=pairs)
  def apply(_, *tiles):
    is_second = arith.cmpi(
      arith.CmpIPredicate.ne,
      arith.andi(emit.thread(), emit.i32(_LANES)),
      emit.i32(0),
    )

    def of_thread(op, x):
      return functools.reduce(op, emit.elements(_only(x)))

    def reduce(op, a, b):
      x, away = arith.select(is_second, b, a), arith.select(is_second, a, b)
      distance = _LANES
      while distance:
        code = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
        x = op(x, emit.asm(code, away, result=away.type))
        away, distance = x, distance // 2
      return x

    amax = [of_thread(arith.maximumf, x) for x in tiles[:2]]
    least = [of_thread(arith.minui, x) for x in tiles[2:]]
    return (
      _statistic(reduce(arith.maximumf, *amax), pairs[0]),
      _statistic(reduce(arith.minui, *least), pairs[1]),
    )

  return apply(*largest, *least)  # pyright: ignore


def part(x: Array, i: int) -> Array:
  """Computes `Instructions.part`, by reading a lane that holds moment i."""
  one = _type((ROWS,), x.dtype)

  @plgpu.inline_mgpu(arg_types=(PAIR_LAYOUT,), return_type=one)
  def apply(_, x):
    x = _group_scalar(x)
    code = f"shfl.sync.idx.b32 $0, $1, {i * _LANES}, 0x101f, 0xffffffff;"
    x = emit.asm(code, x, result=x.type)
    return _statistic(x, one)

  return apply(x)  # pyright: ignore


def e4m3_codes(code: Array, x: Array | None) -> Array:
  """Computes `Instructions.e4m3_codes`, with four codes per register."""

  def convert(code, *signs):
    pairs = [
      emit.asm("min.u16x2 $0, $1, $2;", pair, emit.i32(0x007E007E))
      for pair in emit.pairs(emit.elements(code), 0x5410)
    ]
    words = emit.pairs(pairs, 0x6420)
    for sign in signs:
      bytes_ = emit.pairs(
        emit.pairs(emit.elements(_bits(sign)), 0x0073), 0x5410
      )
      words = [
        arith.ori(word, arith.andi(x, emit.i32(0x80808080)))
        for word, x in zip(words, bytes_, strict=True)
      ]
    return _packed(words, ir.IntegerType.get_signless(8))

  tiles = (code,) if x is None else (code, x)
  return _on_vectors(convert, jnp.uint8, *tiles)


def bfloat16_in_f32(x: Array) -> Array:
  """Computes `Instructions.in_f32` for bf16, with one instruction per value."""

  def convert(x):
    pairs = vector.bitcast(
      ir.VectorType.get((_VECTOR // 2,), emit.i32_type()), x
    )
    bits = []
    for pair in emit.elements(pairs):
      bits.append(arith.shli(pair, emit.i32(16)))
      bits.append(arith.andi(pair, emit.i32(0xFFFF0000)))
    return _packed(bits, ir.F32Type.get())

  return _on_vectors(convert, jnp.float32, x)


def round_to_bfloat16(x: Array, words: Array) -> Array:
  """Computes `Instructions.round_to_bfloat16`, with two values per register."""

  def noisy(x, word):
    # This `prmt` shifts right by 16. ptxas would turn a shift and an addition
    # into a 64-bit multiply-add.
    noise = emit.prmt(word, emit.i32(0), 0x4432)
    return emit.asm(
      "{ .reg .pred p; .reg .b32 b, r; mov.b32 b, $1; add.u32 r, b, $2; "
      "setp.num.f32 p, $1, $1; selp.b32 $0, r, b, p; }",
      x,
      noise,
    )

  def convert(x, words):
    sums = map(noisy, emit.elements(x), emit.elements(words))
    return _packed(emit.pairs(list(sums), 0x7632), ir.BF16Type.get())

  return _on_vectors(convert, jnp.bfloat16, x, words)


def split(bits: Array) -> tuple[Array, Array]:
  """Computes `Instructions.split`, with two bf16 or four bytes per register."""
  halves = _type(TILE, jnp.bfloat16), _type(TILE, jnp.int8)

  @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=halves)
  def apply(_, bits):
    def nearest(bits):
      words = [arith.addi(x, emit.i32(0x8000)) for x in emit.elements(bits)]
      return _packed(emit.pairs(words, 0x7632), ir.BF16Type.get())

    def second_bytes(bits):
      pairs = emit.pairs(emit.elements(bits), 0x0051)
      i8 = ir.IntegerType.get_signless(8)
      return _packed(emit.pairs(pairs, 0x5410), i8)

    return _tile(nearest, bits), _tile(second_bytes, bits, is_signed=True)

  return apply(bits)  # pyright: ignore


def powers(significand, exponent, root, scale, top: float):
  """Computes `Instructions.powers`; lane j of 16 holds each table's entry j."""

  @plgpu.inline_mgpu(
    arg_types=(LAYOUT, LAYOUT, GROUP_LAYOUT, GROUP_LAYOUT),
    return_type=(_type(TILE, jnp.float32),) * 3,
  )
  def apply(_, significand, exponent, root, scale):
    f32 = ir.F32Type.get()

    def number(value):
      return arith.constant(f32, ir.FloatAttr.get(f32, value))

    def exp2(x):
      return emit.asm("ex2.approx.ftz.f32 $0, $1;", x, result=f32)

    j = arith.uitofp(f32, arith.andi(emit.thread(), emit.i32(15)))
    log2 = [
      arith.subf(
        emit.asm("lg2.approx.ftz.f32 $0, $1;", x, result=f32), number(3.0)
      )
      for x in (j, arith.addf(j, number(1.0)))
    ]
    e = arith.subf(number(top), arith.maximumf(j, number(1.0)))
    a, factor = (_group_scalar(x) for x in (root, scale))
    lower, upper = (exp2(arith.mulf(a, x)) for x in log2)
    gap = arith.subf(upper, lower)
    unit = arith.mulf(exp2(arith.mulf(a, e)), factor)

    def gather(table):
      def convert(indices):
        # The shuffle stays within 16 lanes, and uses only 4 bits of the index.
        code = "shfl.sync.idx.b32 $0, $1, $2, 0x101f, 0xffffffff;"
        found = [
          emit.asm(code, table, i, result=f32) for i in emit.elements(indices)
        ]
        return _packed(found, f32)

      return convert

    tables = (arith.subf(lower, gap), significand), (gap, significand)
    tables = (*tables, (unit, exponent))
    return tuple(_tile(gather(table), index) for table, index in tables)

  return apply(significand, exponent, root, scale)  # pyright: ignore


# --- Tiles and statistics in registers ---------------------------------------


def _type(shape: tuple[int, ...], dtype: DTypeLike) -> plgpu.ShapeDtypeStruct:
  """Returns the type of a tile, or of statistics of one or two moments."""
  layout = _LAYOUTS[shape]
  return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=layout)


def _on_vectors(convert: Callable, dtype: DTypeLike, *tiles: Array) -> Array:
  """Converts tiles: each thread calls `convert` on its vectors of values."""
  is_signed = False if dtype == jnp.uint8 else None

  @plgpu.inline_mgpu(
    arg_types=(LAYOUT,) * len(tiles), return_type=_type(TILE, dtype)
  )
  def apply(_, *tiles):
    return _tile(convert, *tiles, is_signed=is_signed)

  return apply(*tiles)  # pyright: ignore


def _tile(
  convert: Callable, *tiles: mgpu.FragmentedArray, is_signed: bool | None = None
) -> mgpu.FragmentedArray:
  """Does the same as `_on_vectors`, but within inlined code.

  Integers require `is_signed`.
  """
  registers = map(convert, *(tile.registers.flat for tile in tiles))
  return emit.array(registers, TILE, LAYOUT, is_signed)


def _statistic(x, kind: plgpu.ShapeDtypeStruct) -> mgpu.FragmentedArray:
  """Converts one number per thread to an array of statistics."""
  register = vector.from_elements(ir.VectorType.get((1,), x.type), [x])
  is_signed = {"int32": True, "uint32": False}.get(jnp.dtype(kind.dtype).name)
  return emit.array([register], kind.shape, _LAYOUTS[kind.shape], is_signed)


def _group_scalar(statistic: mgpu.FragmentedArray):
  """Returns the statistic of this thread's group, as a number."""
  return emit.scalar(_only(statistic))


def _only(x: mgpu.FragmentedArray):
  [register] = x.registers.flat
  return register


def _bits(x):
  """Returns the bits of a vector of f32, as i32."""
  return arith.bitcast(ir.VectorType.get(x.type.shape, emit.i32_type()), x)


def _packed(words: list, element_type):
  """Combines registers into one vector of the thread's 8 values."""
  x = vector.from_elements(
    ir.VectorType.get((len(words),), words[0].type), words
  )
  return vector.bitcast(ir.VectorType.get((_VECTOR,), element_type), x)
