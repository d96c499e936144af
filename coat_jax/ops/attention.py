# SPDX-License-Identifier: Apache-2.0
"""Attention in plain jnp, forward and backward, in chunks of queries.

As in FlashAttention, the forward pass saves only q, k, v, the output and each
query's log-sum-exp. The backward pass recomputes the probabilities of one chunk
of queries at a time, so no [T, S] matrix is ever in memory. With a window, a
chunk reads only window + chunk keys instead of S.

Shapes: q [B, T, N, H]; k, v [B, S, K, H], for B sequences, T queries, S keys,
N query heads and K key heads, all of size H. N is a multiple of K, and query
head n reads key head n // (N / K). Matmuls accumulate in f32; the softmax is
computed in f32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.numerics.checks import check_kind
from coat_jax.ops.dispatch import op
from coat_jax.ops.types import AttentionKind, AttentionResiduals

_CHUNK = 256
_MASKED = -1e30


def check_attention(q, k, v, segments=None, *, kind: AttentionKind) -> None:
  remedy = "pass one, as in AttentionKind(window=4096)"
  check_kind("attention", "kind", kind, AttentionKind, remedy)
  fits = q.ndim == k.ndim == 4 and k.shape == v.shape
  fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
  if not fits or q.shape[2] % k.shape[2]:
    raise ValueError(
      "attention: needs q [B, T, N, H] and k, v [B, S, K, H] with N a "
      f"multiple of K, got q {q.shape}, k {k.shape}, v {v.shape}; pass arrays "
      "of these shapes"
    )
  t, s = q.shape[1], k.shape[1]
  fewest = t if kind.causal else min(t, 1)
  if s < fewest:
    raise ValueError(
      f"attention: with causal={kind.causal}, {t} queries need at least "
      f"{fewest} keys, so that each query sees one, got {s}; pass more keys"
    )
  if segments is None:
    return
  fits = segments.shape == q.shape[:2] == k.shape[:2]
  if not fits or not jnp.issubdtype(segments.dtype, jnp.integer):
    raise ValueError(
      "attention: segments must be integers [B, T] for T queries and T keys, "
      f"got {segments.dtype} {segments.shape} for q {q.shape} and k {k.shape}; "
      "pass the number of each token's document"
    )


@op(check=check_attention, cudnn="cudnn", mosaic="attention")
def attention_fwd(
  q: Array,
  k: Array,
  v: Array,
  segments: Array | None = None,
  *,
  kind: AttentionKind,
) -> AttentionResiduals:
  """Computes softmax(scores) v and the log-sum-exp of each query's scores.

  `kind` determines the scores. `segments`, if passed, are integers [B, T], one
  per token, and S must be T. A query then sees only keys of its own segment.
  """

  def one_chunk(args):
    queries, own = args
    chunk = Chunk.of(queries, own, q, k, kind)
    scores, _ = chunk.scores(k, segments)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - lse[..., None]).astype(v.dtype)
    out = einsum_f32("bkrts,bskh->btkrh", p, chunk.read(v))
    return out.astype(q.dtype), lse

  kind = kind.among(k.shape[1])
  chunks = in_chunks(grouped_heads(q, k.shape[2])), in_chunks(segments)
  out, lse = jax.lax.map(one_chunk, chunks)
  out = join_chunks(out, q.shape[1]).reshape(q.shape)
  # [chunks, B, K, R, chunk] to [B, T, N].
  lse = join_chunks(jnp.moveaxis(lse, -1, 2), q.shape[1])
  return AttentionResiduals(out, lse.reshape(q.shape[:3]))


def _check_bwd(dout, q, k, v, residuals, segments=None, *, kind) -> None:
  check_attention(q, k, v, segments, kind=kind)


@op(check=_check_bwd, cudnn="cudnn", mosaic="attention")
def attention_bwd(
  dout: Array,
  q: Array,
  k: Array,
  v: Array,
  residuals: AttentionResiduals,
  segments: Array | None = None,
  *,
  kind: AttentionKind,
) -> tuple[Array, Array, Array]:
  """Computes dq, dk, dv in the dtypes of q, k, v; sums dk and dv in f32."""
  kv_heads, t = k.shape[2], q.shape[1]
  kind = kind.among(k.shape[1])
  # The row sums of p * dp equal the row sums of out * dout.
  delta = jnp.sum(
    residuals.out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1
  )
  zeros = (jnp.zeros_like(k, jnp.float32), jnp.zeros_like(v, jnp.float32))
  # Without this barrier, XLA creates the zeros of all layers before the
  # backward pass.
  zeros, delta = jax.lax.optimization_barrier((zeros, delta))

  def one_chunk(carry, args):
    dk, dv = carry
    queries, (dout_chunk, _), (lse, _), (delta_chunk, _), own = args
    chunk = Chunk.of(queries, own, q, k, kind)
    scores, slope = chunk.scores(k, segments)
    p = jnp.exp(scores - per_row(lse))
    dv = chunk.add(
      dv, einsum_f32("bkrts,btkrh->bskh", p.astype(v.dtype), dout_chunk)
    )
    dp = einsum_f32("btkrh,bskh->bkrts", dout_chunk, chunk.read(v))
    ds = (p * (dp - per_row(delta_chunk)) * slope).astype(q.dtype)
    dk = chunk.add(dk, einsum_f32("bkrts,btkrh->bskh", ds, chunk.q))
    dq = einsum_f32("bkrts,bskh->btkrh", ds, chunk.read(k))
    return (dk, dv), dq.astype(q.dtype)

  chunks = tuple(
    in_chunks(grouped_heads(x, kv_heads))
    for x in (q, dout.astype(q.dtype), residuals.lse, delta)
  )
  (dk, dv), dq = jax.lax.scan(one_chunk, zeros, (*chunks, in_chunks(segments)))
  dq = join_chunks(dq, t).reshape(q.shape)
  return dq, dk.astype(k.dtype), dv.astype(v.dtype)


class Chunk(NamedTuple):
  """A chunk of queries, and the range of keys that it reads."""

  q: Array  # The queries, [B, chunk, K, R, H] with R = N / K.
  start: Array  # Index of the first query.
  segments: Array | None  # Segments of the queries, [B, chunk].
  kind: AttentionKind
  offset: int  # Query i has the same position as key i + offset.
  first: Array | int  # Index of the first key to read.
  length: int  # Number of keys to read.
  all: int  # Number of all keys, S.

  @classmethod
  def of(cls, queries, segments, q, k, kind: AttentionKind) -> "Chunk":
    """Makes a chunk; `queries` and `segments` are slices from `in_chunks`."""
    x, start = queries
    own = None if segments is None else segments[0]
    s, size = k.shape[1], x.shape[1]
    offset = s - q.shape[1]
    if kind.window is None or kind.window + size >= s:
      return cls(x, start, own, kind, offset, 0, s, s)
    # The queries see window + size - 1 keys. We read one key more, because
    # matmuls are fast at multiples of 8, such as 4352 for a window of 4096.
    length = kind.window + size
    # Near the ends of the sequence, clip the start, so that the slice of keys
    # stays inside. The mask hides keys that no query of the chunk sees.
    first = jnp.clip(start + offset - kind.window, 0, s - length)
    return cls(x, start, own, kind, offset, first, length, s)

  def read(self, x: Array) -> Array:
    """Selects the keys that the chunk reads from x [B, S, ...]."""
    if self.length == self.all:
      return x
    return jax.lax.dynamic_slice_in_dim(x, self.first, self.length, axis=1)

  def add(self, sums: Array, x: Array) -> Array:
    """Adds x to sums [B, S, ...] at the chunk's keys."""
    if self.length == self.all:
      return sums + x
    x = self.read(sums) + x
    return jax.lax.dynamic_update_slice_in_dim(sums, x, self.first, axis=1)

  def scores(self, k: Array, segments: Array | None):
    """Computes masked scores, and their derivatives with respect to q k^T.

    Scores are f32 [B, K, R, chunk, length]. With a soft cap, derivatives have
    the same shape. Without a soft cap, the derivative is a constant float.
    """
    scale, cap = self.kind.scale_of(self.q.shape[-1]), self.kind.soft_cap
    products = einsum_f32("btkrh,bskh->bkrts", self.q, self.read(k))
    scores = products * scale
    slope = scale
    if cap is not None:
      share = jnp.tanh(scores / cap)
      scores, slope = cap * share, scale * (1 - share * share)
    seen = self._seen(segments)
    return scores if seen is None else jnp.where(seen, scores, _MASKED), slope

  def _seen(self, segments: Array | None) -> Array | None:
    """Returns the mask [B or 1, 1, 1, chunk, length]; None allows all keys."""
    seen = None
    if self.kind.causal:
      query = self.start + jnp.arange(self.q.shape[1])
      key = jnp.arange(self.length)
      if self.length != self.all:
        key = self.first + key
      key, query = key[None, :], query[:, None] + self.offset
      seen = key <= query
      if self.kind.window is not None:
        seen &= key > query - self.kind.window
      seen = seen[None, None, None]
    if segments is not None:
      assert self.segments is not None
      own, others = self.segments[:, :, None], self.read(segments)[:, None, :]
      same = (own == others)[:, None, None]
      seen = same if seen is None else same & seen
    return seen


