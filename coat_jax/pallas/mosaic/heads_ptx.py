# SPDX-License-Identifier: Apache-2.0
"""Inlined PTX for `heads`: loads a tile of joined heads, rotated back.

The matrix [m, (N + 2 K) H] contains, for each key head, its N / K heads of dq,
then its heads of dk and dv. A tile may contain parts of several heads. A lane
holds 8 adjacent columns, which belong to one head because H is a multiple of 8.
Each lane computes the array and address from which it loads these columns.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from coat_jax.ops.heads import join_heads
from coat_jax.pallas.mosaic import emit
from coat_jax.pallas.mosaic.emit import i32
from coat_jax.pallas.mosaic.row_ptx import (
  COLUMNS,
  LANES,
  THREAD_LAYOUT,
  TILE_LAYOUT,
  VECTOR,
  WARPS,
  split_index,
)

_ROWS = 4  # A lane holds this many adjacent rows of every 32.


@dataclasses.dataclass(frozen=True)
class Heads:
  """The numbers and the size of heads."""

  queries: int  # N / K, the number of query heads per key head.
  kv_heads: int  # K, the number of key heads.
  size: int  # H, the number of channels of a head.
  pairs: int  # Number of channel pairs that RoPE rotates in a head.

  @property
  def width(self) -> int:
    """The number of columns of dk, and of dv."""
    return self.kv_heads * self.size

  @property
  def joined(self) -> int:
    """The number of columns of the whole matrix."""
    return (self.queries + 2) * self.width


def load_joined(
  refs, place, heads: Heads, interpret: bool, count: int = 1
) -> list[Array]:
  """Computes tiles of the result of `ops.join_heads`, cast to f32.

  There are `count` tiles side by side, the first of them at `place`. If there
  are several, the width of a tile must be a multiple of H.

  `refs` are dq [m, N H], dk and dv [m, K H], cos and sin. cos and sin are
  [T, pairs] or [m, pairs], or None if nothing is rotated.
  """
  rows, columns = place
  if interpret:
    starts = range(0, count * COLUMNS, COLUMNS)
    return [
      _definition(refs, rows, columns.start + start, heads) for start in starts
    ]
  shape = rows.size, columns.size
  each = functools.partial(jnp.full, (WARPS * LANES,), dtype=jnp.int32)
  starts = [plgpu.layout_cast(each(x.start), THREAD_LAYOUT) for x in place]
  refs = [ref for ref in refs if ref is not None]
  out = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE_LAYOUT)

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),) * len(refs) + (THREAD_LAYOUT,) * 2,
    return_type=[out] * count,
  )
  def apply(_, *args):
    *refs, row, column = args
    row, column = _number(row), _number(column)
    lanes = [
      _Lane(refs, row, arith.addi(column, i32(i * COLUMNS)), heads)
      for i in range(count)
    ]
    kind = ir.VectorType.get((VECTOR,), ir.F32Type.get())
    registers = [[] for _ in lanes]
    for i in range(rows.size // 32 * _ROWS):
      angles = lanes[0].angles(i)
      for lane, found in zip(lanes, registers, strict=True):
        found.append(vector.from_elements(kind, lane.load(i, angles)))
    return [emit.array(found, shape, TILE_LAYOUT) for found in registers]

  return apply(*refs, *starts)  # pyright: ignore


def _definition(refs, rows, column, heads: Heads) -> Array:
  """Computes the tile in jnp, from all heads of these rows."""
  parts = [
    ref[rows, :].reshape(1, rows.size, -1, heads.size) for ref in refs[:3]
  ]
  angles = [None, None]
  if heads.pairs:
    token = (rows.start + jnp.arange(rows.size)) % refs[3].shape[0]
    angles = [ref[...][token] for ref in refs[3:]]
  [joined] = join_heads.definition(*parts, *angles)
  start = jnp.int32(0), column
  tile = lax.dynamic_slice(joined, start, (rows.size, COLUMNS))
  return tile.astype(jnp.float32)


def _number(x):
  """Returns this thread's value of an array in `THREAD_LAYOUT`."""
  [register] = x.registers.flat
  return emit.element(register, 0)


def _is(kind: arith.CmpIPredicate, a, b: int):
  return arith.cmpi(kind, a, i32(b))


