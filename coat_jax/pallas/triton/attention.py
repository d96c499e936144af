# SPDX-License-Identifier: Apache-2.0
"""FlashAttention with soft caps, windows and segments, in Triton.

  x = q k^T scale, or tanh(q k^T scale / cap) cap
  out = softmax(x) v,  lse = log sum exp(x)
  p = exp(x - lse),  dv = p^T dout,  dp = dout v^T,  delta = sum(out dout)
  ds = p (dp - delta) [(1 - tanh^2)],  dq = scale ds k,  dk = scale ds^T q

There are three kernels. In the forward kernel and the kernel for dq, a program
loops over the tiles of keys that its tile of queries sees. In the kernel for dk
and dv, a program loops over the tiles of queries that see its tile of keys, in
all query heads that read the key head. If H is 256, dk and dv have separate
kernels. No sum uses atomics, so every run returns the same bits. `visits.py`
determines which tiles are visited.

Inputs are BF16, sums are f32, and no [T, T] array is stored. If a soft cap
bounds the scores, no running maximum is needed, because exp cannot overflow.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from coat_jax.ops.capability import capability, shared_memory
from coat_jax.ops.dispatch import kernel
from coat_jax.ops.types import AttentionKind, AttentionResiduals
from coat_jax.pallas import supported
from coat_jax.pallas.mosaic.attention_tiles import LEAST, LOG2_E, row_terms
from coat_jax.pallas.triton.scores import (
  Scores,
  Tile,
  Visit,
  segment_refs,
)

_HEAD_SIZES = (64, 128, 256)
# If all scores are within ±55, exp is within 2^±80. Then a sum of 2^40 values
# does not overflow, and the smallest value does not underflow.
_NEEDS_NO_MAXIMUM = 55.0
# The most shared memory that the tiles of `pick_tiles` need, by head size. For
# smaller heads, they need less than any GPU has.
_FORWARD_BYTES = {256: 147_712}
_BACKWARD_BYTES = {128: 131_584, 256: 147_968}


@dataclasses.dataclass(frozen=True)
class Tiles:
  """The tile of each kernel; if dv is None, the kernel for dk computes dv too.

  Two sums of 256 columns fit in registers only with up to 64 rows. With 64
  rows and eight warps, all scores would be computed twice, because Triton gives
  all of them to each group of four warps.
  """

  forward: Tile
  dq: Tile
  dk: Tile
  dv: Tile | None


def pick_tiles(head_dim: int) -> Tiles:
  """Picks the fastest tiles that fit in registers and shared memory.

  The tiles were tuned on an H200 with 4 x 2048 tokens, with and without a cap,
  for 16 heads of size 256 and for 32 heads of size 128.
  """
  square = Tile(64, 64, 4, 2)
  if head_dim == 256:
    return Tiles(Tile(128, 64, 8, 2), square, square, Tile(64, 128, 8, 2))
  return Tiles(Tile(128, 32, 4, 3), Tile(128, 64, 8, 3), square, None)


def _why_not_fwd(q, k, v, **_) -> str | None:
  return _why_not(pick_tiles(q.shape[-1]).forward, _FORWARD_BYTES, q, k, v)


def _why_not_bwd(q, k, v, **_) -> str | None:
  picked = pick_tiles(q.shape[-1])
  kernels = picked.dq, picked.dk, picked.dv or picked.dk
  longest = max(kernels, key=lambda tile: tile.longest)
  return _why_not(longest, _BACKWARD_BYTES, q, k, v)


def _why_not(
  tile: Tile, shared: dict[int, int], q: Array, k: Array, v: Array
) -> str | None:
  if any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
    return (
      f"the Triton kernel reads bfloat16, got {q.dtype}, {k.dtype} and "
      f"{v.dtype}"
    )
  if q.shape[-1] not in _HEAD_SIZES:
    return f"the Triton kernel needs heads of {_HEAD_SIZES}, got {q.shape[-1]}"
  needed, available = shared.get(q.shape[-1], 0), shared_memory()
  if needed > available:
    return (
      f"the Triton kernel needs {needed / 1024:.0f} KiB of shared memory for "
      f"heads of {q.shape[-1]}, and a GPU of compute capability {capability()} "
      f"has {available / 1024:.0f} KiB"
    )
  if q.shape[1] != k.shape[1]:
    return (
      "the Triton kernel needs as many queries as keys, got "
      f"{q.shape[1]} and {k.shape[1]}"
    )
  if q.shape[1] % tile.longest:
    return (
      "the Triton kernel needs a sequence length that is a multiple of "
      f"{tile.longest}, got {q.shape[1]}"
    )
  return supported.why_not_shape(q.shape)


@dataclasses.dataclass(frozen=True)
class Work:
  """The kind of attention that a kernel computes, and its tile."""

  kind: AttentionKind
  tile: Tile
  interpret: bool

  def run(self, kernel, *args, grid, out_shape, name):
    """Runs `kernel(*refs, work=self)` in each program of the grid."""
    return pl.pallas_call(
      functools.partial(kernel, work=self),
      grid=grid,
      out_shape=out_shape,
      compiler_params=plt.CompilerParams(
        num_warps=self.tile.warps, num_stages=self.tile.stages
      ),
      interpret=self.interpret,
      name=name,
    )(*args)


@kernel(_why_not_fwd)
@jax.jit(static_argnames=("kind", "interpret"))
def attention_fwd(
  q: Array,
  k: Array,
  v: Array,
  segments: Array | None = None,
  *,
  kind: AttentionKind,
  interpret: bool = False,
) -> AttentionResiduals:
  """Computes `ops.attention_fwd`."""
  b, t, n, h = q.shape
  tile = pick_tiles(h).forward
  out, lse = Work(kind.among(k.shape[1]), tile, interpret).run(
    _forward_kernel,
    *(q, k, v),
    *segment_refs(segments, tile.queries, tile.keys),
    grid=(t // tile.queries, n, b),
    out_shape=(
      jax.ShapeDtypeStruct(q.shape, q.dtype),
      jax.ShapeDtypeStruct((b, n, t), jnp.float32),
    ),
    name="attention_fwd",
  )
  return AttentionResiduals(out, jnp.swapaxes(lse, 1, 2))


@kernel(_why_not_bwd)
@jax.jit(static_argnames=("kind", "interpret"))
def attention_bwd(
  dout: Array,
  q: Array,
  k: Array,
  v: Array,
  residuals: AttentionResiduals,
  segments: Array | None = None,
  *,
  kind: AttentionKind,
  interpret: bool = False,
) -> tuple[Array, Array, Array]:
  """Computes `ops.attention_bwd`."""
  picked = pick_tiles(q.shape[-1])
  dout = dout.astype(q.dtype)
  lse, delta = row_terms(dout, residuals)
  # q and dout are [B, T, N, H], k and v are [B, T, K, H], and lse (to base 2)
  # and delta are [B, N, T].
  inputs = q, k, v, dout, lse, delta

  def work(tile: Tile) -> Work:
    return Work(kind.among(k.shape[1]), tile, interpret)

  dq = _backward_q(inputs, segments, work(picked.dq))
  if picked.dv is None:
    return dq, *_backward_kv(inputs, segments, "dkv", work(picked.dk))
  [dk] = _backward_kv(inputs, segments, "dk", work(picked.dk))
  [dv] = _backward_kv(inputs, segments, "dv", work(picked.dv))
  return dq, dk, dv


def _backward_q(inputs, segments, work: Work) -> Array:
  q, tile = inputs[0], work.tile
  b, t, n, _ = q.shape
  return work.run(
    _dq_kernel,
    *inputs,
    *segment_refs(segments, tile.queries, tile.keys),
    grid=(t // tile.queries, n, b),
    out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    name="attention_dq",
  )


def _backward_kv(inputs, segments, which: str, work: Work) -> list:
  """Returns gradients of k ("dk"), of v ("dv"), or of both ("dkv")."""
  tile = work.tile
  _, k, v, *_ = inputs
  b, s, kv_heads, _ = k.shape
  shapes = [
    jax.ShapeDtypeStruct(x.shape, x.dtype) if letter in which else None
    for letter, x in (("k", k), ("v", v))
  ]
  gradients = work.run(
    _dkv_kernel,
    *inputs,
    *segment_refs(segments, tile.keys, tile.queries),
    grid=(s // tile.keys, kv_heads, b),
    out_shape=shapes,
    name=f"attention_{which}",
  )
  return [x for x in gradients if x is not None]


# --- Kernels -----------------------------------------------------------------


def _forward_kernel(*refs, work: Work):
  q_ref, k_ref, v_ref, *segments, out_ref, lse_ref = refs
  kind, tile = work.kind, work.tile
  visit = Visit.begin(kind, tile, True, k_ref.shape[1], segments)
  head, b = pl.program_id(1), pl.program_id(2)
  kv_head = head // (q_ref.shape[2] // k_ref.shape[2])
  own = pl.ds(visit.own * tile.queries, tile.queries)
  q = plt.load(q_ref.at[b, own, head])
  scores = Scores(kind, q.shape[-1], work.interpret)
  has_maximum = kind.soft_cap is None or kind.soft_cap > _NEEDS_NO_MAXIMUM

  def step(j, carry, is_masked):
    acc, largest, total = carry
    others = pl.ds(j * tile.keys, tile.keys)
    x = scores.of(dot(q, plt.load(k_ref.at[b, others, kv_head]), (1, 1)))
    x = scores.masked(x, visit.seen(j, is_masked))
    if has_maximum:
      before = largest
      largest = jnp.maximum(before, jnp.max(x, axis=1) * scores.unit)
      rescaled = jnp.exp2(before - largest)
      acc, total = acc * rescaled[:, None], total * rescaled
    p = scores.exponential(x, largest[:, None])
    total = total + jnp.sum(p, axis=1)
    v = plt.load(v_ref.at[b, others, kv_head])
    return acc + dot(p.astype(v.dtype), v, (1, 0)), largest, total

  rows = jnp.zeros((tile.queries,), jnp.float32)
  carry = jnp.zeros(q.shape, jnp.float32), rows, rows
  if has_maximum:
    carry = carry[0], rows + LEAST, rows
  acc, largest, total = visit.run(step, carry)
  out = acc / total[:, None]
  plt.store(out_ref.at[b, own, head], out.astype(out_ref.dtype))
  lse = largest / LOG2_E + jnp.log(total)
  plt.store(lse_ref.at[b, head, own], lse)


def _dq_kernel(*refs, work: Work):
  *inputs, dq_ref = refs
  q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *segments = inputs
  kind, tile = work.kind, work.tile
  visit = Visit.begin(kind, tile, True, k_ref.shape[1], segments)
  head, b = pl.program_id(1), pl.program_id(2)
  kv_head = head // (q_ref.shape[2] // k_ref.shape[2])
  own = pl.ds(visit.own * tile.queries, tile.queries)
  q = plt.load(q_ref.at[b, own, head])
  dout = plt.load(dout_ref.at[b, own, head])
  lse = plt.load(lse_ref.at[b, head, own])[:, None]
  delta = plt.load(delta_ref.at[b, head, own])[:, None]
  scores = Scores(kind, q.shape[-1], work.interpret)

  def step(j, dq, is_masked):
    others = pl.ds(j * tile.keys, tile.keys)
    k = plt.load(k_ref.at[b, others, kv_head])
    v = plt.load(v_ref.at[b, others, kv_head])
    seen = visit.seen(j, is_masked)
    x = scores.of(dot(q, k, (1, 1)))
    p = scores.probability(x, lse, seen)
    ds = scores.gradient(x, p * (dot(dout, v, (1, 1)) - delta))
    return dq + dot(ds.astype(k.dtype), k, (1, 0))

  dq = visit.run(step, jnp.zeros(q.shape, jnp.float32))
  plt.store(dq_ref.at[b, own, head], (dq * scores.scale).astype(dq_ref.dtype))


def _dkv_kernel(*refs, work: Work):
  *inputs, dk_ref, dv_ref = refs
  q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *segments = inputs
  kind, tile = work.kind, work.tile
  visit = Visit.begin(kind, tile, False, q_ref.shape[1], segments)
  kv_head, b = pl.program_id(1), pl.program_id(2)
  heads = q_ref.shape[2] // k_ref.shape[2]
  own = pl.ds(visit.own * tile.keys, tile.keys)
  k = plt.load(k_ref.at[b, own, kv_head])
  v = None if dk_ref is None else plt.load(v_ref.at[b, own, kv_head])
  scores = Scores(kind, k.shape[-1], work.interpret)

  def of_head(i, carry):
    head = kv_head * heads + i

    # In this kernel, scores are transposed: their rows are keys.
    def step(j, carry, is_masked):
      dk, dv = carry
      others = pl.ds(j * tile.queries, tile.queries)
      q = plt.load(q_ref.at[b, others, head])
      dout = plt.load(dout_ref.at[b, others, head])
      lse = plt.load(lse_ref.at[b, head, others])[None, :]
      seen = visit.seen(j, is_masked)
      x = scores.of(dot(k, q, (1, 1)))
      p = scores.probability(x, lse, seen)
      if dv is not None:
        dv = dv + dot(p.astype(dout.dtype), dout, (1, 0))
      if v is not None:
        delta = plt.load(delta_ref.at[b, head, others])[None, :]
        ds = scores.gradient(x, p * (dot(v, dout, (1, 1)) - delta))
        dk = dk + dot(ds.astype(q.dtype), q, (1, 0))
      return dk, dv

    return visit.run(step, carry)

  zeros = jnp.zeros(k.shape, jnp.float32)
  carry = tuple(None if ref is None else zeros for ref in (dk_ref, dv_ref))
  dk, dv = jax.lax.fori_loop(0, heads, of_head, carry)
  for ref, x, scale in ((dk_ref, dk, scores.scale), (dv_ref, dv, 1.0)):
    if ref is not None and x is not None:
      plt.store(ref.at[b, own, kv_head], (x * scale).astype(ref.dtype))


def dot(a: Array, b: Array, summed: tuple[int, int]) -> Array:
  """Returns the matmul of a and b, f32, summed over an axis of each."""
  return jax.lax.dot_general(
    a,
    b,
    (((summed[0],), (summed[1],)), ((), ())),
    preferred_element_type=jnp.float32,
  )
