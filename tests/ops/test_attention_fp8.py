# SPDX-License-Identifier: Apache-2.0
"""FP8 attention against NumPy's float64 with codes of ml_dtypes.

NumPy holds all scores and quantizes where cuDNN does; its codes can differ from
ours by one where a value is next to a boundary between two.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.ops import AttentionKind, GradientScales, attention, cudnn
from coat_jax.ops.types import Unsupported
from coat_jax.qtensor import QTensor, quantize
from tests.comparing import assert_close, jit
from tests.matrices import quick
from tests.ops.naive_attention import seen
from tests.pallas.kernels import (
  assert_same_codes,
  for_h200,
  lowered_for_h200,
)

B, T, N, K, H, CHUNK = 2, 21, 4, 2, 8, 4
KINDS = [
  (AttentionKind(), False),
  (AttentionKind(window=7, soft_cap=1.5, scale=0.4), True),
]
SEGMENTS = np.repeat([[0, 1], [3, 3]], [12, T - 12], axis=1).astype(np.int32)


def case():
  """q, k, v and dout as E4M3 with a scale, and scales of gradients."""
  rng = np.random.default_rng(0)
  shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
  arrays = [jnp.float32(rng.normal(size=shape)) for shape in shapes]
  q, k, v, dout = (quantize(x, group_size=None) for x in arrays)
  # dv is clipped, ds and dk have few bits, dq has room.
  sizes = dict(dq=4.0, dk=300.0, dv=1.0, ds=100.0)
  scales = GradientScales(
    **{name: jnp.float32(x / 448) for name, x in sizes.items()}
  )
  return (q, k, v), dout, scales


def e4m3(x, scale=1.0):
  """float64 to the values of codes times a scale."""
  codes = np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
  return codes.astype(np.float64) * scale


def values(x):
  return np.asarray(x.qvalue, np.float64) * float(x.scale)


def oracle(qkv, dout, scales, kind, segments):
  """Output, lse, gradients and their largest magnitudes; out's scale is v's."""
  q, k, v = map(values, qkv)
  k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
  scale = H**-0.5 if kind.scale is None else kind.scale
  scores, slope = np.einsum("btnh,bsnh->bnts", q, k) * scale, scale
  if kind.soft_cap is not None:
    share = np.tanh(scores / kind.soft_cap)
    scores, slope = kind.soft_cap * share, scale * (1 - share**2)
  mask = seen(T, T, kind, segments)[:, None]
  scores = np.where(mask, scores, -np.inf)
  largest = np.max(scores, axis=-1, keepdims=True)
  p = np.exp(scores - largest)
  total = np.sum(p, axis=-1, keepdims=True)
  out = np.einsum("bnts,bsnh->btnh", e4m3(p, 1 / 448), v)
  out = e4m3(out / np.moveaxis(total, 1, 2), float(qkv[2].scale))
  lse = np.moveaxis((largest + np.log(total))[..., 0], 1, 2)
  p, g = p / total, values(dout)
  by_head = lambda x: x.reshape(B, T, K, N // K, H).sum(3)  # noqa: E731
  dv = by_head(np.einsum("bnts,btnh->bsnh", e4m3(p, 1 / 448), g))
  delta = np.moveaxis(np.sum(out * g, axis=-1), 1, 2)[..., None]
  ds = p * (np.einsum("btnh,bsnh->bnts", g, v) - delta) * slope
  ds = np.where(mask, ds, 0)
  ds_q = e4m3(ds, float(scales.ds))
  dq = np.einsum("bnts,bsnh->btnh", ds_q, k)
  dk = by_head(np.einsum("bnts,btnh->bsnh", ds_q, q))
  largest = [np.max(np.abs(x)) for x in (dq, dk, dv, ds)]
  gradients = [
    e4m3(x, float(of)) for x, of in zip((dq, dk, dv), scales[:3], strict=True)
  ]
  return out, lse, gradients, largest


@functools.partial(jit, static_argnames="kind")
def run(qkv, dout, scales, segments, kind):
  residuals = ops.attention_fp8_fwd(*qkv, segments, kind=kind)
  return residuals, ops.attention_fp8_bwd(
    dout, *qkv, residuals, scales, segments, kind=kind
  )


def assert_codes(found, want):
  """Codes of the oracle's values; the scale makes no difference to them."""
  want = np.asarray(want / float(found.scale)).astype(ml_dtypes.float8_e4m3fn)
  # At a boundary f32 may round to the other side.
  assert_same_codes(found.qvalue, want, share=0.99)


