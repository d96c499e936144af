# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and the layout of heads, in plain jnp.

Pairs of channels are (i, i + H/2), as in Hugging Face Transformers. The columns
of q, k and v are ordered by key head: for each of the K key heads its N / K
query heads, its key, its value.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from coat_jax.formats import E5M2
from coat_jax.ops.dispatch import op
from coat_jax.ops.quantize import quantize_tensor
from coat_jax.ops.types import Operand


def rotation(
  positions: Array, *, head_dim: int, theta: float | None
) -> tuple[Array, Array]:
  """cos and sin of position * theta^(-2 i / H): f32 [T, H / 2] each.

  theta None turns nothing.
  """
  half = head_dim // 2
  if theta is None:
    shape = *positions.shape, half
    return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions.astype(jnp.float32)[:, None] * frequency[None]
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
  """Rotates the pairs of x [B, T, N, H], in f32."""
  # One angle for all sequences and heads.
  cos, sin = cos[None, :, None], sin[None, :, None]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x.dtype)


@op(triton="rope")
def split_heads(
  qkv: Array, cos: Array, sin: Array, *, num_heads: int, num_kv_heads: int
) -> tuple[Array, Array, Array]:
  """Takes q, k and v apart and rotates q and k.

  Args:
    qkv: [B, T, (N + 2 K) H].
    cos, sin: f32 [T, H / 2].
    num_heads, num_kv_heads: N and K.

  Returns:
    q [B, T, N, H] and k, v [B, T, K, H].
  """
  b, t, columns = qkv.shape
  h = columns // (num_heads + 2 * num_kv_heads)
  heads = num_heads // num_kv_heads
  qkv = qkv.reshape(b, t, num_kv_heads, heads + 2, h)
  q = qkv[..., :heads, :].reshape(b, t, num_heads, h)
  k, v = qkv[..., heads, :], qkv[..., heads + 1, :]
  return rotate(q, cos, sin), rotate(k, cos, sin), v


@op(triton="rope")
def join_heads(
  dq: Array, dk: Array, dv: Array, cos: Array, sin: Array
) -> Array:
  """The transpose of `split_heads`, which is linear: [B, T, (N + 2 K) H]."""
  b, t, kv_heads, h = dk.shape
  heads = dq.shape[2] // kv_heads
  dq, dk = rotate(dq, cos, -sin), rotate(dk, cos, -sin)
  parts = (
    dq.reshape(b, t, kv_heads, heads, h),
    dk[..., None, :],
    dv[..., None, :],
  )
  columns = kv_heads * (heads + 2) * h
  return jnp.concatenate(parts, axis=3).reshape(b, t, columns)


@op(triton="rope")
def join_heads_operand(
  dq: Array,
  dk: Array,
  dv: Array,
  cos: Array,
  sin: Array,
  *,
  dtype: DTypeLike = E5M2,
) -> Operand:
  """`join_heads` to the operand, both layouts, of the products before."""
  joined = join_heads.definition(dq, dk, dv, cos, sin)
  return quantize_tensor.definition(joined, dtype=dtype, layout="both")
