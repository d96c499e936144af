# SPDX-License-Identifier: Apache-2.0
"""Attention by chunks against a softmax that holds every score at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.ops import attention
from tests.comparing import assert_close, jit


def naive(q, k, v, causal):
  """softmax(q k^T / sqrt(H)) v and its log-sum-exp, all scores at once."""
  repeats = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
  scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
  t, s = scores.shape[-2:]
  if causal:
    seen = np.tri(t, s, s - t, dtype=bool)
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
  p = jax.nn.softmax(scores, axis=-1)
  lse = jax.nn.logsumexp(scores, axis=-1)
  return jnp.einsum("bnts,bsnh->btnh", p, v), jnp.moveaxis(lse, 1, 2)


def case(t, s, heads, kv_heads, size=8, batch=2, seed=0):
  rng = np.random.default_rng(seed)
  shapes = [(t, heads), (s, kv_heads), (s, kv_heads), (t, heads)]
  return [
    jnp.float32(rng.normal(size=(batch, length, n, size)))
    for length, n in shapes
  ]


@functools.partial(jit, static_argnames="causal")
def oracle(q, k, v, dout, causal):
  (out, lse), vjp = jax.vjp(lambda *args: naive(*args, causal), q, k, v)
  return (out, lse), vjp((dout, jnp.zeros_like(lse)))


@functools.partial(jit, static_argnames=("causal", "chunk"))
def run(q, k, v, dout, causal, chunk=None):
  del chunk  # Read from the module while tracing: another one, another trace.
  residuals = ops.attention_fwd(q, k, v, causal=causal)
  gradients = ops.attention_bwd(dout, q, k, v, residuals, causal=causal)
  return residuals, gradients


# (T, S, query heads, key heads, chunk): one chunk, several, a ragged last one,
# more keys than queries (a causal offset) and fewer.
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
def test_attention_equals_the_softmax(
  t, s, heads, kv_heads, chunk, causal, monkeypatch
):
  monkeypatch.setattr(attention, "_CHUNK", chunk)
  q, k, v, dout = case(t, s, heads, kv_heads)
  if causal and t > s:  # The first t - s queries see no key: not defined.
    q, dout = q[:, t - s :], dout[:, t - s :]
  residuals, gradients = run(q, k, v, dout, causal, chunk)
  assert residuals.lse.dtype == jnp.float32
  assert_close((residuals, gradients), oracle(q, k, v, dout, causal))


def test_attention_scores_of_several_hundreds_do_not_overflow():
  q, k, v, dout = case(13, 13, 4, 1)
  residuals, gradients = run(300 * q, k, v, dout, True)
  q, k, v = (np.asarray(x, np.float64) for x in (300 * q, k, v))
  scores = np.einsum("btnh,bsh->bnts", q, k[:, :, 0]) / 8**0.5
  assert np.max(scores) > 700
  scores[..., ~np.tri(13, dtype=bool)] = -np.inf
  lse = np.logaddexp.reduce(scores, axis=-1)
  p = np.exp(scores - lse[..., None])
  # An f32 score of 1000 is off by up to 2^-14, and a probability with it.
  want = np.einsum("bnts,bsh->btnh", p, v[:, :, 0]), np.moveaxis(lse, 1, 2)
  assert_close(residuals, want, 2.0**-13)
  assert all(np.all(np.isfinite(x)) for x in gradients)


def test_attention_of_bfloat16_accumulates_in_f32():
  q, k, v, dout = (x.astype(jnp.bfloat16) for x in case(16, 16, 4, 2))
  exact = [x.astype(jnp.float32) for x in (q, k, v, dout)]
  (out, lse), want = oracle(*exact, True)
  residuals, gradients = run(q, k, v, dout, True)
  assert residuals.out.dtype == jnp.bfloat16
  assert residuals.lse.dtype == jnp.float32
  assert all(x.dtype == jnp.bfloat16 for x in gradients)
  assert_close(residuals.lse, lse)  # Scores are exact products, f32 sums.
  # Probabilities and the result are rounded to BF16, 2^-9 each.
  assert_close(residuals.out, out, 2.0**-8)
  # Backward: out, p and ds are rounded too, and out enters delta.
  assert_close(gradients, want, 2.0**-6)


def test_attention_gradients_are_summed_over_chunks_in_f32(monkeypatch):
  arrays = [x.astype(jnp.bfloat16) for x in case(64, 64, 4, 2)]
  (_, one_dk, one_dv), (_, dk, dv) = (
    run_in_chunks(monkeypatch, arrays, chunk) for chunk in (64, 4)
  )
  for whole, summed in ((one_dk, dk), (one_dv, dv)):
    # Sums of f32 in another order round to another BF16 now and then; sums of
    # 16 chunks that are rounded to BF16 on the way, in half of the values.
    assert np.mean(np.asarray(whole == summed)) >= 0.97


def run_in_chunks(monkeypatch, arrays, chunk):
  monkeypatch.setattr(attention, "_CHUNK", chunk)
  return run(*arrays, True, chunk)[1]


def test_attention_makes_no_array_of_all_scores():
  t = 1024
  shape = jax.ShapeDtypeStruct((1, t, 1, 8), jnp.bfloat16)
  text = str(jax.make_jaxpr(lambda *a: run.__wrapped__(*a, True))(*[shape] * 4))
  assert f"{t},{t}" not in text
  assert f"256,{t}" in text


def test_attention_nan_stays_in_its_sequence():
  q, k, v, dout = case(16, 16, 4, 2)
  residuals, gradients = run(q.at[0, 2, 1, 3].set(jnp.nan), k, v, dout, True)
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
def test_attention_shapes_that_do_not_fit_are_refused(q, k, v):
  with pytest.raises(ValueError, match="attention: needs q .* multiple of K"):
    ops.attention_fwd(jnp.ones(q), jnp.ones(k), jnp.ones(v), causal=True)
