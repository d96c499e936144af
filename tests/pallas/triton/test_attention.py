# SPDX-License-Identifier: Apache-2.0
"""Compares Triton's attention with a softmax of all scores at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.ops import AttentionKind, cudnn
from coat_jax.pallas.triton import attention
from tests.comparing import assert_close, assert_same_bits, jit
from tests.matrices import quick
from tests.ops.naive_attention import exact_attention, seen
from tests.pallas.attention import B, T, arrays, named, oracle, run, segments_of
from tests.pallas.kernels import lowered_for_h200, refused, with_tile

# Three tiles of queries and six of keys, and the reverse.
WIDE = attention.Tile(queries=32, keys=16, warps=1, stages=1)
TALL = attention.Tile(queries=16, keys=32, warps=1, stages=1)


# (kind, segments, heads, key heads): all there is together first, then one by
# one. A cap of 60 has a running maximum.
CASES = [
  (AttentionKind(True, 37, 3.0, 0.5), "sorted", 4, 2),
  (AttentionKind(True, 37, 60.0), None, 2, 2),
  (AttentionKind(), None, 3, 1),
  (AttentionKind(soft_cap=3.0), None, 2, 1),
  (AttentionKind(window=1), None, 2, 1),
  (AttentionKind(window=15), None, 2, 1),
  (AttentionKind(window=16), None, 2, 1),
  (AttentionKind(window=63), None, 2, 1),
  (AttentionKind(window=80), None, 2, 1),
  (AttentionKind(scale=0.3), None, 2, 1),
  (AttentionKind(), "sorted", 2, 1),
  (AttentionKind(), "any", 2, 1),
  (AttentionKind(False), None, 2, 1),
  (AttentionKind(False, soft_cap=3.0), "any", 2, 1),
  (AttentionKind(False), "sorted", 2, 1),
]


@pytest.mark.parametrize("kind, order, heads, kv_heads", quick(1, CASES))
def test_attention_kernels_match_the_softmax(
  kind, order, heads, kv_heads, monkeypatch
):
  dv = WIDE if kv_heads == 2 else None  # A kernel of its own.
  picked = attention.Tiles(WIDE, WIDE, TALL, dv)
  args = q, k, v, _ = arrays(heads, kv_heads)
  segments = None if order is None else np.int32(segments_of(order))
  mask = seen(T, T, kind, segments)

  def kernel(op):
    run = with_tile(monkeypatch, op.kernel("triton"), "pick_tiles", picked)
    return functools.partial(run, interpret=True)

  def both(q, k, v, dout, segments, mask):
    found = run(q, k, v, dout, kind, segments, kernel)
    return found, oracle(q, k, v, dout, kind, mask)

  (residuals, gradients), want = jit(both)(*args, segments, mask)
  assert residuals.out.dtype == jnp.bfloat16
  assert [x.dtype for x in gradients] == [jnp.bfloat16] * 3
  exact = exact_attention(q, k, v, kind, segments)
  # Products of BF16 are exact in f32.
  assert_close(residuals.lse, exact[1], 2e-6)
  # p and out are rounded to BF16, 2^-9 each: of sums of up to |v|.
  assert_close(residuals.out, exact[0], 2.0**-7)
  # In the backward p and ds, and with out delta. Of all three: a window of one
  # key leaves rounding errors alone in dq and dk.
  flat = lambda tree: np.concatenate([np.ravel(x) for x in tree])  # noqa: E731
  assert_close(flat(gradients), flat(want), 2.0**-6)


@pytest.mark.parametrize(
  "t, size, dtype, reason",
  [
    (2048, 128, jnp.float32, "reads bfloat16, got float32"),
    (2048, 80, jnp.bfloat16, r"heads of .64, 128, 256., got 80"),
    (2000, 64, jnp.bfloat16, "multiple of 128, got 2000"),
  ],
)
def test_attention_kernels_say_what_they_cannot_take(t, size, dtype, reason):
  q = jnp.zeros((1, t, 2, size), dtype)
  residuals = ops.AttentionResiduals(q, jnp.zeros(q.shape[:3]))
  kind = AttentionKind(soft_cap=50.0)
  with refused(f"attention_fwd: the Triton kernel .*{reason}"):
    attention.attention_fwd(q, q, q, kind=kind)
  with refused(f"attention_bwd: the Triton kernel .*{reason}"):
    attention.attention_bwd(q, q, q, q, residuals, kind=kind)
  said = ops.explain(ops.attention_fwd, q, q, q, kind=kind)
  assert "xla everywhere" in said and "cannot cap scores" in said


def test_attention_kernels_need_as_many_queries_as_keys():
  q, k = (jnp.zeros((1, t, 2, 64), jnp.bfloat16) for t in (128, 256))
  with refused("as many queries as keys, got 128 and 256"):
    attention.attention_fwd(q, k, k, kind=AttentionKind())


@pytest.mark.parametrize(
  "kind, segmented, runs",
  [
    (AttentionKind(), False, "cudnn"),
    (AttentionKind(window=7, scale=0.25), False, "cudnn"),
    (AttentionKind(soft_cap=50.0), False, "triton"),
    (AttentionKind(window=7), True, "triton"),
  ],
)
def test_attention_is_a_kernel_where_cudnn_cannot(
  kind, segmented, runs, monkeypatch
):
  monkeypatch.setattr(cudnn.fmha, "check_cudnn_version", lambda: 91000)
  q, k, v, dout = arrays(4, 2, 128)
  segments = jnp.zeros((B, 128), jnp.int32) if segmented else None
  residuals = ops.AttentionResiduals(q, jnp.zeros(q.shape[:3]))
  forward = ops.attention_fwd, q, k, v, segments
  backward = ops.attention_bwd, dout, q, k, v, residuals, segments
  for op, *args in (forward, backward):
    said = ops.explain(op, *args, kind=kind)
    assert said == f"{op.name}: {runs} on a GPU, xla elsewhere"

  def f(q, k, v, dout, segments):
    return run(q, k, v, dout, kind, segments, lambda op: op)

  text = lowered_for_h200(f, q, k, v, dout, segments)
  assert ("__gpu$xla.gpu.triton" in text) == (runs == "triton")
  assert ("__cudnn$fmha" in text) == (runs == "cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize(
  "kind, order, heads, size",
  [
    (AttentionKind(True, 300, 50.0, 0.07), "sorted", (4, 2), 256),
    (AttentionKind(soft_cap=50.0), None, (4, 2), 256),
    # Rows that see nothing of the first tile.
    (AttentionKind(window=300), None, (4, 2), 256),
    (AttentionKind(), "sorted", (4, 2), 256),
    (AttentionKind(soft_cap=80.0), "any", (8, 2), 128),
    (AttentionKind(), "sorted", (4, 4), 128),
    (AttentionKind(False, soft_cap=30.0), None, (4, 1), 64),
  ],
)
def test_attention_kernels_on_a_gpu_match_definition(kind, order, heads, size):
  t = 1024
  q, k, v, dout = arrays(heads[0], heads[1], t, size)
  segments = None if order is None else jnp.int32(segments_of(order, t))
  f = jax.jit(run, static_argnames=("kind", "how"))
  found, again, want = (
    f(4 * q, k, v, dout, kind, segments, how)
    for how in (named("triton"), named("triton"), named("xla"))
  )
  assert_same_bits(found, again)
  # As in the interpreter; sums of both sides are rounded here.
  assert_close(found[0].lse, want[0].lse, 1e-5)
  assert_close(found[0].out, want[0].out, 2.0**-7)
  assert_close(found[1], want[1], 2.0**-6)
