# SPDX-License-Identifier: Apache-2.0
"""Splits a projection into heads without rotation, and joins them, in Triton.

These are `ops.split_heads` and `join_heads` without RoPE, as in vision towers,
whose sequences and heads (729 tokens, heads of 72) are not powers of two. For
a tile of rows, a program handles a tile of k's columns, the same tile of v's
columns, and R = N / K such tiles of q's. It computes where each column is in
the joined matrix, which is ordered by key head:

      q            k    v              joined
      +---------+  +--+ +--+           +--+--+-+-+--+--+-+-+
      | R tiles |  |  | |  |   <->     |q |q |k|v|q |q |k|v|  rows
      +---------+  +--+ +--+           +--+--+-+-+--+--+-+-+

Head sizes are multiples of 8, so 8 adjacent columns, 16 bytes of BF16, stay
adjacent in both layouts.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from coat_jax.numerics.formats import E5M2
from coat_jax.numerics.scaling import Operand, Scaling
from coat_jax.pallas import supported
from coat_jax.pallas.triton import matrix, ptx, tiles
from coat_jax.pallas.triton.matrix import Tile
from coat_jax.pallas.triton.scales import bits_to_shared_scale
from coat_jax.pallas.triton.tiles import iota

# Values of dk (and of dv) that a program reads to find the scale.
_AMAX_VALUES = 4096


@dataclasses.dataclass(frozen=True)
class Heads:
  """The sizes of heads, and how they are divided among programs."""

  m: int  # The number of tokens.
  queries: int  # R, the number of query heads per key head.
  kv_heads: int  # K, the number of key heads.
  size: int  # H, the size of a head.
  tile: Tile  # The tile of k's columns.
  interpret: bool

  @classmethod
  def of(cls, q: Array, k: Array, tile: Tile, interpret: bool) -> "Heads":
    """Reads the sizes from q [B, T, N, H] and k [B, T, K, H]."""
    b, t, num_heads, h = q.shape
    kv_heads = k.shape[2]
    return cls(b * t, num_heads // kv_heads, kv_heads, h, tile, interpret)

  # --- On the host ---

  @property
  def widths(self) -> tuple[int, int, int]:
    """The number of columns of q, of k and of v."""
    width = self.kv_heads * self.size
    return self.queries * width, width, width

  @property
  def grid(self) -> tuple[int, int]:
    tile, width = self.tile, self.widths[1]
    return pl.cdiv(self.m, tile.rows), pl.cdiv(width, tile.columns)

  def run(self, kernel, *args, out_shape, name, programs=1):
    """Calls `kernel(self, *refs)` on whole arrays, `programs` per tile."""
    down, across = self.grid
    return pl.pallas_call(
      functools.partial(kernel, self),
      grid=(down * programs, across),
      out_shape=out_shape,
      compiler_params=matrix.compiler_params(self.tile.warps),
      interpret=self.interpret,
      name=name,
    )(*args)

  # --- In a kernel ---

  def parts(self, refs) -> "list[Part]":
    """Returns one program's R + 2 tiles of q, of k and of v."""
    down, across = pl.program_id(0), pl.program_id(1)
    q, k, v = refs
    r = self.queries
    of_q = [self._part(q, down, across * r + i, None) for i in range(r)]
    return [
      *of_q,
      self._part(k, down, across, r),
      self._part(v, down, across, r + 1),
    ]

  def for_own_part(self, body, refs) -> None:
    """Calls body(part) with this program's part, one of the R + 2 of a tile."""
    r, (q, k, v) = self.queries, refs
    down, i = _divided(pl.program_id(0), r + 2)
    across = pl.program_id(1)

    @pl.when(i < r)
    def _():
      body(self._part(q, down, across * r + i, None))

    for place, ref in ((r, k), (r + 1, v)):

      @pl.when(i == place)
      def _(ref=ref, place=place):
        body(self._part(ref, down, across, place))

  def _part(self, ref, down, across, place) -> "Part":
    """Makes a tile; `place` is R for k, R + 1 for v, and None for q."""
    r, h, n = self.queries, self.size, self.tile.columns
    row = down * self.tile.rows + iota((self.tile.rows, 1), 0)
    column = across * n + iota((1, n), 1)
    head, channel = _divided(column, h)
    group, own = _divided(head, r) if place is None else (head, place)
    joined = (group * (r + 2) + own) * h + channel
    inside = row < self.m if self.m % self.tile.rows else None
    of_heads = None
    if self.widths[1] % n:
      # Do not test q's width: whole tiles may cover it but not k's.
      heads = self.kv_heads * (r if place is None else 1)
      of_heads = column < heads * h
    return Part(ref, down, row, column, joined, inside, of_heads)


