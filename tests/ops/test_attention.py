# SPDX-License-Identifier: Apache-2.0
"""Compares chunked attention with a softmax over all scores at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.ops import AttentionKind, attention
from tests.comparing import assert_close, assert_same_bits, jit
from tests.matrices import pairwise, quick
from tests.ops.naive_attention import exact_attention, naive_attention, seen

CAUSAL = AttentionKind()


def case(t, s, heads, kv_heads, size=8, batch=2, seed=0):
  rng = np.random.default_rng(seed)
  shapes = [(t, heads), (s, kv_heads), (s, kv_heads), (t, heads)]
  return [
    jnp.float32(rng.normal(size=(batch, length, n, size)))
    for length, n in shapes
  ]


def segments_of(t):
  """Returns two rows of ids: three documents, and interleaved segments."""
  documents = np.searchsorted([t // 4, t // 3], np.arange(t), side="right")
  return np.array([documents, np.arange(t) // 2 % 3 - 1], np.int32)


@functools.partial(jit, static_argnames="cap")
def plain(q, k, v, dout, mask, scale, cap):
  """Computes output, log-sum-exp and gradients from all scores at once."""
  f = functools.partial(naive_attention, mask=mask, scale=scale, cap=cap)
  (out, lse), vjp = jax.vjp(f, q, k, v)
  return (out, lse), vjp((dout, jnp.zeros_like(lse)))


def oracle(q, k, v, dout, kind, segments=None):
  mask = seen(q.shape[1], k.shape[1], kind, segments)
  scale = kind.scale or q.shape[-1] ** -0.5
  return plain(q, k, v, dout, mask, scale, kind.soft_cap)


@functools.partial(jit, static_argnames=("kind", "chunk"))
def run(q, k, v, dout, kind=CAUSAL, segments=None, chunk=None):
  del chunk  # Only forces a new trace: `chunk` is read from the module.
  residuals = ops.attention_fwd(q, k, v, segments, kind=kind)
  gradients = ops.attention_bwd(dout, q, k, v, residuals, segments, kind=kind)
  return residuals, gradients


# (T, S, query heads, key heads, chunk): one chunk, several chunks, a short last
# chunk, more keys than queries (a causal offset), and fewer keys than queries.
CASES = [
  (16, 16, 4, 2, 4),
  (13, 13, 4, 1, 256),
  (13, 13, 4, 1, 5),
  (7, 19, 2, 1, 3),
  (1, 9, 3, 3, 4),
  (12, 5, 2, 2, 5),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("t, s, heads, kv_heads, chunk", CASES)
def test_chunked_attention_matches_the_softmax(
  t, s, heads, kv_heads, chunk, causal, monkeypatch
):
  monkeypatch.setattr(attention, "_CHUNK", chunk)
  q, k, v, dout = case(t, s, heads, kv_heads)
  if causal and t > s:  # Drop the first t - s queries, which see no keys.
    q, dout = q[:, t - s :], dout[:, t - s :]
  kind = AttentionKind(causal)
  residuals, gradients = run(q, k, v, dout, kind, chunk=chunk)
  assert residuals.lse.dtype == jnp.float32
  assert_close((residuals, gradients), oracle(q, k, v, dout, kind))


def assert_gradients_close(actual, expected):
  """Compares relative to the largest gradient, because dq and dk may be 0."""
  flat = lambda tree: np.concatenate([np.ravel(x) for x in tree])  # noqa: E731
  assert_close(flat(actual), flat(expected))


def kinds():
  """Returns cases (kind, has segments, heads, key heads).

  The cases contain each pair of values, where a soft cap and a scale count as
  one value. The first case has all options.
  """
  masks = [(True, w) for w in (7, None, 1, 22)] + [(False, None)]
  every = pairwise(
    [(4, 2), (3, 3), (4, 1)], [(1.5, 0.4), (None, None)], (True, False), masks
  )
  return [
    (AttentionKind(causal, window, *scores), segmented, *heads)
    for heads, scores, segmented, (causal, window) in every
  ]


# With a window of 7, chunks of 4 queries read 11 of 21 keys. The last chunk is
# short.
T, CHUNK = 21, 4


@pytest.mark.parametrize("kind, segmented, heads, kv_heads", quick(6, kinds()))
def test_attention_of_every_kind_matches_the_softmax(
  kind, segmented, heads, kv_heads, monkeypatch
):
  monkeypatch.setattr(attention, "_CHUNK", CHUNK)
  q, k, v, dout = case(T, T, heads, kv_heads)
  segments = segments_of(T) if segmented else None
  residuals, gradients = run(q, k, v, dout, kind, segments, CHUNK)
  assert_close(residuals, exact_attention(q, k, v, kind, segments), 2e-6)
  _, want = oracle(q, k, v, dout, kind, segments)
  assert_gradients_close(gradients, want)


# Near both ends of the keys, a chunk has fewer keys to read.
@pytest.mark.parametrize(
  "t, s, chunk, window",
  quick(
    3,
    [
      (7, 19, 3, 4),
      (1, 19, 4, 9),
      (19, 19, 5, 14),
      *pairwise([7, 19], [19], [3, 5], [1, 2, 3, 9, 15, 18, 19]),
    ],
  ),
)
def test_windows_at_both_ends_of_the_keys_match_the_softmax(
  t, s, chunk, window, monkeypatch
):
  monkeypatch.setattr(attention, "_CHUNK", chunk)
  q, k, v, dout = case(t, s, 2, 1)
  kind = AttentionKind(window=window)
  residuals, gradients = run(q, k, v, dout, kind, chunk=chunk)
  want, want_gradients = oracle(q, k, v, dout, kind)
  assert_close(residuals, want)
  assert_gradients_close(gradients, want_gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
  "kind",
  [
    AttentionKind(window=300),
    AttentionKind(window=300, soft_cap=2.0, scale=0.3),
    AttentionKind(soft_cap=2.0),
    AttentionKind(causal=False),
  ],
)
def test_attention_in_default_chunks_matches_the_softmax(kind):
  t = 700
  q, k, v, dout = case(t, t, 4, 2)
  segments = segments_of(t)
  residuals, gradients = run(q, k, v, dout, kind, segments)
  assert_close(residuals, exact_attention(q, k, v, kind, segments), 2e-6)
  _, want = oracle(q, k, v, dout, kind, segments)
  assert_gradients_close(gradients, want)


def test_attention_scores_of_several_hundreds_do_not_overflow():
  q, k, v, dout = case(13, 13, 4, 1)
  residuals, gradients = run(300 * q, k, v, dout)
  scores = np.einsum("btnh,bsh->bnts", 300 * q, k[:, :, 0]) / 8**0.5
  assert np.max(scores) > 700
  # An f32 score of 1000 is off by up to 2^-14, so its probability is off by a
  # factor of up to 1 + 2^-14.
  want = exact_attention(300 * q, k, v, CAUSAL)
  assert_close(residuals, want, 2.0**-13)
  assert all(np.all(np.isfinite(x)) for x in gradients)


def test_gradients_of_large_capped_scores_are_finite_and_mostly_zero():
  q, k, v, dout = case(13, 13, 4, 1)
  kind = AttentionKind(soft_cap=1.0)
  residuals, (dq, dk, dv) = run(1e4 * q, k, v, dout, kind)
  # Except for a few scores near 0, scores are at the cap, where the derivative
  # of tanh is 0. Keys that a query does not see must not make gradients NaN.
  assert np.mean(np.asarray(dq) == 0) > 0.5
  assert np.all(np.isfinite(dq)) and np.all(np.isfinite(dk))
  want = exact_attention(1e4 * q, k, v, kind)
  assert_close(residuals, want, 1e-3)
  assert np.all(np.isfinite(dv))


def test_attention_of_bfloat16_accumulates_in_f32():
  q, k, v, dout = (x.astype(jnp.bfloat16) for x in case(16, 16, 4, 2))
  exact = [x.astype(jnp.float32) for x in (q, k, v, dout)]
  (out, lse), want = oracle(*exact, CAUSAL)
  residuals, gradients = run(q, k, v, dout)
  assert residuals.out.dtype == jnp.bfloat16
  assert residuals.lse.dtype == jnp.float32
  assert all(x.dtype == jnp.bfloat16 for x in gradients)
  assert_close(residuals.lse, lse)  # Scores are f32 sums of exact products.
  # Probabilities and the output are rounded to BF16, by 2^-9 each.
  assert_close(residuals.out, out, 2.0**-8)
  # The backward pass also rounds p and ds, and computes delta from the rounded
  # output.
  assert_close(gradients, want, 2.0**-6)


# With a window, each chunk updates the sums of only a few keys.
@pytest.mark.parametrize("window", [None, 24])
def test_attention_gradients_are_summed_over_chunks_in_f32(window, monkeypatch):
  arrays = [x.astype(jnp.bfloat16) for x in case(64, 64, 4, 2)]
  kind = AttentionKind(window=window)
  (_, one_dk, one_dv), (_, dk, dv) = (
    run_in_chunks(monkeypatch, arrays, kind, chunk) for chunk in (64, 4)
  )
  for whole, summed in ((one_dk, dk), (one_dv, dv)):
    # f32 sums in a different order seldom round to a different BF16 value. If
    # the 16 chunks were summed in BF16, half of the values would differ.
    assert np.mean(np.asarray(whole == summed)) >= 0.97


def run_in_chunks(monkeypatch, arrays, kind, chunk):
  monkeypatch.setattr(attention, "_CHUNK", chunk)
  return run(*arrays, kind, chunk=chunk)[1]


@pytest.mark.parametrize(
  "kind, length",
  [
    (AttentionKind(), 1024),
    (AttentionKind(soft_cap=2.0), 1024),
    (AttentionKind(window=128), 384),
    (AttentionKind(window=128, soft_cap=2.0), 384),
    (AttentionKind(window=768), 1024),
  ],
)
@pytest.mark.parametrize("segmented", [True, False])
def test_attention_makes_no_array_of_all_scores(kind, length, segmented):
  t = 1024
  shape = jax.ShapeDtypeStruct((1, t, 1, 8), jnp.bfloat16)
  segments = jax.ShapeDtypeStruct((1, t), jnp.int32) if segmented else None
  f = lambda segments, *a: run.__wrapped__(*a, kind, segments)  # noqa: E731
  text = str(jax.make_jaxpr(f)(segments, *[shape] * 4))
  assert f"{t},{t}" not in text
  assert f"256,{length}]" in text
  # A chunk reads only keys that are in the window of one of its queries.
  assert (f"256,{t}]" in text) == (length == t)


def test_window_that_covers_all_keys_is_ignored():
  arrays = [jax.ShapeDtypeStruct((1, 32, 1, 8), jnp.float32)] * 4

  def program(window):
    kind = AttentionKind(window=window)
    f = lambda *arrays: run.__wrapped__(*arrays, kind)  # noqa: E731
    return str(jax.make_jaxpr(f)(*arrays))

  assert program(32) == program(None) == program(100)
  assert program(31) != program(None)


def test_attention_nan_stays_in_its_sequence():
  q, k, v, dout = case(16, 16, 4, 2)
  residuals, gradients = run(q.at[0, 2, 1, 3].set(jnp.nan), k, v, dout)
  for x in (*residuals, *gradients):
    assert np.isnan(x[0]).any() and np.isfinite(x[1]).all()


@pytest.mark.parametrize(
  "q, k, v",
  [
    ((2, 4, 3, 8), (2, 4, 2, 8), (2, 4, 2, 8)),
    ((2, 4, 2, 8), (2, 4, 2, 4), (2, 4, 2, 4)),
    ((2, 4, 2, 8), (3, 4, 2, 8), (3, 4, 2, 8)),
    ((2, 4, 2, 8), (2, 4, 2, 8), (2, 5, 2, 8)),
    ((4, 2, 8), (4, 2, 8), (4, 2, 8)),
  ],
)
def test_inconsistent_attention_shapes_are_refused(q, k, v):
  with pytest.raises(ValueError, match="attention: needs q .* multiple of K"):
    ops.attention_fwd(jnp.ones(q), jnp.ones(k), jnp.ones(v), kind=CAUSAL)


@pytest.mark.parametrize(
  "t, s, causal", [(5, 4, True), (1, 0, True), (1, 0, False)]
)
def test_queries_without_keys_are_refused(t, s, causal):
  q, k, v, _ = case(t, s, 2, 2)
  with pytest.raises(ValueError, match=f"each query sees one, got {s}"):
    ops.attention_fwd(q, k, v, kind=AttentionKind(causal))


@pytest.mark.parametrize("s, causal", [(0, True), (5, False)])
def test_gradients_without_queries_are_zero(s, causal):
  q, k, v, dout = case(0, s, 4, 2)
  residuals, (dq, dk, dv) = run(q, k, v, dout, AttentionKind(causal))
  assert (residuals.out.shape, residuals.lse.shape) == (q.shape, q.shape[:3])
  assert_same_bits((dq, dk, dv), tuple(map(jnp.zeros_like, (q, k, v))))


@pytest.mark.parametrize(
  "s, segments",
  [
    (4, jnp.zeros((2, 5), jnp.int32)),
    (4, jnp.zeros((4,), jnp.int32)),
    (4, jnp.zeros((2, 4))),
    (6, jnp.zeros((2, 4), jnp.int32)),
  ],
)
def test_invalid_segments_are_refused(s, segments):
  q, k, v, _ = case(4, s, 2, 2)
  with pytest.raises(ValueError, match="segments must be integers .B, T.*got"):
    ops.attention_fwd(q, k, v, segments, kind=CAUSAL)


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(window=0), "window must be at least 1, got 0"),
    (dict(window=-3), "window must be at least 1, got -3"),
    (dict(causal=False, window=4), "needs causal=True, got window=4"),
    (dict(soft_cap=0.0), "soft_cap must be above 0 and finite, got 0.0"),
    (dict(soft_cap=float("inf")), "soft_cap must be above 0 and finite"),
    (dict(scale=-1.0), "scale must be above 0 and finite, got -1.0"),
    (dict(scale=float("nan")), "scale must be above 0 and finite, got nan"),
  ],
)
def test_invalid_attention_kinds_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    AttentionKind(**options)
