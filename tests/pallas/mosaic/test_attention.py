# SPDX-License-Identifier: Apache-2.0
"""Compares Mosaic's attention with a softmax of all scores at once.

The interpreter also checks for data races between warpgroups.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from coat_jax import ops
from coat_jax.ops import AttentionKind, cudnn
from coat_jax.pallas.mosaic import attention
from coat_jax.pallas.mosaic.attention import Tile, Tiles, pick_tiles
from tests.comparing import assert_close, assert_same_bits
from tests.matrices import quick
from tests.ops.naive_attention import exact_attention, naive_attention, seen
from tests.pallas.kernels import (
  lowered_for_h200,
  needs_interpreter,
  refused,
  with_tile,
)

B = 2


def arrays(heads, kv_heads, t, size, dtype=jnp.bfloat16):
  rng = np.random.default_rng(0)
  return [
    jnp.asarray(rng.normal(size=(B, t, n, size)), dtype)
    for n in (heads, kv_heads, kv_heads, heads)
  ]


def segments_of(order, t):
  """Returns ids of packed documents, or ids in any order."""
  if order == "sorted":
    ends = np.array([[7, 40, 64], [31, 33, 95]]) * t // 96
    return np.array([np.searchsorted(x, np.arange(t), "right") for x in ends])
  return np.random.default_rng(1).integers(-2, 3, (B, t))


def run(q, k, v, dout, kind, segments, how):
  forward, backward = how(ops.attention_fwd), how(ops.attention_bwd)
  residuals = forward(q, k, v, segments, kind=kind)
  return residuals, backward(dout, q, k, v, residuals, segments, kind=kind)


@functools.cache
def named(implementation):
  return lambda op: functools.partial(op, implementation=implementation)


@functools.partial(jax.jit, static_argnames="kind")
def oracle(q, k, v, dout, kind, mask):
  """Computes gradients in f32 by autodiff through all scores."""
  scale = kind.scale or q.shape[-1] ** -0.5
  f = functools.partial(
    naive_attention, mask=mask, scale=scale, cap=kind.soft_cap
  )
  (_, lse), vjp = jax.vjp(f, *(x.astype(jnp.float32) for x in (q, k, v)))
  return vjp((dout.astype(jnp.float32), jnp.zeros_like(lse)))


# A program's own tile has 64 or 128 positions, and there are so few stages that
# the program reuses them while it visits tiles.
SHARED = Tiles(Tile(128, 64, 3), Tile(128, 64, 2), Tile(64, 64, 3))
SMALL = Tiles(Tile(128, 64, 3), Tile(128, 64, 2), Tile(128, 64, 3))
LARGE = Tiles(Tile(128, 128, 2), Tile(128, 64, 3), Tile(64, 64, 4))

# (kind, segments, heads, key heads, head size, length, tiles). The first case
# combines all features, and most others test one at a time. A cap of 60 is so
# large that the kernel needs a running maximum.
CASES = [
  (AttentionKind(True, 77, 3.0, 0.5), "sorted", 2, 1, 64, 150, SHARED),
  (AttentionKind(False), None, 1, 1, 64, 203, LARGE),
  (AttentionKind(True, 77, 60.0), "any", 2, 2, 64, 200, LARGE),
  (AttentionKind(), None, 4, 1, 64, 256, SMALL),
  (AttentionKind(), None, 8, 1, 64, 130, LARGE),
  (AttentionKind(soft_cap=3.0), None, 1, 1, 64, 256, SMALL),
  (AttentionKind(window=1), None, 1, 1, 64, 203, SMALL),
  (AttentionKind(window=64), None, 1, 1, 64, 256, SMALL),
  (AttentionKind(window=65), None, 1, 1, 64, 256, LARGE),
  (AttentionKind(window=150), None, 1, 1, 64, 256, SMALL),
  (AttentionKind(scale=0.3), None, 1, 1, 64, 7, SMALL),
  (AttentionKind(), "sorted", 1, 1, 64, 389, SMALL),
  (AttentionKind(False), "any", 1, 1, 64, 203, SMALL),
  (AttentionKind(False, soft_cap=3.0), "sorted", 1, 1, 64, 256, SMALL),
  (AttentionKind(), "sorted", 2, 1, 128, 203, pick_tiles(128)),
  (AttentionKind(window=77), None, 2, 1, 256, 203, pick_tiles(256)),
  (AttentionKind(False), None, 2, 1, 72, 203, pick_tiles(72)),
  (AttentionKind(), "sorted", 1, 1, 96, 203, pick_tiles(96)),
]


@needs_interpreter
@pytest.mark.parametrize(
  "kind, order, heads, kv_heads, size, t, tiles", quick(1, CASES)
)
def test_interpreted_kernels_match_the_softmax(
  kind, order, heads, kv_heads, size, t, tiles, monkeypatch
):
  args = q, k, v, _ = arrays(heads, kv_heads, t, size)
  segments = None if order is None else np.int32(segments_of(order, t))

  def kernel(op):
    inner = with_tile(monkeypatch, op.kernel("mosaic"), "pick_tiles", tiles)
    return functools.partial(inner, interpret=True)

  interpret_pallas_call.reset_gpu_interpret_mode_state()
  residuals, gradients = run(*args, kind, jax.device_put(segments), kernel)
  assert not interpret_pallas_call.get_races().races_found
  assert {x.dtype for x in (residuals.out, *gradients)} == {q.dtype}
  want = oracle(*args, kind, seen(t, t, kind, segments))
  exact = exact_attention(q, k, v, kind, segments)
  # Products of BF16 are exact in f32.
  assert_close(residuals.lse, exact[1], 2e-6)
  # p and out are rounded to BF16, each by up to 2^-9 * max |v|.
  assert_close(residuals.out, exact[0], 2.0**-7)
  # The backward pass also rounds ds, and computes delta from the rounded out.
  # Compare dq, dk and dv together, because with a window of one key, dq and dk
  # contain only rounding errors.
  flat = lambda tree: np.concatenate([np.ravel(x) for x in tree])  # noqa: E731
  assert_close(flat(gradients), flat(want), 2.0**-6)


@needs_interpreter
def test_f16_scores_at_the_cap_do_not_overflow():
  q, k, v, _ = arrays(1, 1, 128, 64, jnp.float16)
  kind = AttentionKind(soft_cap=40.0, scale=4.0)
  # Scores reach 40, and exp(40) overflows in f16.
  found = attention.attention_fwd(9 * q, k, v, kind=kind, interpret=True)
  out, lse = exact_attention(9 * q, k, v, kind)
  assert found.out.dtype == jnp.float16 and np.max(lse) > 39
  assert_close(found.lse, lse, 2e-6)
  assert_close(found.out, out, 2.0**-10)


@pytest.mark.parametrize(
  "batch, t, size, dtype, reason",
  [
    (1, 256, 128, jnp.float32, "in bfloat16 or all in float16, got float32"),
    (1, 256, 84, jnp.bfloat16, "multiples of 8 up to 256, got 84"),
    (1, 0, 64, jnp.bfloat16, "no empty axis"),
    (65536, 8, 64, jnp.bfloat16, "65535 sequences and heads, got 65536 and 2"),
  ],
)
def test_attention_kernels_refuse_unsupported_arguments(
  batch, t, size, dtype, reason
):
  q = jax.ShapeDtypeStruct((batch, t, 2, size), dtype)
  lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
  residuals = ops.AttentionResiduals(q, lse)
  kind = AttentionKind(soft_cap=50.0)
  with refused(f"attention_fwd: .*{reason}"):
    attention.attention_fwd(q, q, q, kind=kind)
  with refused(f"attention_bwd: .*{reason}"):
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
    (AttentionKind(soft_cap=50.0), False, "mosaic"),
    (AttentionKind(window=7), True, "mosaic"),
  ],
)
def test_attention_runs_on_mosaic_if_cudnn_cannot(
  kind, segmented, runs, monkeypatch
):
  monkeypatch.setattr(cudnn.fmha, "check_cudnn_version", lambda: 91000)
  # 100 is not a multiple of a tile.
  q, k, v, dout = arrays(4, 2, 100, 64)
  segments = jnp.zeros((B, 100), jnp.int32) if segmented else None
  residuals = ops.AttentionResiduals(q, jnp.zeros(q.shape[:3]))
  forward = ops.attention_fwd, q, k, v, segments
  backward = ops.attention_bwd, dout, q, k, v, residuals, segments
  for op, *args in (forward, backward):
    said = ops.explain(op, *args, kind=kind)
    assert said == f"{op.name}: {runs} on a GPU, xla elsewhere"

  def f(q, k, v, dout, segments):
    return run(q, k, v, dout, kind, segments, lambda op: op)

  text = lowered_for_h200(f, q, k, v, dout, segments)
  assert ("mosaic_gpu" in text) == (runs == "mosaic")
  assert ("__cudnn$fmha" in text) == (runs == "cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
  "kind, order, heads, size, t",
  [
    (AttentionKind(True, 300, 50.0, 0.07), "sorted", (4, 2), 256, 1024),
    (AttentionKind(soft_cap=50.0), None, (4, 2), 256, 1024),
    # Some rows see nothing of the first tile.
    (AttentionKind(window=300), None, (4, 2), 256, 1024),
    (AttentionKind(), "sorted", (4, 2), 256, 1003),
    (AttentionKind(soft_cap=80.0), "any", (8, 2), 128, 1024),
    (AttentionKind(True, 300, 50.0), "sorted", (8, 1), 128, 1003),
    (AttentionKind(), "sorted", (4, 4), 128, 1024),
    (AttentionKind(), None, (4, 4), 128, 2048),
    (AttentionKind(False), None, (4, 2), 128, 1003),
    (AttentionKind(False, soft_cap=30.0), None, (4, 1), 64, 1000),
    (AttentionKind(True, 100), "any", (8, 1), 64, 1024),
    (AttentionKind(), None, (2, 2), 64, 17),
    (AttentionKind(False), None, (4, 4), 72, 729),
    (AttentionKind(True, 300, 50.0), "sorted", (4, 2), 80, 1003),
    (AttentionKind(), None, (4, 4), 96, 1024),
    (AttentionKind(False), "sorted", (4, 4), 112, 1003),
    (AttentionKind(soft_cap=50.0), None, (4, 2), 192, 1024),
  ],
)
def test_attention_kernels_on_a_gpu_match_definition(
  kind, order, heads, size, t, dtype
):
  q, k, v, dout = arrays(*heads, t, size, dtype)
  segments = None if order is None else jnp.int32(segments_of(order, t))
  f = jax.jit(run, static_argnames=("kind", "how"))
  found, again, want = (
    f(4 * q, k, v, dout, kind, segments, how)
    for how in (named("mosaic"), named("mosaic"), named("xla"))
  )
  assert_same_bits(found, again)
  # Tolerances are as in the interpreted test, except for lse, because here both
  # sides round its sums.
  assert_close(found[0].lse, want[0].lse, 1e-5)
  assert_close(found[0].out, want[0].out, 2.0**-7)
  assert_close(found[1], want[1], 2.0**-6)
