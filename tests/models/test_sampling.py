# SPDX-License-Identifier: Apache-2.0
"""Compares sampled tokens and their frequencies with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.models.sampling import choose, kept, make_sampling

V, DRAWS = 24, 20_000
LOGITS = np.random.default_rng(0).normal(0, 2, (3, V)).astype(np.float32)
# Among equal logits, the lower token comes first.
LOGITS[1, [4, 9, 17]] = LOGITS[1].max() + 1
# One token has nearly all of the probability, and some can never be sampled.
LOGITS[2, 7] = 40
LOGITS[2, 11:] = -np.inf

OPTIONS = [
  (1.0, None, None),
  (0.7, None, None),
  (2.5, 5, None),
  (1.0, 2, None),
  (1.0, 1, None),
  (1.0, 1000, None),
  (1.0, None, 0.9),
  (1.3, None, 0.3),
  (1.0, None, 1e-6),
  (1.0, None, 1.0),
  (1.5, 8, 0.8),
]


def distribution(logits, temperature, top_k, top_p):
  """Returns the probability of each token in one row, from the definitions."""
  p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
  p /= p.sum()
  order = sorted(range(V), key=lambda token: (-p[token], token))
  if top_k is not None:
    order = order[:top_k]
  total, nucleus = 0.0, []
  mass = sum(p[token] for token in order)
  for token in order:
    nucleus.append(token)
    total += p[token] / mass
    # With top_p = 1 all tokens are kept, though rounding may make the sum reach
    # 1 before the last token.
    if top_p not in (None, 1) and total >= top_p:
      break
  out = np.zeros(V)
  out[nucleus] = p[nucleus] / p[nucleus].sum()
  return out


@pytest.mark.parametrize("options", OPTIONS)
def test_kept_tokens_and_probabilities_match_numpy(options):
  logits, tokens = kept(jnp.asarray(LOGITS), make_sampling(*options))
  p = np.zeros((3, V))
  np.put_along_axis(p, np.asarray(tokens), jax.nn.softmax(logits, -1), axis=1)
  want = np.stack([distribution(row, *options) for row in LOGITS])
  np.testing.assert_array_equal(p > 0, want > 0)
  np.testing.assert_allclose(p, want, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1e38, 3e38, 1e-37])
@pytest.mark.parametrize("top_k, top_p", [(3, None), (V, 0.2)])
def test_extreme_temperatures_keep_the_largest_logits(
  temperature, top_k, top_p
):
  # At a high temperature, all 24 tokens are equally probable in f32.
  count = top_k if top_p is None else 5  # 4 / 24 < 0.2 < 5 / 24.
  if temperature < 1:
    count = 1  # At a low temperature, one token is certain.
  logits = LOGITS[:1] - LOGITS[0].max()
  sampling = make_sampling(temperature, top_k, top_p)
  found, tokens = kept(jnp.asarray(logits), sampling)
  drawn = np.asarray(tokens)[np.asarray(jax.nn.softmax(found)) > 0]
  want = np.argsort(-logits[0], stable=True)[:count]
  np.testing.assert_array_equal(drawn, want)


@pytest.mark.parametrize(
  "options", [OPTIONS[1], OPTIONS[2], OPTIONS[7], OPTIONS[10]]
)
def test_frequencies_of_tokens_match_their_probabilities(options):
  sampling = make_sampling(*options)
  keys = jax.random.split(jax.random.key(3), (DRAWS, 3))
  draw = jax.jit(jax.vmap(choose, in_axes=(None, None, 0)))
  drawn = np.asarray(draw(jnp.asarray(LOGITS), sampling, keys))
  assert drawn.dtype == np.int32
  for row, logits in zip(drawn.T, LOGITS, strict=True):
    want = distribution(logits, *options)
    frequency = np.bincount(row, minlength=V) / DRAWS
    error = np.sqrt(want * (1 - want) / DRAWS)
    assert np.all(np.abs(frequency - want) <= 4 * error + 1e-12)


def test_each_row_is_sampled_with_a_separate_key():
  logits = jnp.zeros((64, V))
  keys = jax.random.split(jax.random.key(0), 64)
  drawn = choose(logits, make_sampling(1.0, None, None), keys)
  assert len(np.unique(np.asarray(drawn))) > V // 2


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1.2e-38, 1e-30, 1e-4])
def test_low_temperature_is_greedy(temperature):
  sampling = make_sampling(temperature, None, None)
  keys = jax.random.split(jax.random.key(0), 2)
  # Leave out the row whose largest logits are equal.
  got = choose(jnp.asarray(100 * LOGITS[::2]), sampling, keys)
  np.testing.assert_array_equal(got, LOGITS[::2].argmax(-1))
  # Subnormal temperatures count as 0, because devices may flush them to 0.
  is_normal = temperature >= np.finfo(np.float32).tiny
  assert (sampling.temperature is not None) == is_normal


def test_high_temperature_is_uniform_over_kept_tokens():
  sampling = make_sampling(3e38, 5, None)
  logits, _ = kept(jnp.asarray(LOGITS[:2]), sampling)
  np.testing.assert_allclose(
    jax.nn.softmax(logits)[:, :5], np.full((2, 5), 0.2), rtol=1e-6
  )


def test_option_values_change_no_structure_shape_or_dtype():
  one, other = (
    make_sampling(temperature, k, p)
    for temperature, k, p in ((0.5, 3, 0.9), (0.7, 40, 0.5))
  )
  assert jax.tree.structure(one) == jax.tree.structure(other)
  shapes = [
    [(x.shape, x.dtype) for x in jax.tree.leaves(s)] for s in (one, other)
  ]
  assert shapes[0] == shapes[1]