class Part(NamedTuple):
  """A program's tile of q, k or v, and where its values are."""

  ref: Any  # The whole array.
  down: Array  # The tile's index along the rows.
  row: Array  # int32 [rows, 1].
  column: Array  # int32 [1, columns], in the array.
  joined: Array  # int32 [1, columns], in the joined matrix.
  inside: Array | None  # Which rows are in the matrix; None for all.
  of_heads: Array | None  # Which columns are in the matrix; None for all.

  def load(self, ref, column, *, dtype) -> Array:
    """Loads this tile's rows of a matrix at the given columns."""
    return tiles.load(self._at(ref, self.row, column), self.mask(), dtype=dtype)

  def store(self, ref, column, x: Array) -> None:
    """Writes this tile's rows of a matrix at the given columns."""
    tiles.store(self._at(ref, self.row, column), x, self.mask())

  def store_transposed(self, ref, x: Array) -> None:
    """Writes the tile, transposed, to columns of the joined matrix."""
    tiles.store(self._at(ref, self.joined, self.row), x, self.mask())

  def store_sums(self, ref, x: Array) -> None:
    """Writes the sum over the tile's rows; x must be 0 outside the matrix."""
    column = self.joined.reshape(-1)
    mask = None if self.of_heads is None else self.of_heads.reshape(-1)
    at = ref.at[jnp.full_like(column, self.down), column]
    tiles.store(at, jnp.sum(x, axis=0), mask)

  def mask(self) -> Array | None:
    """Returns which values are inside, [rows, columns]; None means all."""
    masks = [x for x in (self.inside, self.of_heads) if x is not None]
    if not masks:
      return None
    shape = len(self.row), self.column.shape[1]
    masks = [jnp.broadcast_to(x, shape) for x in masks]
    return functools.reduce(jnp.logical_and, masks)

  def _at(self, ref, first, second):
    shape = jnp.broadcast_shapes(first.shape, second.shape)
    return ref.at[tuple(jnp.broadcast_to(i, shape) for i in (first, second))]


def _divided(x: Array, by: int) -> tuple[Array, Array]:
  """Returns quotient and remainder; x must not be negative."""
  if by == 1:
    return x, jnp.zeros_like(x)
  divisor = jnp.full_like(x, by)
  return jax.lax.div(x, divisor), jax.lax.rem(x, divisor)


# --- Splitting and joining ---------------------------------------------------


def split_heads(
  qkv: Array, *, num_heads: int, num_kv_heads: int, interpret: bool
) -> tuple[Array, Array, Array]:
  """`ops.split_heads` without angles."""
  *_, t, width = qkv.shape
  m, h = qkv.size // width, width // (num_heads + 2 * num_kv_heads)
  queries, tile = num_heads // num_kv_heads, Tile(32, 128, 4)
  heads = Heads(m, queries, num_kv_heads, h, tile, interpret)
  q, k, v = heads.run(
    _split_kernel,
    qkv.reshape(m, -1),
    out_shape=[jax.ShapeDtypeStruct((m, n), qkv.dtype) for n in heads.widths],
    name="split_heads",
  )
  return (
    q.reshape(-1, t, num_heads, h),
    k.reshape(-1, t, num_kv_heads, h),
    v.reshape(-1, t, num_kv_heads, h),
  )


def _split_kernel(heads, qkv_ref, *refs):
  for part in heads.parts(refs):
    x = part.load(qkv_ref, part.joined, dtype=qkv_ref.dtype)
    part.store(part.ref, part.column, x)


def join_heads(dq: Array, dk: Array, dv: Array, *, interpret: bool) -> Array:
  """`ops.join_heads` without angles."""
  heads = Heads.of(dq, dk, Tile(32, 128, 4), interpret)
  joined = heads.run(
    _join_kernel,
    *(x.reshape(heads.m, -1) for x in (dq, dk, dv)),
    out_shape=jax.ShapeDtypeStruct((heads.m, sum(heads.widths)), dq.dtype),
    name="join_heads",
  )
  return joined.reshape(*dq.shape[:2], -1)


