# SPDX-License-Identifier: Apache-2.0
"""Splits a projection into rotated heads, and joins them again, in Triton.

These are `ops.split_heads` and `join_heads`. For a tile of rows, a program
handles the columns of one key head: R = N / K queries, one key and one value,
in this order. It moves them in halves of a head, because each pair that is
rotated has one value in each half.

`join_heads_operand` writes E5M2 codes in both layouts instead. An extra pass
first finds their scale, from the values as `join_heads` would round them.
`heads.py` contains other kernels for heads that are not rotated.

On an H200 (jax 0.11.2, [8192, 3 * 32 * 128]) splitting and joining run at 3.8
TB/s, 105 microseconds each; XLA's backward, a sum of padded parts, takes 270.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from coat_jax.numerics.formats import E5M2
from coat_jax.numerics.scaling import GRADIENTS, Operand, Scaling
from coat_jax.ops.dispatch import kernel
from coat_jax.pallas import supported
from coat_jax.pallas.triton import heads, matrix, ptx, tiles
from coat_jax.pallas.triton.heads import Heads
from coat_jax.pallas.triton.matrix import Blocked, Tile
from coat_jax.pallas.triton.scales import bits_to_shared_scale


def _pick_tile(t: int, h: int, warps: int = 4) -> Tile:
  """Picks one head of up to 32 tokens, a power of two that divides T."""
  return Tile(min(t & -t, 32), h, warps)


def _blocked(sizes: Heads, x: Array | DTypeLike, count: int) -> Blocked | None:
  """Cuts a matrix with `count` heads per key head: R of q, R + 2 joined."""
  width = count * sizes.size
  spec = pl.BlockSpec((sizes.tile.rows, width), lambda i, j: (i, j))
  return matrix.blocked(spec, (sizes.m, sizes.kv_heads * width), x)


def _angles(sizes: Heads, x: Array) -> Blocked | None:
  """Cuts angles [B, T, H / 2], or [T, H / 2] that every sequence reads."""
  half, rows = x.shape[-1], sizes.tile.rows
  count = x.size // half
  in_turn = pl.BlockSpec((rows, half), lambda i, j: (i % (count // rows), 0))
  return matrix.blocked(in_turn, (count, half), x)


def _run(sizes: Heads, kernel, inputs, outputs, name: str, **options) -> tuple:
  """Calls a kernel for each tile of rows and each key head."""
  return matrix.run(
    functools.partial(kernel, r=sizes.queries, h=sizes.size, **options),
    inputs,
    outputs,
    grid=sizes.grid,
    warps=sizes.tile.warps,
    interpret=sizes.interpret,
    name=name,
  )


# --- Splitting and joining ---------------------------------------------------


def _why_not_heads(x: Array, cos: Array | None, h: int) -> str | None:
  """Returns why the kernels cannot tile these heads and sequences, or None."""
  if cos is None:
    return heads.why_not(x, h)
  t, half = cos.shape[-2:]
  if 2 * half != h:
    return (
      "all channels of a head must turn in the Triton kernel, got "
      f"{2 * half} of {h}"
    )
  if half & (half - 1) or half < 8:
    return (
      "head sizes must be powers of two from 16 for the Triton kernel, got "
      f"{2 * half}"
    )
  if t % 8:
    return f"sequences must be multiples of 8 for the Triton kernel, got {t}"
  if x.size > supported.MAX_ELEMENTS:
    return f"arrays must have fewer than 2^31 values, got {x.size}"
  return supported.why_not_dtype(x.dtype)


def _why_not_split(qkv, cos, num_heads, num_kv_heads, **_) -> str | None:
  h = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
  return _why_not_heads(qkv, cos, h)


@kernel(_why_not_split)
@jax.jit(static_argnames=("num_heads", "num_kv_heads", "interpret"))
def split_heads(
  qkv: Array,
  cos: Array | None,
  sin: Array | None,
  *,
  num_heads: int,
  num_kv_heads: int,
  interpret: bool = False,
) -> tuple[Array, Array, Array]:
  """`ops.split_heads`."""
  if cos is None or sin is None:
    return heads.split_heads(
      qkv, num_heads=num_heads, num_kv_heads=num_kv_heads, interpret=interpret
    )
  b, t, _ = qkv.shape
  r, h = num_heads // num_kv_heads, 2 * cos.shape[-1]
  sizes = Heads(b * t, r, num_kv_heads, h, _pick_tile(t, h), interpret)
  q, k, v = _run(
    sizes,
    _split_kernel,
    [_blocked(sizes, qkv, r + 2), _angles(sizes, cos), _angles(sizes, sin)],
    [_blocked(sizes, qkv.dtype, count) for count in (r, 1, 1)],
    "split_heads",
  )
  return tuple(x.reshape(b, t, -1, h) for x in (q, k, v))  # pyright: ignore[reportReturnType]


def _split_kernel(*refs, r, h):
  qkv_ref, cos_ref, sin_ref, q_ref, k_ref, v_ref = refs
  cos, sin = cos_ref[...], sin_ref[...]
  for i in range(r):
    _move(qkv_ref, i, q_ref, i, h, cos, sin)
  _move(qkv_ref, r, k_ref, 0, h, cos, sin)
  _move(qkv_ref, r + 1, v_ref, 0, h)


def _why_not_join(dq, cos, **_) -> str | None:
  return _why_not_heads(dq, cos, dq.shape[-1])


@kernel(_why_not_join)
@jax.jit(static_argnames="interpret")
def join_heads(
  dq: Array,
  dk: Array,
  dv: Array,
  cos: Array | None,
  sin: Array | None,
  *,
  interpret: bool = False,
) -> Array:
  """`ops.join_heads`."""
  if cos is None or sin is None:
    return heads.join_heads(dq, dk, dv, interpret=interpret)
  b, t, _, h = dq.shape
  sizes = Heads.of(dq, dk, _pick_tile(t, h), interpret)
  [joined] = _run(
    sizes,
    _join_kernel,
    _parts(sizes, dq, dk, dv, cos, sin),
    [_blocked(sizes, dq.dtype, sizes.queries + 2)],
    "join_heads",
  )
  return joined.reshape(b, t, -1)


def _parts(sizes: Heads, dq, dk, dv, cos, sin) -> list[Blocked | None]:
  return [
    _blocked(sizes, dq, sizes.queries),
    _blocked(sizes, dk, 1),
    _blocked(sizes, dv, 1),
    _angles(sizes, cos),
    _angles(sizes, sin),
  ]


def _join_kernel(*refs, r, h):
  dq_ref, dk_ref, dv_ref, cos_ref, sin_ref, out_ref = refs
  cos, sin = cos_ref[...], -sin_ref[...]
  for i in range(r):
    _move(dq_ref, i, out_ref, i, h, cos, sin)
  _move(dk_ref, 0, out_ref, r, h, cos, sin)
  _move(dv_ref, 0, out_ref, r + 1, h)


# --- Joining into an operand -------------------------------------------------


def _why_not_operand(dq, cos, gradient, has_sums, **_) -> str | None:
  b, t, _, h = dq.shape
  reason = supported.why_not_scaling(gradient, E5M2)
  reason = reason or _why_not_heads(dq, cos, h)
  if reason is not None or cos is None:
    return reason or supported.why_not_columns((b * t, h), "both")
  if has_sums:
    return (
      "the Triton kernel sums gradients of heads that are not rotated, got "
      "has_sums=True with angles"
    )
  if t % 16:
    return f"sequences must be multiples of 16 for columns, got {t}"
  return None


@kernel(_why_not_operand)
@jax.jit(static_argnames=("gradient", "has_sums", "interpret"))
def join_heads_operand(
  dq: Array,
  dk: Array,
  dv: Array,
  cos: Array | None,
  sin: Array | None,
  *,
  gradient: Scaling = GRADIENTS,
  has_sums: bool = False,
  interpret: bool = False,
) -> tuple[Operand, Array | None]:
  """`ops.join_heads_operand`."""
  if cos is None or sin is None:
    return heads.join_heads_operand(
      dq, dk, dv, gradient=gradient, has_sums=has_sums, interpret=interpret
    )
  b, t, _, h = dq.shape
  sizes = Heads.of(dq, dk, _pick_tile(t, h), interpret)
  one_each = pl.BlockSpec((1, 1), lambda i, j: (i, j))
  [bits] = _run(
    sizes,
    _amax_kernel,
    _parts(sizes, dq, dk, dv, cos, sin),
    [matrix.blocked(one_each, sizes.grid, jnp.int32)],
    "join_heads_amax",
  )
  scale, read = bits_to_shared_scale(bits, gradient, interpret)
  sizes = Heads.of(dq, dk, _pick_tile(t, h, warps=8), interpret)
  count = sizes.queries + 2
  columns_spec = pl.BlockSpec((count * h, sizes.tile.rows), lambda i, j: (j, i))
  columns_shape = sizes.kv_heads * count * h, sizes.m
  rows, columns = _run(
    sizes,
    _operand_kernel,
    [*_parts(sizes, dq, dk, dv, cos, sin), matrix.scalar(read)],
    [
      _blocked(sizes, E5M2, count),
      matrix.blocked(columns_spec, columns_shape, E5M2),
    ],
    "join_heads_operand",
    interpret=interpret,
  )
  return Operand(rows.reshape(b, t, -1), columns, scale), None


def _amax_kernel(*refs, r, h):
  *refs, bits_ref = refs
  bits = [tiles.amax_bits(x) for _, x in _joined_halves(refs, r, h)]
  tiles.store_scalar(bits_ref, functools.reduce(jnp.maximum, bits))


def _operand_kernel(*refs, r, h, interpret):
  *refs, scale_ref, rows_ref, columns_ref = refs
  for first, x in _joined_halves(refs, r, h):
    codes = ptx.quantize_with_scale(
      x, scale_ref[0], dtype=E5M2, interpret=interpret
    )
    rows_ref[:, pl.ds(first, h // 2)] = codes
    tiles.store_transposed(columns_ref, codes, first=first)


def _joined_halves(refs, r, h):
  """Yields the first column and f32 values of each joined half head."""
  dq_ref, dk_ref, dv_ref, cos_ref, sin_ref = refs
  cos, sin = cos_ref[...], -sin_ref[...]
  parts = [(dq_ref, i) for i in range(r)] + [(dk_ref, 0), (dv_ref, 0)]
  for j, (ref, i) in enumerate(parts):
    rotation = () if ref is dv_ref else (cos, sin)
    for k, x in enumerate(_halves(ref, i, h, *rotation)):
      # Round as `join_heads` does.
      x = x.astype(ref.dtype).astype(jnp.float32)
      yield j * h + k * (h // 2), x


def _move(source, i, target, j, h, *rotation):
  """Copies head i of one tile to head j of another, rotated by (cos, sin)."""
  for k, x in enumerate(_halves(source, i, h, *rotation)):
    columns = pl.ds(j * h + k * (h // 2), h // 2)
    target[:, columns] = x.astype(target.dtype)


def _halves(ref, i, h, cos=None, sin=None):
  """Returns both halves of head i of a tile, rotated if cos is given."""
  half = h // 2
  a, b = (ref[:, pl.ds(i * h + k * half, half)] for k in (0, 1))
  if cos is None:
    return a, b
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  return a * cos - b * sin, b * cos + a * sin