@pytest.mark.parametrize("kind, segmented", quick(1, KINDS))
def test_codes_and_magnitudes_are_those_of_numpy(kind, segmented, monkeypatch):
  monkeypatch.setattr(attention, "_CHUNK", CHUNK)
  qkv, dout, scales = case()
  segments = SEGMENTS if segmented else None
  residuals, (gradients, largest) = run(qkv, dout, scales, segments, kind)
  out, lse, want, want_largest = oracle(qkv, dout, scales, kind, segments)
  assert_codes(residuals.out, out)
  assert_close(residuals.lse, lse)
  for found, values_of_codes, scale in zip(
    gradients, want, scales, strict=False
  ):
    assert found.scale == scale
    assert_codes(found, values_of_codes)
  # Where one code of dS is another dq and dk differ by its share.
  assert_close(list(largest), want_largest, 2e-3)
  assert want_largest[2] > 1  # So that dv was clipped.


def test_tiny_gradients_do_not_vanish(monkeypatch):
  monkeypatch.setattr(attention, "_CHUNK", CHUNK)
  # The product of dout's scale and any other is below f32's smallest number.
  factor = 2.0**-113
  qkv, dout, scales = case()
  scales = jax.tree.map(lambda x: x * factor, scales)
  dout = dout._replace(scale=dout.scale * factor)
  _, (gradients, largest) = run(qkv, dout, scales, None, KINDS[0][0])
  _, _, want, want_largest = oracle(qkv, dout, scales, KINDS[0][0], None)
  for found, values_of_codes in zip(gradients, want, strict=True):
    assert_codes(found, values_of_codes)
  assert_close(list(largest), want_largest, 2e-3)


def test_operands_have_one_scale():
  (q, k, v), *_ = case()
  for wrong in (
    QTensor(q.qvalue, q.scale[None]),
    QTensor(q.qvalue.astype(jnp.float8_e5m2), q.scale),
  ):
    with pytest.raises(ValueError, match="E4M3 with one scale per tensor"):
      ops.attention_fp8_fwd(wrong, k, v, kind=AttentionKind())


SCALAR: Any = jax.ShapeDtypeStruct((), jnp.float32)


def specs(t=256, s=None, size=128):
  """q, k, v and dout, without values."""

  def of(length, heads):
    codes: Any = jax.ShapeDtypeStruct(
      (1, length, heads, size), jnp.float8_e4m3fn
    )
    return QTensor(codes, SCALAR)

  q, kv = of(t, 4), of(s or t, 2)
  return q, kv, kv, q


def both(kind, segments=None):
  def f(q, k, v, dout, scales):
    residuals = ops.attention_fp8_fwd(q, k, v, segments, kind=kind)
    return ops.attention_fp8_bwd(
      dout, q, k, v, residuals, scales, segments, kind=kind
    )

  return f


SCALES = GradientScales(*[SCALAR] * 4)


@pytest.mark.parametrize("causal", quick(1, [True, False]))
def test_cudnn_is_called_with_e4m3_and_scales(causal):
  kind = AttentionKind(causal, scale=0.25)
  text = lowered_for_h200(both(kind), *specs(), SCALES)
  calls = [line for line in text.splitlines() if "@__cudnn$" in line]
  names = re.findall(r"@(__cudnn\$\w+)", "\n".join(calls))
  assert names == ["__cudnn$fmhaSoftmaxF8", "__cudnn$fmhaSoftmaxBackwardF8"]
  for line, scalars in zip(calls, (6, 12), strict=True):
    assert "fmha_scale\\22: 0.25" in line
    mask = "CAUSAL" if causal else "NO_MASK"
    assert f"mask_type\\22: \\22{mask}\\22" in line
    operands = line.split(" : (")[1].split("->")[0]
    assert operands.count("tensor<1x1x1x1xf32>") == scalars
    assert operands.count("f8E4M3FN") == (3 if scalars == 6 else 5)


class Call:
  """Takes the place of one of JAX's calls and keeps its arguments."""

  def __init__(self, *results):
    self.results = [jnp.zeros(shape) for shape in results]

  def bind(self, *args, **options):
    self.args, self.options = args, options
    return self.results


