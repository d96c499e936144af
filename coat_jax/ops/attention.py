# SPDX-License-Identifier: Apache-2.0
"""Attention in plain jnp, forward and backward, by chunks of the queries.

Like FlashAttention it saves q, k, v, the output and the log-sum-exp of each
row, and rebuilds the probabilities of one chunk of queries at a time, so that
no [T, S] matrix is ever held whole. (`jax.nn.dot_product_attention` without
cuDNN saves the probabilities: 13 U a layer at a sequence of 2048, in units of
U = 2 D bytes a token.)

Shapes: q [B, T, N, H]; k, v [B, S, K, H] with N a multiple of K, query head n
reading key head n // (N / K). Products read their operands in the dtype they
have and accumulate in f32; softmax is f32.
"""

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.ops.dispatch import op
from coat_jax.ops.types import AttentionResiduals

_CHUNK = 256
_MASKED = -1e30


def _check_attention(q, k, v, *, causal: bool) -> None:
  del causal
  fits = q.ndim == k.ndim == 4 and k.shape == v.shape
  fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
  if not fits or q.shape[2] % k.shape[2]:
    raise ValueError(
      "attention: needs q [B, T, N, H] and k, v [B, S, K, H] with N a "
      f"multiple of K, got q {q.shape}, k {k.shape}, v {v.shape}"
    )


@op(check=_check_attention, cudnn="nvidia")
def attention_fwd(
  q: Array, k: Array, v: Array, *, causal: bool
) -> AttentionResiduals:
  """softmax(q k^T / sqrt(H)) v and its log-sum-exp.

  Args:
    q: [B, T, N, H].
    k, v: [B, S, K, H].
    causal: query t sees keys up to t + S - T.
  """

  def one_chunk(args):
    q_chunk, first = args
    scores = _scores(q_chunk, k, first, q.shape[1], causal)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - lse[..., None]).astype(v.dtype)
    return _einsum("bkrts,bskh->btkrh", p, v).astype(q.dtype), lse

  out, lse = jax.lax.map(one_chunk, _chunks(_grouped(q, k.shape[2])))
  out = _join(out, q.shape[1]).reshape(q.shape)
  # [chunks, B, K, R, chunk] to [B, T, N].
  lse = _join(jnp.moveaxis(lse, -1, 2), q.shape[1])
  return AttentionResiduals(out, lse.reshape(q.shape[:3]))


@op(cudnn="nvidia")
def attention_bwd(
  dout: Array,
  q: Array,
  k: Array,
  v: Array,
  residuals: AttentionResiduals,
  *,
  causal: bool,
) -> tuple[Array, Array, Array]:
  """dq, dk, dv in the dtypes of q, k, v; dk and dv summed in f32."""
  kv_heads, t = k.shape[2], q.shape[1]
  scale = q.shape[-1] ** -0.5
  # Row sums of p * dp, which are those of out * dout.
  delta = jnp.sum(
    residuals.out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1
  )

  def one_chunk(carry, args):
    dk, dv = carry
    (q_chunk, first), (dout_chunk, _), (lse, _), (delta_chunk, _) = args
    scores = _scores(q_chunk, k, first, t, causal)
    p = jnp.exp(scores - _per_row(lse))
    dv += _einsum("bkrts,btkrh->bskh", p.astype(v.dtype), dout_chunk)
    dp = _einsum("btkrh,bskh->bkrts", dout_chunk, v)
    ds = (p * (dp - _per_row(delta_chunk)) * scale).astype(q.dtype)
    dk += _einsum("bkrts,btkrh->bskh", ds, q_chunk)
    return (dk, dv), _einsum("bkrts,bskh->btkrh", ds, k)

  chunks = tuple(
    _chunks(_grouped(x, kv_heads))
    for x in (q, dout.astype(q.dtype), residuals.lse, delta)
  )
  zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
  (dk, dv), dq = jax.lax.scan(one_chunk, zeros, chunks)
  dq = _join(dq, t).reshape(q.shape)
  return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _einsum(formula: str, a: Array, b: Array) -> Array:
  return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def _grouped(x: Array, kv_heads: int) -> Array:
  """[B, T, N, ...] to [B, T, K, R, ...], R query heads to a key head."""
  b, t, n, *rest = x.shape
  return x.reshape(b, t, kv_heads, n // kv_heads, *rest)


def _chunks(x: Array) -> tuple[Array, Array]:
  """[B, T, ...] to [chunks, B, chunk, ...] and each chunk's first query."""
  chunk = min(_CHUNK, x.shape[1])
  missing = -x.shape[1] % chunk
  x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
  x = x.reshape(x.shape[0], x.shape[1] // chunk, chunk, *x.shape[2:])
  x, first = jnp.moveaxis(x, 1, 0), jnp.arange(x.shape[1]) * chunk
  # Tied to the data: masks that depend on constants only are the same in every
  # layer, so a scan over layers would compute all of them first and hold them.
  return jax.lax.optimization_barrier((x, first))


def _join(x: Array, t: int) -> Array:
  """[chunks, B, chunk, ...] to [B, T, ...]: the inverse of `_chunks`."""
  x = jnp.moveaxis(x, 0, 1)
  length = x.shape[1] * x.shape[2]
  return x.reshape(x.shape[0], length, *x.shape[3:])[:, :t]


def _per_row(x: Array) -> Array:
  """[B, chunk, K, R] to [B, K, R, chunk, 1]."""
  return jnp.moveaxis(x, 1, -1)[..., None]


def _scores(q_chunk, k, first, t, causal):
  """Scaled and masked scores of one chunk of queries: f32 [B, K, R, c, S]."""
  scores = _einsum("btkrh,bskh->bkrts", q_chunk, k) * q_chunk.shape[-1] ** -0.5
  if not causal:
    return scores
  query = first + jnp.arange(q_chunk.shape[1])
  key = jnp.arange(k.shape[1])
  seen = key[None, :] <= query[:, None] + (k.shape[1] - t)
  return jnp.where(seen[None, None, None], scores, _MASKED)