def _join_kernel(heads, *refs):
  *refs, joined_ref = refs
  for part in heads.parts(refs):
    x = part.load(part.ref, part.column, dtype=part.ref.dtype)
    part.store(joined_ref, part.joined, x)


# --- Joining into an operand -------------------------------------------------


def join_heads_operand(
  dq: Array,
  dk: Array,
  dv: Array,
  *,
  gradient: Scaling,
  has_sums: bool,
  interpret: bool,
) -> tuple[Operand, Array | None]:
  """`ops.join_heads_operand` without angles, in E5M2."""
  heads = Heads.of(dq, dk, Tile(64, 128, 4), interpret)
  bits = _maxima(dq, dk, dv, heads)
  scale, read = bits_to_shared_scale(bits, gradient, interpret)
  m, width = heads.m, sum(heads.widths)
  results = [
    jax.ShapeDtypeStruct((m, width), E5M2),
    jax.ShapeDtypeStruct((width, m), E5M2),
  ]
  if has_sums:
    results.append(jax.ShapeDtypeStruct((heads.grid[0], width), jnp.float32))
  rows, columns, *sums = heads.run(
    _operand_kernel,
    *(x.reshape(m, -1) for x in (dq, dk, dv)),
    read,
    out_shape=results,
    name="join_heads_operand",
    programs=heads.queries + 2,
  )
  operand = Operand(rows.reshape(*dq.shape[:2], -1), columns, scale)
  return operand, jnp.sum(sums[0], axis=0) if has_sums else None


def _operand_kernel(
  heads, dq_ref, dk_ref, dv_ref, scale_ref, rows_ref, columns_ref, *sums_ref
):
  def body(part):
    x = part.load(part.ref, part.column, dtype=jnp.float32)
    codes = ptx.quantize_with_scale(
      x, scale_ref[0], dtype=E5M2, interpret=heads.interpret
    )
    part.store(rows_ref, part.joined, codes)
    part.store_transposed(columns_ref, codes)
    for ref in sums_ref:
      part.store_sums(ref, x)

  # One part per program: all parts together would take three times the
  # registers.
  heads.for_own_part(body, (dq_ref, dk_ref, dv_ref))


def _maxima(dq, dk, dv, heads: Heads) -> Array:
  """Returns the bits of the tiles' largest magnitudes."""
  r, size = heads.queries, _AMAX_VALUES
  programs = pl.cdiv(dk.size, size)
  [bits] = matrix.run(
    functools.partial(_amax_kernel, elements=dk.size, r=r),
    [
      matrix.vector(r * size, dq.size, dq),
      matrix.vector(size, dk.size, dk),
      matrix.vector(size, dv.size, dv),
    ],
    [matrix.vector(1, programs, jnp.int32)],
    grid=(programs,),
    warps=4,
    interpret=heads.interpret,
    name="join_heads_amax",
  )
  return bits


def _amax_kernel(dq_ref, dk_ref, dv_ref, bits_ref, *, elements, r):
  i, size = pl.program_id(0), dk_ref.shape[0]
  parts = [(dq_ref, k, i * r + k, r * elements) for k in range(r)]
  parts += [(dk_ref, 0, i, elements), (dv_ref, 0, i, elements)]
  bits = []
  for ref, k, tile, count in parts:
    mask = None
    if elements % size:
      mask = tile * size + iota((size,), 0) < count
    x = tiles.load(ref.at[pl.ds(k * size, size)], mask)
    bits.append(tiles.amax_bits(x))
  tiles.store_scalar(bits_ref, functools.reduce(jnp.maximum, bits))


def why_not(x: Array, h: int) -> str | None:
  """Returns why the kernels do not support x with heads of size h, or None."""
  if h % 8:
    return f"head sizes must be multiples of 8 for the Triton kernel, got {h}"
  if 3 * x.size > supported.MAX_ELEMENTS or x.size == 0:
    return f"arrays must have 1 to 2^31 - 1 values, got {x.shape}"
  return supported.why_not_dtype(x.dtype)