class _Lane:
  """Loads and rotates the values of one lane."""

  def __init__(self, refs, row, column, heads: Heads):
    less = arith.CmpIPredicate.slt
    warp, lane = split_index(emit.thread(), LANES)
    quad, k = split_index(lane, COLUMNS // VECTOR)
    for index, size in ((warp, 2 * _ROWS), (quad, _ROWS)):
      row = arith.addi(row, arith.muli(index, i32(size)))
    column = arith.addi(column, arith.muli(k, i32(VECTOR)))
    head, channel = _divided(column, heads.size)
    group, own = _divided(head, heads.queries + 2)
    is_query = _is(less, own, heads.queries)
    is_key = _is(arith.CmpIPredicate.eq, own, heads.queries)
    of_query = arith.addi(arith.muli(group, i32(heads.queries)), own)
    head = arith.select(is_query, of_query, group)
    self._heads, self._row = heads, row
    self._kind = refs[0].type.element_type
    self._stride = arith.select(
      is_query, i32(heads.queries * heads.width), i32(heads.width)
    )
    self._column = arith.addi(arith.muli(head, i32(heads.size)), channel)
    q, k, v, *self._angles = map(_address, refs)
    self._base = arith.select(is_query, q, arith.select(is_key, k, v))
    if not heads.pairs:
      return
    self._is_first = _is(less, channel, heads.pairs)
    turns = arith.andi(
      _is(less, own, heads.queries + 1), _is(less, channel, 2 * heads.pairs)
    )
    self._turns = turns
    pairs, column = i32(heads.pairs), self._column
    partner = arith.select(
      self._is_first, arith.addi(column, pairs), arith.subi(column, pairs)
    )
    # Lanes that rotate nothing also load a partner, cos and sin. These loads
    # must not read past the end of an array.
    self._partner = arith.select(turns, partner, column)
    pair = arith.select(self._is_first, channel, arith.subi(channel, pairs))
    has_pair = _is(less, channel, 2 * heads.pairs)
    self._pair = arith.select(has_pair, pair, i32(0))
    self._num_angles = ir.MemRefType(refs[3].type).shape[0]

  def _place(self, i: int):
    """Returns the index in the matrix of this lane's i-th row."""
    tile, i = divmod(i, _ROWS)
    return arith.addi(self._row, i32(32 * tile + i))

  def angles(self, i: int) -> list | None:
    """Loads 8 values of cos and of sin for the i-th row; None without RoPE."""
    if not self._heads.pairs:
      return None
    _, token = _divided(self._place(i), self._num_angles)
    place = arith.addi(arith.muli(token, i32(self._heads.pairs)), self._pair)
    return [_load(base, place, ir.F32Type.get()) for base in self._angles]

  def load(self, i: int, angles: list | None) -> list:
    """Loads and rotates the 8 values of this lane's i-th row."""
    row = self._place(i)
    x = self._values(row, self._column)
    if angles is None:
      return x
    partner = self._values(row, self._partner)
    cos, sin = angles
    out = []
    for own, other, c, s in zip(x, partner, cos, sin, strict=True):
      signed = arith.select(self._is_first, s, arith.negf(s))
      turned = emit.f32(
        "{ .reg .f32 t; mul.f32 t, $1, $3; fma.rn.f32 $0, $2, $4, t; }",
        *(own, other, c, signed),
      )
      out.append(arith.select(self._turns, self._rounded(turned), own))
    return out

  def _values(self, row, column) -> list:
    place = arith.addi(arith.muli(row, self._stride), column)
    return _load(self._base, place, self._kind)

  def _rounded(self, x):
    """Rounds an f32 to the arrays' dtype."""
    if isinstance(self._kind, ir.F32Type):
      return x
    return emit.f32(
      "{ .reg .b16 h, z; cvt.rn.bf16.f32 h, $1; mov.b16 z, 0; "
      "mov.b32 $0, {z, h}; }",
      x,
    )


def _divided(x, by: int):
  """Returns the quotient and the remainder of x >= 0."""
  return arith.divui(x, i32(by)), arith.remui(x, i32(by))


def _address(ref):
  """Returns the address of an array, as i64."""
  i64 = ir.IntegerType.get_signless(64)
  return llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))


def _load(base, place, kind) -> list:
  """Loads 8 adjacent BF16 or f32 values, as f32."""
  is_f32 = isinstance(kind, ir.F32Type)
  i64 = ir.IntegerType.get_signless(64)
  offset = arith.muli(place, i32(4 if is_f32 else 2))
  address = arith.addi(base, arith.extui(i64, offset))
  if is_f32:
    words = emit.load_global(address, 0) + emit.load_global(address, 16)
    return [arith.bitcast(ir.F32Type.get(), word) for word in words]
  return [
    arith.bitcast(ir.F32Type.get(), half)
    for word in emit.load_global(address, 0)
    for half in (
      arith.shli(word, i32(16)),
      arith.andi(word, i32(0xFFFF0000)),
    )
  ]