def test_scales_are_where_jax_names_them(monkeypatch):
  """Descales multiply codes; scales are what values are multiplied by."""
  one, rows = (1, 1, 1, 1), (1, 4, 128)
  forward = Call((1, 128, 4, 128), one, one, rows)
  backward = Call((), (), (), one, one, one, one)
  name = "_dot_product_attention_fp8_{}_p_wrapper"
  monkeypatch.setattr(cudnn.fmha, name.format("fwd"), forward)
  monkeypatch.setattr(cudnn.fmha, name.format("bwd"), backward)
  codes = jnp.zeros((1, 128, 4, 128), jnp.float8_e4m3fn)
  q, k, v, out, dout = (QTensor(codes, jnp.float32(i)) for i in range(2, 7))
  scales = GradientScales(*map(jnp.float32, (8, 9, 10, 11)))
  kind = AttentionKind(scale=0.25)
  cudnn.attention_fp8_fwd(q, k, v, kind=kind)
  residuals = ops.FP8AttentionResiduals(out, jnp.zeros((1, 128, 4)))
  cudnn.attention_fp8_bwd(dout, q, k, v, residuals, scales, kind=kind)
  want = dict(
    descale_q=2,
    descale_k=3,
    descale_v=4,
    descale_o=5,
    descale_dO=6,
    descale_s=1 / 448,
    scale_s=448,
    scale_o=1 / 4,
    descale_dP=11,
    scale_dP=1 / 11,
    scale_dQ=1 / 8,
    scale_dK=1 / 9,
    scale_dV=1 / 10,
  )
  for call, names in (
    (forward, cudnn.fmha.fp8_params_keys_fwd),
    (backward, cudnn.fmha.fp8_params_keys_bwd),
  ):
    found = [x.item() for x in call.args if x.shape == one]
    assert found == pytest.approx([want[name] for name in names])
    assert call.options["scale"] == 0.25 and call.options["use_causal_mask"]


@pytest.mark.parametrize(
  "options, shapes, reason",
  [
    ({}, {}, None),
    (dict(window=256), {}, None),  # All of the keys.
    (dict(window=7), {}, "no windows in FP8, got window=7"),
    (dict(soft_cap=5.0), {}, "no caps of scores"),
    ({}, dict(size=64), "got heads of 64, 256 queries and 256 keys"),
    ({}, dict(t=200), "got heads of 128, 200 queries and 200 keys"),
    ({}, dict(t=128, s=256), "as many queries as keys, got 128 and 256"),
    (dict(causal=False), dict(t=128, s=256), None),
    ({}, dict(segments=True), "fixed number of segments"),
  ],
)
def test_explain_says_what_runs(options, shapes, reason):
  shapes, kind = dict(shapes), AttentionKind(**options)
  segments = None
  if shapes.pop("segments", False):
    segments = jax.ShapeDtypeStruct((1, 256), jnp.int32)
  q, k, v, dout = specs(**shapes)
  lse: Any = jax.ShapeDtypeStruct(q.qvalue.shape[:3], jnp.float32)
  residuals = ops.FP8AttentionResiduals(q, lse)
  for op, *args in (
    (ops.attention_fp8_fwd, q, k, v, segments),
    (ops.attention_fp8_bwd, dout, q, k, v, residuals, SCALES, segments),
  ):
    said = ops.explain(op, *args, kind=kind)
    if reason is None:
      assert said == f"{op.name}: cudnn on a GPU, xla elsewhere"
    else:
      assert re.fullmatch(rf"{op.name}: xla everywhere .*{reason}.*", said)


def test_a_jax_without_the_private_functions_is_named(monkeypatch):
  monkeypatch.setattr(cudnn, "_MISSING", ["_gone"])
  q, k, v, _ = specs()
  with for_h200(), pytest.raises(Unsupported, match="has no _gone in jax._src"):
    jax.eval_shape(
      lambda *args: ops.attention_fp8_fwd(
        *args, kind=AttentionKind(), implementation="cudnn"
      ),
      q,
      k,
      v,
    )


def test_xla_may_not_partition_the_call():
  """Its magnitudes would be of one device, and said to be of all."""
  mesh = jax.make_mesh((8,), ("data",))
  with jax.set_mesh(mesh):
    said = ops.explain(
      ops.attention_fp8_fwd, *specs()[:3], kind=AttentionKind()
    )
  assert "only inside jax.shard_map" in said
