# SPDX-License-Identifier: Apache-2.0
"""Splits a projection into rotated heads, and joins them again, in Triton.

These are `ops.split_heads` and `join_heads`. For some rows, a program handles
the columns of one key head: R = N / K queries, one key and one value. It moves
them in halves of a head, because each pair that is rotated has one value in
each half.

        R x H       H    H
      +-----------+----+----+
      | q         | k  | v  |  rows
      +-----------+----+----+

`join_heads_operand` writes E5M2 codes in both layouts instead. An extra pass
first finds their scale, from the values as `join_heads` would round them. Heads
that are not rotated have kernels of their own, in `heads`.

Bytes per element in BF16: 2 + 2; to an operand 2 + 2 + 2. On an H200
(2026-11-21, jax 0.11.2, [8192, 3 * 32 * 128]) `split_heads` and `join_heads`
each take 105 microseconds, 3.8 TB/s; XLA's backward, a sum of padded parts,
took 270.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from coat_jax.numerics.formats import E5M2
from coat_jax.numerics.scaling import GRADIENTS, Operand, Scaling
from coat_jax.ops.dispatch import kernel
from coat_jax.pallas.triton import heads, ptx, tiles
from coat_jax.pallas.triton.scales import bits_to_shared_scale


def _why_not_split(qkv, cos, num_heads, num_kv_heads, **_) -> str | None:
  h = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
  return _why_not_heads(qkv, cos, h)


@kernel(_why_not_split)
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
  return _split_heads(qkv, cos, sin, num_heads, num_kv_heads, interpret)


@functools.partial(
  jax.jit, static_argnames=("num_heads", "num_kv_heads", "interpret")
)
def _split_heads(qkv, cos, sin, num_heads, num_kv_heads, interpret):
  b, t, _ = qkv.shape
  r, h = num_heads // num_kv_heads, 2 * cos.shape[-1]
  rows = _rows(t, 32)
  joined, table, query, single = _specs(cos, r, h, rows)
  kv = jax.ShapeDtypeStruct((b * t, num_kv_heads * h), qkv.dtype)
  q, k, v = pl.pallas_call(
    functools.partial(_split_kernel, r=r, h=h),
    grid=(b * t // rows, num_kv_heads),
    in_specs=[joined, table, table],
    out_specs=[query, single, single],
    out_shape=[
      jax.ShapeDtypeStruct((b * t, num_heads * h), qkv.dtype),
      kv,
      kv,
    ],
    compiler_params=tiles.compiler_params(4),
    interpret=interpret,
    name="split_heads",
  )(qkv.reshape(b * t, -1), *_tables(cos, sin))
  return tuple(x.reshape(b, t, -1, h) for x in (q, k, v))


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
  return _join_heads(dq, dk, dv, cos, sin, interpret)


@functools.partial(jax.jit, static_argnames=("interpret",))
def _join_heads(dq, dk, dv, cos, sin, interpret):
  b, t, num_heads, h = dq.shape
  kv_heads = dk.shape[2]
  r = num_heads // kv_heads
  rows = _rows(t, 32)
  joined, table, query, single = _specs(cos, r, h, rows)
  return pl.pallas_call(
    functools.partial(_join_kernel, r=r, h=h),
    grid=(b * t // rows, kv_heads),
    in_specs=[query, single, single, table, table],
    out_specs=joined,
    out_shape=jax.ShapeDtypeStruct((b * t, kv_heads * (r + 2) * h), dq.dtype),
    compiler_params=tiles.compiler_params(4),
    interpret=interpret,
    name="join_heads",
  )(*(x.reshape(b * t, -1) for x in (dq, dk, dv)), *_tables(cos, sin)).reshape(
    b, t, -1
  )


def _join_kernel(*refs, r, h):
  dq_ref, dk_ref, dv_ref, cos_ref, sin_ref, out_ref = refs
  cos, sin = cos_ref[...], -sin_ref[...]
  for i in range(r):
    _move(dq_ref, i, out_ref, i, h, cos, sin)
  _move(dk_ref, 0, out_ref, r, h, cos, sin)
  _move(dv_ref, 0, out_ref, r + 1, h)


@dataclasses.dataclass(frozen=True)
class Share:
  """A program's rows of one key head's columns, and its number of warps."""

  rows: int
  warps: int


def _why_not_operand(dq, cos, gradient, has_sums, **_) -> str | None:
  b, t, _, h = dq.shape
  reason = tiles.why_not_scaling(gradient, E5M2) or _why_not_heads(dq, cos, h)
  if reason is not None or cos is None:
    return reason or tiles.why_not_columns((b * t, h), "both")
  if has_sums:
    return (
      "the Triton kernel sums gradients of heads that are not rotated, got "
      "has_sums=True with angles"
    )
  if t % 16:
    return f"sequences must be multiples of 16 for columns, got {t}"
  return None


@kernel(_why_not_operand)
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
      dq,
      dk,
      dv,
      has_sums=has_sums,
      axis_names=gradient.axis_names,
      interpret=interpret,
    )
  t = dq.shape[1]
  amax, codes = Share(_rows(t, 32), 4), Share(_rows(t, 32), 8)
  how = amax, codes, gradient.axis_names, interpret
  return _join_heads_operand(dq, dk, dv, cos, sin, *how), None


@functools.partial(
  jax.jit, static_argnames=("amax_share", "share", "axis_names", "interpret")
)
def _join_heads_operand(
  dq, dk, dv, cos, sin, amax_share: Share, share: Share, axis_names, interpret
):
  b, t, num_heads, h = dq.shape
  kv_heads = dk.shape[2]
  r, m, columns = num_heads // kv_heads, b * t, (num_heads + 2 * kv_heads) * h
  arrays = (*(x.reshape(m, -1) for x in (dq, dk, dv)), *_tables(cos, sin))
  _, table, query, single = _specs(cos, r, h, amax_share.rows)
  grid = m // amax_share.rows, kv_heads
  bits = pl.pallas_call(
    functools.partial(_amax_kernel, r=r, h=h),
    grid=grid,
    in_specs=[query, single, single, table, table],
    out_specs=pl.BlockSpec((1, 1), lambda i, j: (i, j)),
    out_shape=jax.ShapeDtypeStruct(grid, jnp.int32),
    compiler_params=tiles.compiler_params(amax_share.warps),
    interpret=interpret,
    name="join_heads_amax",
  )(*arrays)
  scale, read = bits_to_shared_scale(
    bits, E5M2, axis_names=axis_names, interpret=interpret
  )
  rows = share.rows
  joined, table, query, single = _specs(cos, r, h, rows)
  codes = pl.pallas_call(
    functools.partial(_operand_kernel, r=r, h=h, interpret=interpret),
    grid=(m // rows, kv_heads),
    in_specs=[query, single, single, table, table, tiles.scalar_spec()],
    out_specs=[joined, pl.BlockSpec(((r + 2) * h, rows), lambda i, j: (j, i))],
    out_shape=[
      jax.ShapeDtypeStruct((m, columns), E5M2),
      jax.ShapeDtypeStruct((columns, m), E5M2),
    ],
    compiler_params=tiles.compiler_params(share.warps),
    interpret=interpret,
    name="join_heads_operand",
  )(*arrays, read)
  return Operand(codes[0].reshape(b, t, -1), codes[1], scale)


def _amax_kernel(*refs, r, h):
  dq_ref, dk_ref, dv_ref, cos_ref, sin_ref, bits_ref = refs
  halves = _joined_halves(dq_ref, dk_ref, dv_ref, cos_ref, sin_ref, r, h)
  bits = [tiles.amax_bits(x) for _, x in halves]
  tiles.store_scalar(bits_ref, functools.reduce(jnp.maximum, bits))


def _operand_kernel(*refs, r, h, interpret):
  *refs, rows_ref, columns_ref = refs
  dq_ref, dk_ref, dv_ref, cos_ref, sin_ref, scale_ref = refs
  halves = _joined_halves(dq_ref, dk_ref, dv_ref, cos_ref, sin_ref, r, h)
  for first, x in halves:
    codes = ptx.quantize_with_scale(
      x, scale_ref[0], dtype=E5M2, interpret=interpret
    )
    rows_ref[:, pl.ds(first, h // 2)] = codes
    tiles.store_transposed(columns_ref, codes, first=first)


def _joined_halves(dq_ref, dk_ref, dv_ref, cos_ref, sin_ref, r, h):
  """Yields the first column and f32 values of each joined half head."""
  cos, sin = cos_ref[...], -sin_ref[...]
  heads = [(dq_ref, i) for i in range(r)] + [(dk_ref, 0), (dv_ref, 0)]
  for j, (ref, i) in enumerate(heads):
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


def _rows(t: int, most: int) -> int:
  """Returns the rows per tile, a power of two that divides a sequence."""
  return min(t & -t, most)


def _tables(cos: Array, sin: Array) -> tuple[Array, Array]:
  """Reshapes angles [B, T, H / 2] to [B T, H / 2]; keeps [T, H / 2]."""
  if cos.ndim == 2:
    return cos, sin
  half = cos.shape[-1]
  return cos.reshape(-1, half), sin.reshape(-1, half)


def _specs(cos: Array, r: int, h: int, rows: int):
  """Returns specs of tiles of [q, k, v], of the angles, of q, and of k or v."""
  # Angles [T, H / 2] start over with each sequence; [B T, H / 2] do not.
  tiles_of_angles = cos.size // cos.shape[-1] // rows
  return (
    pl.BlockSpec((rows, (r + 2) * h), lambda i, j: (i, j)),
    pl.BlockSpec((rows, h // 2), lambda i, j: (i % tiles_of_angles, 0)),
    pl.BlockSpec((rows, r * h), lambda i, j: (i, j)),
    pl.BlockSpec((rows, h), lambda i, j: (i, j)),
  )


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
  if x.size > tiles.MAX_ELEMENTS:
    return f"arrays must be below 2^31 values, got {x.size}"
  return tiles.why_not_dtype(x.dtype)