def einsum_f32(formula: str, a: Array, b: Array) -> Array:
  return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def grouped_heads(x: Array, kv_heads: int) -> Array:
  """Reshapes [B, T, N, ...] to [B, T, K, R, ...], R = N / K."""
  b, t, n, *rest = x.shape
  return x.reshape(b, t, kv_heads, n // kv_heads, *rest)


def in_chunks(x: Array | None) -> tuple[Array, Array] | None:
  """Pads x [B, T, ...] with zeros; splits it to [chunks, B, chunk, ...].

  Also returns the index of each chunk's first query.
  """
  if x is None:
    return None
  chunk = max(min(_CHUNK, x.shape[1]), 1)
  missing = -x.shape[1] % chunk
  x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
  x = x.reshape(x.shape[0], x.shape[1] // chunk, chunk, *x.shape[2:])
  x, first = jnp.moveaxis(x, 1, 0), jnp.arange(x.shape[1]) * chunk
  # The barrier makes masks depend on data. Otherwise, XLA would compute all of
  # them before a scan over layers, and keep them in memory.
  return jax.lax.optimization_barrier((x, first))


def join_chunks(x: Array, t: int) -> Array:
  """Inverts `in_chunks`: joins [chunks, B, chunk, ...] to [B, T, ...]."""
  x = jnp.moveaxis(x, 0, 1)
  length = x.shape[1] * x.shape[2]
  return x.reshape(x.shape[0], length, *x.shape[3:])[:, :t]


def per_row(x: Array) -> Array:
  """Transposes [B, chunk, K, R] to [B, K, R, chunk, 1]."""
  return jnp.moveaxis(x, 1, -1)[..., None]
