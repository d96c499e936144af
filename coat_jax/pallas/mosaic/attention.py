# SPDX-License-Identifier: Apache-2.0
"""FlashAttention with soft caps, windows and segments, in Mosaic GPU.

  x = q k^T scale, or tanh(q k^T scale / cap) cap
  out = softmax(x) v,  lse = log sum exp(x)
  p = exp(x - lse),  dv = p^T dout,  dp = dout v^T,  delta = sum(out dout)
  ds = p (dp - delta), times 1 - tanh^2 if there is a cap
  dq = scale ds k,  dk = scale ds^T q

Sequences may have any length: we pad them to a multiple of 8, at least 128, and
copies to shared memory fill the last tile with zeros. Heads are padded to a
multiple of 16, because wgmma sums over 16 products at a time.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.ops.dispatch import kernel
from coat_jax.ops.types import AttentionKind, AttentionResiduals
from coat_jax.pallas import supported
from coat_jax.pallas.mosaic import device
from coat_jax.pallas.mosaic.attention_backward import (
  Inputs,
  backward_kv,
  backward_q,
)
from coat_jax.pallas.mosaic.attention_forward import forward
from coat_jax.pallas.mosaic.attention_tiles import LOG2_E, Work
from coat_jax.pallas.mosaic.attention_visits import segment_bounds
from coat_jax.pallas.mosaic.tiles import MAX_ACROSS
from coat_jax.pallas.mosaic.wgmma import ROWS, WAVE

_MAX_HEAD_SIZE = 256  # Sums of 64 x 256 occupy half of a thread's registers.


@dataclasses.dataclass(frozen=True)
class Tile:
  """The sizes of a program's own tile and of the tiles that it visits."""

  # Number of queries or keys in the program's own tile: 128 (64 for each of two
  # warpgroups), or 64 (both warpgroups process all of them).
  own: int
  step: int  # Number of keys or queries in a visited tile.
  stages: int  # Number of slots for visited tiles in shared memory.


@dataclasses.dataclass(frozen=True)
class Tiles:
  """The tile of each kernel."""

  forward: Tile
  dq: Tile
  dkv: Tile


def pick_tiles(head_dim: int) -> Tiles:
  """Picks tiles that fit in registers and shared memory; not tuned yet."""
  if head_dim > 128:
    return Tiles(Tile(WAVE, 64, 4), Tile(WAVE, 64, 3), Tile(ROWS, 64, 4))
  if head_dim > 64:
    return Tiles(Tile(WAVE, 128, 4), Tile(WAVE, 64, 6), Tile(WAVE, 64, 6))
  return Tiles(Tile(WAVE, 128, 6), Tile(WAVE, 64, 8), Tile(WAVE, 64, 8))


def _why_not(q, k, v, **_) -> str | None:
  reason = device.why_not_hopper()
  if reason is not None:
    return reason
  known = q.dtype in (jnp.bfloat16, jnp.float16)
  if not known or not q.dtype == k.dtype == v.dtype:
    return (
      "the Mosaic kernel needs q, k and v all in bfloat16 or all in float16, "
      f"got {q.dtype}, {k.dtype} and {v.dtype}"
    )
  *leading, h = q.shape
  batch, _, heads = leading
  if h % 8 or h > _MAX_HEAD_SIZE:
    return (
      "the Mosaic kernel needs head sizes that are multiples of 8 up to "
      f"{_MAX_HEAD_SIZE}, got {h}"
    )
  if q.shape[1] != k.shape[1]:
    return (
      "the Mosaic kernel needs as many queries as keys, got "
      f"{q.shape[1]} and {k.shape[1]}"
    )
  if max(batch, heads) > MAX_ACROSS:
    return (
      f"the Mosaic kernel supports at most {MAX_ACROSS} sequences and heads, "
      f"got {batch} and {heads}"
    )
  return supported.why_not_shape((*leading, _padded_size(h)))


@kernel(_why_not)
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
  _, t, _, h = q.shape
  tile = pick_tiles(h).forward
  work = _work(tile, q, k, segments, kind, interpret)
  q, k, v = map(_padded, (q, k, v))
  out, lse = forward(work, q, k, v, _segments(segments, work))
  return AttentionResiduals(out[:, :t, :, :h], jnp.swapaxes(lse, 1, 2)[:, :t])


@kernel(_why_not)
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
  _, t, _, h = q.shape
  dout = dout.astype(q.dtype)
  lse, delta = _row_terms(dout, residuals)
  # Queries past the end add nothing to dk and dv, because their dout and delta
  # are zero.
  missing = [(0, 0), (0, 0), (0, -t % WAVE)]
  inputs = Inputs(
    *map(_padded, (q, k, v, dout)),
    lse=jnp.pad(lse, missing),
    delta=jnp.pad(delta, missing),
  )
  picked = pick_tiles(h)
  work = _work(picked.dq, q, k, segments, kind, interpret)
  dq = backward_q(work, inputs, _segments(segments, work))
  work = _work(picked.dkv, q, k, segments, kind, interpret, of_queries=False)
  dk, dv = backward_kv(work, inputs, _segments(segments, work))
  return dq[:, :t, :, :h], dk[:, :t, :, :h], dv[:, :t, :, :h]


def _row_terms(
  dout: Array, residuals: AttentionResiduals
) -> tuple[Array, Array]:
  """Returns lse * log2(e) and delta, each f32 [B, N, T]."""
  delta = jnp.einsum(
    "btnh,btnh->bnt",
    residuals.out,
    dout,
    preferred_element_type=jnp.float32,
    precision=jax.lax.Precision.HIGHEST,
  )
  return jnp.swapaxes(residuals.lse, 1, 2) * LOG2_E, delta


def _work(tile: Tile, q, k, segments, kind, interpret, of_queries=True) -> Work:
  _, t, n, h = q.shape
  return Work(
    kind=kind.among(t),
    scale=kind.scale_of(h),
    length=t,
    of_queries=of_queries,
    own=tile.own,
    step=tile.step,
    stages=tile.stages,
    heads=n // k.shape[2],
    head_dim=_padded_size(h),
    has_segments=segments is not None,
    interpret=interpret,
  )


def _padded_size(h: int) -> int:
  """Returns a head's size in the kernels, a multiple of 16."""
  return h + -h % 16


def _padded(x: Array) -> Array:
  """Pads x [B, T, N, H] with zeros; T becomes a multiple of 8, at least 128."""
  _, t, _, h = x.shape
  missing = max(-t % 8, WAVE - t), _padded_size(h) - h
  if missing == (0, 0):
    return x
  return jnp.pad(x, [(0, 0), (0, missing[0]), (0, 0), (0, missing[1])])


def _segments(segments: Array | None, work: Work) -> tuple:
  """Returns padded segment ids and `segment_bounds`; () without segments."""
  if segments is None:
    return ()
  segments = segments.astype(jnp.int32)
  bounds = segment_bounds(segments, work.own, work.step)
  missing = -segments.shape[1] % WAVE
  return jnp.pad(segments, [(0, 0), (0, missing)], mode="edge"), *bounds
