# SPDX-License-Identifier: Apache-2.0
"""Inlined PTX for `rows` and `tiles`: quotients, transposes, sums over rows.

`rows` and `tiles` also define in jnp what these functions compute.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from coat_jax.pallas.mosaic import emit
from coat_jax.pallas.mosaic.emit import number

WARPS, LANES = 4, 32
VECTOR = 8  # Number of values that a lane loads at a time.
COLUMNS = 128  # Width of a tile.
_CHUNK = 16  # Number of bytes per store to the column layout.

TILE_LAYOUT = plgpu.Layout.TILED(
  plgpu.Tiling(((32, COLUMNS), (8, COLUMNS), (4, VECTOR))),
  warp_dims=(-6,),
  lane_dims=(-4, -3),
  vector_dim=-1,
)

# One value per thread.
THREAD_LAYOUT = plgpu.Layout.TILED(
  plgpu.Tiling(((WARPS * LANES,), (LANES,), (1,))),
  warp_dims=(-3,),
  lane_dims=(-2,),
  vector_dim=-1,
)
# Shared memory for `sum_over_rows`.
SUMS = plgpu.SMEM((2 * WARPS * COLUMNS,), jnp.float32)


def scales_layout(size: int):
  """Returns the layout of a tile's scales [height, 128 / size].

  A lane holds one scale for each of its vectors of 8 values.
  """
  groups = COLUMNS // size
  return plgpu.Layout.TILED(
    plgpu.Tiling(((32, groups), (8, groups), (4, 1))),
    warp_dims=(-6,),
    lane_dims=(-4, -3, plgpu.Replicated(size // VECTOR)),
    vector_dim=-1,
  )


def spread_scales(scale: Array, size: int) -> Array:
  """Repeats each scale of a tile `size` times along its row."""
  shape = scale.shape[0], COLUMNS
  out = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE_LAYOUT)

  @plgpu.inline_mgpu(arg_types=(scales_layout(size),), return_type=out)
  def apply(_, scale):
    kind = ir.VectorType.get((VECTOR,), ir.F32Type.get())
    numbers = map(emit.scalar, scale.registers.flat)
    registers = [vector.broadcast(kind, x) for x in numbers]
    return emit.array(registers, shape, TILE_LAYOUT)

  return apply(scale)  # pyright: ignore


def columns_layout(height: int):
  """Returns the layout of a transposed tile [128, height]."""
  columns = LANES * _CHUNK // height  # Per warp.
  return plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS * columns, height), (columns, height), (_CHUNK,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
  )


def quotient(x: Array, scale: Array, limit: float | None, layout) -> Array:
  """Returns x / scale, correctly rounded if |x / scale| is at most `limit`.

  Beyond `limit`, the result has the right sign and a magnitude of about `limit`
  or more. Without a limit, an infinite x or an overflowing quotient gives NaN.
  """
  f32 = "{ .reg .f32 q, r; "
  # If the scale is infinite, its reciprocal is 0, so the quotient is x * 0: 0,
  # or NaN if x is not finite. But the remainder, x - quotient * scale, would
  # always be NaN (0 * inf), so it is computed with a scale of 0 instead.
  divisor = (
    "{ .reg .pred p; testp.infinite.f32 p, $1; "
    f"selp.f32 $0, {number(0.0)}, $1, p; }}"
  )
  reciprocal = (
    f"{f32} rcp.approx.ftz.f32 q, $1; neg.f32 r, $2; "
    f"fma.rn.f32 r, r, q, {number(1.0)}; fma.rn.f32 $0, r, q, q; }}"
  )
  # Clipping first keeps the remainder from being inf - inf.
  clip = f"min.NaN.xorsign.abs.f32 q, q, {number(limit)}; " if limit else ""
  divide = (
    f"{f32} mul.rn.f32 q, $1, $3; {clip}"
    "neg.f32 r, q; fma.rn.f32 r, r, $2, $1; fma.rn.f32 $0, r, $3, q; }"
  )

  def divided(value, by):
    # The compiler computes these two only once for all values of a lane that
    # share a scale.
    by_finite = emit.f32(divisor, by)
    inverse = emit.f32(reciprocal, by, by_finite)
    return emit.f32(divide, value, by_finite, inverse)

  return elementwise(divided, x, scale, layout=layout)


def elementwise(emitted: Callable, *arrays: Array, layout) -> Array:
  """Applies `emitted`, a function of scalars that emits PTX, to each value."""
  shape = arrays[0].shape
  out = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)

  @plgpu.inline_mgpu(arg_types=(layout,) * len(arrays), return_type=out)
  def apply(_, *arrays):
    def of_vectors(*vectors):
      values = zip(*map(emit.elements, vectors), strict=True)
      results = [emitted(*each) for each in values]
      return vector.from_elements(vectors[0].type, results)

    registers = map(of_vectors, *(x.registers.flat for x in arrays))
    return emit.array(registers, shape, layout)

  return apply(*arrays)  # pyright: ignore


def _base(smem):
  """Returns the address of shared memory."""
  return llvm.ptrtoint(emit.i32_type(), mgpu.utils.memref_ptr(smem))


def _at(base, *terms):
  """Adds index * words * 4 bytes for each (index, words) in `terms`."""
  for index, words in terms:
    base = arith.addi(base, arith.muli(index, emit.i32(4 * words)))
  return base


def split_index(x, size: int):
  """Returns x // size and x % size; `size` is a power of two."""
  bits = emit.i32(size.bit_length() - 1)
  return arith.shrui(x, bits), arith.andi(x, emit.i32(size - 1))


