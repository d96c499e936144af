# SPDX-License-Identifier: Apache-2.0
"""Attention whose products read FP8, as cuDNN computes it on Hopper.

All operands are E4M3 codes with one f32 scale per tensor, x ≈ qvalue * scale;
products accumulate in f32, softmax is f32. What cuDNN does in one kernel, step
by step (its codes are of what is in brackets):

  forward   P = exp(scores - largest of the row)       [P / p_scale]
            out = P v / sum of P's row                 [out / out's scale]
  backward  P = exp(scores - lse)                      [P / p_scale]
            dv = P^T dout                              [dv / its scale]
            dS = P (dout v^T - delta) slope            [dS / its scale]
            dq = dS k; dk = dS^T q                     [each / its scale]

P, dS and all results are quantized inside the kernel, so their scales are
arguments. Two are bounds that hold: P is at most 1, and a row of the output is
a mean of rows of v, so no larger than v's largest. Those of the gradients are
found by `layers.attention_scales`; the backward returns the largest magnitudes
of what it quantized, by which one sees whether they were right.

Source: cuDNN's frontend, the graphs of `sdpa_fp8` and `sdpa_fp8_backward`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.formats import E4M3, qmax
from coat_jax.ops.attention import (
  Keys,
  Queries,
  check_attention,
  einsum_f32,
  grouped_heads,
  in_chunks,
  join_chunks,
  masked_scores,
  per_row,
)
from coat_jax.ops.dispatch import op
from coat_jax.ops.types import AttentionKind
from coat_jax.qtensor import QTensor, quantize_with_scale, times_scales

# P is at most 1.
P_SCALE = 1 / qmax(E4M3)


class FP8AttentionResiduals(NamedTuple):
  """What the backward of FP8 attention reads beside q, k and v.

  Attributes:
    out: E4M3 [B, T, N, H] with a scalar scale, v's.
    lse: f32 [B, T, N], log-sum-exp of each query's scores.
  """

  out: QTensor
  lse: Array


class GradientScales(NamedTuple):
  """Of what the backward of FP8 attention quantizes: f32 scalars.

  Scales, or the largest magnitudes that they are made of.

  Attributes:
    dq, dk, dv: the results.
    ds: the gradient of the products q k^T.
  """

  dq: Array
  dk: Array
  dv: Array
  ds: Array


def _check(q, k, v, segments=None, *, kind: AttentionKind) -> None:
  for name, x in (("q", q), ("k", k), ("v", v)):
    if x.qvalue.dtype != E4M3 or x.scale.shape:
      raise ValueError(
        "attention_fp8: q, k and v are E4M3 with one scale per tensor, got "
        f"{name} {x.qvalue.dtype} with scales of shape {x.scale.shape}; "
        "quantize it with group_size=None"
      )
  check_attention(q.qvalue, k.qvalue, v.qvalue, segments, kind=kind)


@op(check=_check, cudnn="cudnn")
def attention_fp8_fwd(
  q: QTensor,
  k: QTensor,
  v: QTensor,
  segments: Array | None = None,
  *,
  kind: AttentionKind,
) -> FP8AttentionResiduals:
  """softmax(scores) v in E4M3 and its log-sum-exp.

  Args:
    q: E4M3 [B, T, N, H], a scalar scale.
    k, v: E4M3 [B, S, K, H], scalar scales.
    segments, kind: as of `attention_fwd`.
  """
  codes, unit = k.qvalue, q.scale * k.scale

  def one_chunk(args):
    q_args, own = args
    queries = Queries.of(q_args, own)
    keys = Keys.of(queries, q.qvalue, codes, kind)
    scores, _ = masked_scores(queries, keys, codes, segments, kind, unit)
    largest = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    p = jnp.exp(scores - largest)
    total = jnp.sum(p, axis=-1)
    out = _product("bkrts,bskh->btkrh", _p_codes(p), keys.read(v.qvalue))
    out = times_scales(out, v.scale, P_SCALE)
    out = out / jnp.moveaxis(total, -1, 1)[..., None]
    return out, largest[..., 0] + jnp.log(total)

  kind = kind.among(codes.shape[1])
  chunks = in_chunks(grouped_heads(q.qvalue, codes.shape[2]))
  out, lse = jax.lax.map(one_chunk, (chunks, in_chunks(segments)))
  t, shape = q.qvalue.shape[1], q.qvalue.shape
  out = join_chunks(out, t).reshape(shape)
  lse = join_chunks(jnp.moveaxis(lse, -1, 2), t)
  return FP8AttentionResiduals(
    _with_scale(out, v.scale), lse.reshape(shape[:3])
  )


@op(cudnn="cudnn")
def attention_fp8_bwd(
  dout: QTensor,
  q: QTensor,
  k: QTensor,
  v: QTensor,
  residuals: FP8AttentionResiduals,
  scales: GradientScales,
  segments: Array | None = None,
  *,
  kind: AttentionKind,
) -> tuple[tuple[QTensor, QTensor, QTensor], GradientScales]:
  """dq, dk, dv in E4M3 with these scales, and their largest magnitudes.

  Values beyond 448 scales are clipped. The magnitudes are of the values before
  they are quantized, so of `ds` they are right whatever the scales are.

  Args:
    dout: E4M3 [B, T, N, H], a scalar scale.
    q, k, v, segments, kind: what `attention_fp8_fwd` had.
    residuals: what it returned.
    scales: of dq, dk, dv and dS.
  """
  kv_heads, t = k.qvalue.shape[2], q.qvalue.shape[1]
  kind = kind.among(k.qvalue.shape[1])
  unit = q.scale * k.scale
  out = residuals.out.qvalue.astype(jnp.float32)
  delta = jnp.sum(out * dout.qvalue.astype(jnp.float32), axis=-1)
  delta = times_scales(delta, residuals.out.scale, dout.scale)

  def one_chunk(carry, args):
    dk, dv, largest = carry
    q_args, (dout_chunk, _), (lse, _), (delta_chunk, _), own = args
    queries = Queries.of(q_args, own)
    keys = Keys.of(queries, q.qvalue, k.qvalue, kind)
    scores, slope = masked_scores(queries, keys, k.qvalue, segments, kind, unit)
    p = jnp.exp(scores - per_row(lse))
    dv = keys.add(dv, _product("bkrts,btkrh->bskh", _p_codes(p), dout_chunk))
    dp = _product("btkrh,bskh->bkrts", dout_chunk, keys.read(v.qvalue))
    dp = times_scales(dp, dout.scale, v.scale)
    ds = p * (dp - per_row(delta_chunk)) * slope
    largest = jnp.maximum(largest, _largest(ds))
    ds = _with_scale(ds, scales.ds).qvalue
    dk = keys.add(dk, _product("bkrts,btkrh->bskh", ds, queries.q))
    dq = _product("bkrts,bskh->btkrh", ds, keys.read(k.qvalue))
    return (dk, dv, largest), dq

  chunks = tuple(
    in_chunks(grouped_heads(x, kv_heads))
    for x in (q.qvalue, dout.qvalue, residuals.lse, delta)
  )
  zeros = jnp.zeros_like(k.qvalue, jnp.float32)
  (dk, dv, largest), dq = jax.lax.scan(
    one_chunk,
    (zeros, zeros, jnp.zeros_like(zeros, shape=())),
    (*chunks, in_chunks(segments)),
  )
  dq = join_chunks(dq, t).reshape(q.qvalue.shape)
  dq = times_scales(dq, scales.ds, k.scale)
  dk = times_scales(dk, scales.ds, q.scale)
  dv = times_scales(dv, P_SCALE, dout.scale)
  results = (
    _with_scale(dq, scales.dq),
    _with_scale(dk, scales.dk),
    _with_scale(dv, scales.dv),
  )
  found = GradientScales(_largest(dq), _largest(dk), _largest(dv), largest)
  return results, found


def _product(formula: str, a: Array, b: Array) -> Array:
  """Of codes; BF16 holds each, and a CPU has no product of FP8."""
  return einsum_f32(formula, a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))


def _p_codes(p: Array) -> Array:
  return _with_scale(p, jnp.float32(P_SCALE)).qvalue


def _with_scale(x: Array, scale: Array) -> QTensor:
  return quantize_with_scale(x, scale, group_size=None, dtype=E4M3)


def _largest(x: Array) -> Array:
  return jnp.max(jnp.abs(x), initial=0)
