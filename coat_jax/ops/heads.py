# SPDX-License-Identifier: Apache-2.0
"""Splits a QKV projection into heads with RoPE, and joins heads, in plain jnp.

The projection's columns are ordered by key head. For each of the K key heads,
the N / K query heads that share it come first, then the key, then the value.
"""

import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.checks import COUNT, check_whole
from coat_jax.numerics.scaling import GRADIENTS, Operand, Scaling
from coat_jax.ops.dispatch import op
from coat_jax.ops.rope import rotate, rotate_back


def _check_columns(qkv, cos, sin, *, num_heads, num_kv_heads, **_) -> None:
  del cos, sin
  remedy = "pass the numbers of heads for which the weight was made"
  check_whole("split_heads", "num_heads", num_heads, COUNT, remedy)
  check_whole("split_heads", "num_kv_heads", num_kv_heads, COUNT, remedy)
  count = num_heads + 2 * num_kv_heads
  if qkv.ndim != 3 or num_heads % num_kv_heads or qkv.shape[-1] % count:
    raise ValueError(
      "split_heads: qkv must be [B, T, (N + 2 K) H] with N a multiple of K, "
      f"got {qkv.shape} with N {num_heads} and K {num_kv_heads}; {remedy}"
    )


@op(check=_check_columns)
def split_heads(
  qkv: Array,
  cos: Array | None,
  sin: Array | None,
  *,
  num_heads: int,
  num_kv_heads: int,
) -> tuple[Array, Array, Array]:
  """Splits qkv [B, T, (N + 2 K) H] into q, k and v; rotates q and k.

  q is [B, T, N, H]; k and v are [B, T, K, H].
  """
  b, t, columns = qkv.shape
  h = columns // (num_heads + 2 * num_kv_heads)
  heads = num_heads // num_kv_heads
  qkv = qkv.reshape(b, t, num_kv_heads, heads + 2, h)
  q = qkv[..., :heads, :].reshape(b, t, num_heads, h)
  k, v = qkv[..., heads, :], qkv[..., heads + 1, :]
  return rotate(q, cos, sin), rotate(k, cos, sin), v


def _check_heads(dq, dk, dv, *_, **__) -> None:
  k = dk.shape[2] if dk.ndim == 4 else 0
  fits = k and dk.shape == dv.shape == (*dq.shape[:2], k, *dq.shape[3:])
  if not fits or dq.shape[2] % k:
    raise ValueError(
      "join_heads: needs dq [B, T, N, H] and dk, dv [B, T, K, H] with N a "
      f"multiple of K, got {dq.shape}, {dk.shape} and {dv.shape}; pass "
      "gradients of what split_heads returned"
    )


@op(check=_check_heads)
def join_heads(
  dq: Array, dk: Array, dv: Array, cos: Array | None, sin: Array | None
) -> Array:
  """Computes qkv's gradient [B, T, (N + 2 K) H], given dq, dk and dv."""
  b, t, kv_heads, h = dk.shape
  heads = dq.shape[2] // kv_heads
  dq, dk = rotate_back(dq, cos, sin), rotate_back(dk, cos, sin)
  parts = (
    dq.reshape(b, t, kv_heads, heads, h),
    dk[..., None, :],
    dv[..., None, :],
  )
  columns = kv_heads * (heads + 2) * h
  return jnp.concatenate(parts, axis=3).reshape(b, t, columns)


@op(check=_check_heads, mosaic="heads")
def join_heads_operand(
  dq: Array,
  dk: Array,
  dv: Array,
  cos: Array | None,
  sin: Array | None,
  *,
  gradient: Scaling = GRADIENTS,
  has_sums: bool = False,
) -> tuple[Operand, Array | None]:
  """Quantizes the result of `join_heads` for the projection's backward pass.

  Returns the operand in the row and the column layout. If `has_sums`, also
  returns the gradient of a bias, f32 [(N + 2 K) H]: the result of `join_heads`
  summed over tokens.
  """
  joined = join_heads.definition(dq, dk, dv, cos, sin)
  sums = None
  if has_sums:
    sums = jnp.sum(joined.astype(jnp.float32), axis=(0, 1))
  return gradient.quantize(joined, layout="both"), sums