def sum_over_rows(x: Array, smem) -> Array:
  """Returns each column's sum, f32 [128].

  Before another call with the same `smem`, the kernel needs a barrier.
  """
  out = plgpu.ShapeDtypeStruct((COLUMNS,), jnp.float32, layout=THREAD_LAYOUT)

  @plgpu.inline_mgpu(arg_types=(TILE_LAYOUT, plgpu.RefType()), return_type=out)
  def apply(_, x, smem):
    total = functools.reduce(arith.addf, x.registers.flat)
    base, i32, f32 = _base(smem), emit.i32_type(), ir.F32Type.get()
    half, k = split_index(emit.thread(), LANES // 2)
    # The 8 partial sums of column 8 k + j begin at word 8 (16 j + k).
    place = _at(base, (k, 2 * WARPS), (half, 1))
    for j, value in enumerate(emit.elements(total)):
      word = arith.bitcast(i32, value)
      emit.store_shared(place, 4 * j * COLUMNS, word)
    mgpu.utils.warpgroup_barrier()
    k, j = split_index(emit.thread(), VECTOR)
    place = _at(base, (j, COLUMNS), (k, 2 * WARPS))
    words = [x for part in (0, 16) for x in emit.load_shared(place, part)]
    found = functools.reduce(
      arith.addf, [arith.bitcast(f32, word) for word in words]
    )
    register = vector.broadcast(ir.VectorType.get((1,), f32), found)
    return emit.array([register], out.shape, THREAD_LAYOUT)

  return apply(x, smem)  # pyright: ignore


def scratch(height: int):
  """Returns the type of the shared memory that `put` and `take` need."""
  _, jump = _word_strides(height)
  return plgpu.SMEM((VECTOR * jump,), jnp.int32)


def _word_strides(height: int) -> tuple[int, int]:
  """Returns strides s, t in words: column 8 k + j begins at word k s + j t.

  A column has w = height / 4 words. To avoid bank conflicts, s is w + 4 instead
  of w, and t is 16 s + w instead of 16 s.
  """
  stride = height // 4 + 4
  return stride, LANES // 2 * stride + height // 4


def barrier() -> None:
  """Waits until all threads of the warpgroup have arrived."""

  @plgpu.inline_mgpu()
  def wait(_):
    mgpu.utils.warpgroup_barrier()

  wait()  # pyright: ignore


def put(codes: Array, smem, height: int, first: int) -> None:
  """Writes rows of a tile, from row `first` on, to shared memory for `take`.

  It transposes 4 x 4 bytes in registers, so that each word is part of a column.
  """
  stride, jump = _word_strides(height)

  @plgpu.inline_mgpu(arg_types=(TILE_LAYOUT, plgpu.RefType()))
  def apply(_, codes, smem):
    warp, lane = split_index(emit.thread(), LANES)
    # A lane holds 8 bytes of each of four rows. Rearrange them into 8 words,
    # each with the four bytes of one column.
    quad, k = split_index(lane, LANES // 2)
    place = _at(_base(smem), (k, stride), (warp, 2), (quad, 1))
    pair = ir.VectorType.get((2,), emit.i32_type())
    for i, four in enumerate(codes.registers.reshape(-1, 4)):
      pairs = [emit.elements(vector.bitcast(pair, x)) for x in four]
      words = [
        x
        for part in zip(*pairs, strict=True)
        for x in emit.transposed(list(part))
      ]
      word = first // 4 + 8 * i
      for j, each in enumerate(words):
        emit.store_shared(place, 4 * (j * jump + word), each)

  apply(codes, smem)  # pyright: ignore


def take(smem, height: int, dtype: DTypeLike) -> Array:
  """Waits until all rows of a tile are `put`; returns its transpose."""
  layout = columns_layout(height)
  out = plgpu.ShapeDtypeStruct(
    (COLUMNS, height), jnp.dtype(dtype), layout=layout
  )
  chunks, (stride, jump) = height // _CHUNK, _word_strides(height)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
  def apply(_, smem):
    mgpu.utils.warpgroup_barrier()
    warp, lane = split_index(emit.thread(), LANES)
    column, chunk = split_index(lane, chunks)
    columns_per_warp = LANES // chunks
    column = arith.addi(arith.muli(warp, emit.i32(columns_per_warp)), column)
    k, j = split_index(column, VECTOR)
    place = _at(_base(smem), (k, stride), (j, jump), (chunk, 4))
    four = ir.VectorType.get((4,), emit.i32_type())
    kind = mgpu.utils.dtype_to_ir_type(dtype)  # pyright: ignore
    registers = []
    for first in range(0, COLUMNS, WARPS * columns_per_warp):
      words = emit.load_shared(place, 4 * (first // VECTOR) * stride)
      packed = vector.from_elements(four, words)
      registers.append(
        vector.bitcast(ir.VectorType.get((_CHUNK,), kind), packed)
      )
    return emit.array(registers, out.shape, layout)

  return apply(smem)  # pyright: ignore
