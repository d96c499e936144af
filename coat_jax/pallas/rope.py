# SPDX-License-Identifier: Apache-2.0
"""Heads taken apart and rotated, and put together again, in Triton.

`reference_rope.split_heads` and `join_heads`. A program has the columns of one
key head, R = N / K queries, a key and a value, for some rows, and moves them in
halves of a head: the pairs that are rotated are one in each.

        R x H       H    H
      +-----------+----+----+
      | q         | k  | v  |  rows
      +-----------+----+----+

Bytes per element, BF16: 2 + 2. XLA's backward, a sum of padded parts, took 270
microseconds where this takes about the time of a copy.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from coat_jax.pallas import blocks


def split_heads_unsupported(
  qkv: Array, cos: Array, sin: Array, *, num_heads: int, num_kv_heads: int
) -> str | None:
  """Why the kernel cannot take these arguments, or None."""
  del sin, num_heads, num_kv_heads
  return _unsupported("split_heads", qkv, cos)


def split_heads(
  qkv: Array,
  cos: Array,
  sin: Array,
  *,
  num_heads: int,
  num_kv_heads: int,
  interpret: bool = False,
) -> tuple[Array, Array, Array]:
  """`reference_rope.split_heads`."""
  return _split_heads(qkv, cos, sin, num_heads, num_kv_heads, interpret)


@functools.partial(
  jax.jit, static_argnames=("num_heads", "num_kv_heads", "interpret")
)
def _split_heads(qkv, cos, sin, num_heads, num_kv_heads, interpret):
  b, t, _ = qkv.shape
  r, h = num_heads // num_kv_heads, 2 * cos.shape[-1]
  joined, table, query, single = _specs(t, r, h)
  kv = jax.ShapeDtypeStruct((b * t, num_kv_heads * h), qkv.dtype)
  q, k, v = pl.pallas_call(
    functools.partial(_split_kernel, r=r, h=h),
    grid=(b * t // _rows(t), num_kv_heads),
    in_specs=[joined, table, table],
    out_specs=[query, single, single],
    out_shape=[
      jax.ShapeDtypeStruct((b * t, num_heads * h), qkv.dtype),
      kv,
      kv,
    ],
    compiler_params=blocks.compiler_params(4),
    interpret=interpret,
    name="split_heads",
  )(qkv.reshape(b * t, -1), cos, sin)
  return tuple(x.reshape(b, t, -1, h) for x in (q, k, v))


def _split_kernel(qkv_ref, cos_ref, sin_ref, q_ref, k_ref, v_ref, *, r, h):
  cos, sin = cos_ref[...], sin_ref[...]
  for i in range(r):
    _move(qkv_ref, i, q_ref, i, h, cos, sin)
  _move(qkv_ref, r, k_ref, 0, h, cos, sin)
  _move(qkv_ref, r + 1, v_ref, 0, h)


def join_heads_unsupported(
  dq: Array, dk: Array, dv: Array, cos: Array, sin: Array
) -> str | None:
  """Why the kernel cannot take these arguments, or None."""
  del dk, dv, sin
  return _unsupported("join_heads", dq, cos)


def join_heads(
  dq: Array,
  dk: Array,
  dv: Array,
  cos: Array,
  sin: Array,
  *,
  interpret: bool = False,
) -> Array:
  """`reference_rope.join_heads`."""
  return _join_heads(dq, dk, dv, cos, sin, interpret)


@functools.partial(jax.jit, static_argnames=("interpret",))
def _join_heads(dq, dk, dv, cos, sin, interpret):
  b, t, num_heads, h = dq.shape
  kv_heads = dk.shape[2]
  r = num_heads // kv_heads
  joined, table, query, single = _specs(t, r, h)
  return pl.pallas_call(
    functools.partial(_join_kernel, r=r, h=h),
    grid=(b * t // _rows(t), kv_heads),
    in_specs=[query, single, single, table, table],
    out_specs=joined,
    out_shape=jax.ShapeDtypeStruct((b * t, kv_heads * (r + 2) * h), dq.dtype),
    compiler_params=blocks.compiler_params(4),
    interpret=interpret,
    name="join_heads",
  )(*(x.reshape(b * t, -1) for x in (dq, dk, dv)), cos, sin).reshape(b, t, -1)


def _join_kernel(dq_ref, dk_ref, dv_ref, cos_ref, sin_ref, out_ref, *, r, h):
  cos, sin = cos_ref[...], -sin_ref[...]
  for i in range(r):
    _move(dq_ref, i, out_ref, i, h, cos, sin)
  _move(dk_ref, 0, out_ref, r, h, cos, sin)
  _move(dv_ref, 0, out_ref, r + 1, h)


def _move(source, i, target, j, h, cos=None, sin=None):
  """Head i of one block to head j of another, rotated where cos is given."""
  half = h // 2
  a, b = (source[:, pl.ds(i * h + k * half, half)] for k in (0, 1))
  if cos is not None:
    x, y = a.astype(jnp.float32), b.astype(jnp.float32)
    a, b = x * cos - y * sin, y * cos + x * sin
  target[:, pl.ds(j * h, half)] = a.astype(target.dtype)
  target[:, pl.ds(j * h + half, half)] = b.astype(target.dtype)


def _rows(t: int) -> int:
  """Rows of a block: what divides a sequence, at most 32."""
  return next(rows for rows in (32, 16, 8, 4, 2, 1) if t % rows == 0)


def _specs(t: int, r: int, h: int):
  """Blocks of [q, k, v], of the angles, of q, and of k or v."""
  rows = _rows(t)
  return (
    pl.BlockSpec((rows, (r + 2) * h), lambda i, j: (i, j)),
    pl.BlockSpec((rows, h // 2), lambda i, j: (i % (t // rows), 0)),
    pl.BlockSpec((rows, r * h), lambda i, j: (i, j)),
    pl.BlockSpec((rows, h), lambda i, j: (i, j)),
  )


def _unsupported(op: str, x: Array, cos: Array) -> str | None:
  t, half = cos.shape
  if half & (half - 1) or half < 8:
    return (
      f"{op}: head sizes must be powers of two from 16 for the Triton kernel, "
      f"got {2 * half}"
    )
  if t % 8:
    return (
      f"{op}: sequences must be multiples of 8 for the Triton kernel, got {t}"
    )
  if x.size > blocks.MAX_ELEMENTS:
    return f"{op}: arrays must be below 2^31 values, got {x.size}"
  return blocks.dtype_unsupported(op, x.dtype)
