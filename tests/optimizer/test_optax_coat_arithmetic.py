# SPDX-License-Identifier: Apache-2.0
"""Compares optax_coat.py with optax's Adam, also with extreme gradients.

Also tests its random words and its rounding of bf16 parameters.
"""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import codecs, optax_coat
from coat_jax.numerics import stochastic
from coat_jax.optax_coat import apply_updates, coat_adamw, scale_by_coat_adam


def normal(seed, shape, dtype=jnp.float32):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def everything(path, leaf):
  return leaf.ndim > 0


@pytest.mark.parametrize(
  "hyper",
  [
    {},
    {"b1": 0.95, "b2": 0.95, "eps": 1e-5, "weight_decay": 0.1},
    {"nesterov": True, "eps_root": 1e-6},
    {
      "mask": {"w": True, "bias": False},
      "weight_decay": optax.constant_schedule(0.3),
      "b1": 0.0,
    },
  ],
  ids=["defaults", "hyperparameters", "nesterov", "mask"],
)
def test_float32_codec_matches_optax_adamw(hyper):
  schedule = optax.linear_schedule(1e-2, 1e-3, 20)
  ours = coat_adamw(schedule, codec=codecs.float32(), **hyper)
  theirs = optax.adamw(schedule, **hyper)
  params = {"w": normal(0, (64, 100)), "bias": normal(1, (5,))}
  state, their_state = ours.init(params), theirs.init(params)
  update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
  for step in range(20):
    grads = {"w": 1e-3 * normal(step, (64, 100)), "bias": normal(-step, (5,))}
    updates, state = update(grads, state, params)
    want, their_state = their_update(grads, their_state, params)
    # Only the order of operations differs: ours computes ((1 - b2) * g) * g
    # instead of (1 - b2) * (g * g), and sqrt(v) / sqrt(c) instead of
    # sqrt(v / c). The error of v is at most 1 ulp per step. After 20 steps it
    # is 20 ulps of v, or 10 of its root. Quotients and roots add 4, so rtol is
    # 14 * 2^-23. Terms of m may cancel, so atol is needed. Each step adds an
    # error of half an ulp of the largest term, and later steps multiply this
    # error by b1. The errors sum to 2^-24 / (1 - b1) <= 20 * 2^-24 relative to
    # the largest m.
    check(updates, want, rtol=14 * 2.0**-23, atol=1e-2 * 20 * 2.0**-24)
    params = optax.apply_updates(params, want)
  check(state[0].nu.codes, their_state[0].nu, rtol=20 * 2.0**-23, atol=0)
  check(state[0].mu.codes, their_state[0].mu, rtol=2.0**-23, atol=20 * 2.0**-24)


def check(actual, expected, **tolerance):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, **tolerance), actual, expected
  )


def test_rounding_of_moments_depends_on_seed_step_and_leaf():
  codec = codecs.coat()
  solver = scale_by_coat_adam(codec=codec, seed=7, quantize_mask=everything)
  params = {"a": jnp.zeros(3), "b": jnp.zeros((8, 200))}
  grads = {"a": jnp.ones(3), "b": normal(0, (8, 200))}
  state = solver.init(params)
  for step in (1, 2):
    before = state
    updates, state = solver.update(grads, state)
    g = grads["b"]
    mu = jax.jit(codec.mu.decode)(before.mu.leaves()[1])
    nu = jax.jit(codec.nu.decode)(before.nu.leaves()[1])
    mu, nu = 0.9 * mu + (1 - 0.9) * g, 0.999 * nu + (1 - 0.999) * g * g
    # The update uses the new moments before they are encoded.
    want = mu / (1 - 0.9**step) / (jnp.sqrt(nu / (1 - 0.999**step)) + 1e-8)
    np.testing.assert_allclose(updates["b"], want, rtol=2e-4)
    # "b" is leaf 1. mu uses the leaf's random words, and nu the next words.
    words = stochastic.random_words(stochastic.leaf_key(7, step, 1), (8, 200))
    for x, group, drawn, codes in (
      (mu, codec.mu, words, state.mu.codes["b"]),
      (nu, codec.nu, stochastic.next_words(words), state.nu.codes["b"]),
    ):
      expected = jax.jit(group.encode)(x, stochastic.uniform(drawn)).codes
      got, expected = (np.asarray(y).view(np.uint8) for y in (codes, expected))
      # Eager and compiled arithmetic differ by an ulp. That changes a code only
      # if the noise is within an ulp of the threshold, with a probability of
      # about 1e-5, so 2 of 1600 codes may differ. With other random words, a
      # third would differ.
      assert np.mean(got != expected) <= 2 / 1600


def test_optax_coat_examples_run():
  failed, attempted = doctest.testmod(optax_coat)
  assert attempted and not failed


def test_same_seed_repeats_codes_and_another_seed_changes_them():
  params = jnp.zeros((8, 128))
  grads = normal(0, (8, 128))

  def codes(seed):
    solver = scale_by_coat_adam(seed=seed, quantize_mask=everything)
    state = solver.update(grads, solver.init(params))[1]
    return np.asarray(state.mu.codes).view(np.uint8)

  np.testing.assert_array_equal(codes(0), codes(0))
  assert np.mean(codes(0) != codes(1)) > 0.1


@pytest.mark.parametrize("b2", [0.95, 0.999])
@pytest.mark.parametrize("size", [1e-16, 1e18, 3e19, 7e20, 3e38])
def test_first_update_is_the_sign_of_gradients_of_any_magnitude(b2, size):
  # In optax, g * g overflows if |g| > 1.8e19, and nu / (1 - b2) overflows even
  # earlier.
  params = jnp.zeros((32, 128))
  for codec in (codecs.coat(), codecs.float32()):
    solver = scale_by_coat_adam(b2=b2, eps=0.0, codec=codec)
    grads = size * jnp.sign(normal(0, (32, 128)))
    grads *= jax.random.uniform(jax.random.key(1), (32, 128), minval=0.5)
    updates, state = solver.update(grads, solver.init(params))
    # m / c1 = g and sqrt(v / c2) = |g|, but c1 = 1 - b1 and c2 = 1 - b2 are
    # rounded to f32. The relative error of c2 = 0.001 is 2^-25 / 0.001 = 3e-5.
    np.testing.assert_allclose(updates, np.sign(grads), rtol=1e-4)
    nu = codec.nu.decode(state.nu.leaves()[0])
    assert np.all(np.isfinite(nu)) and np.all(nu > 0)


def test_step_count_stops_at_its_largest_value():
  solver = scale_by_coat_adam(b1=0.9, b2=0.999)
  grads = normal(0, (32, 128))
  _, state = solver.update(grads, solver.init(grads))
  last = np.iinfo(np.int32).max
  state = state._replace(count=jnp.int32(last - 1))
  for nesterov in (False, True):
    solver = scale_by_coat_adam(b1=0.9, b2=0.999, nesterov=nesterov)
    _, near = solver.update(grads, state)
    updates, after = solver.update(grads, near)
    assert near.count == after.count == last
    # At this count, bias correction changes nothing. So after 3 updates, mu is
    # 0.27 * g, nu is 0.003 * g^2, and mu / sqrt(nu) is near 5.
    assert np.all(np.isfinite(updates)) and np.median(np.abs(updates)) > 1


def test_nan_gradient_affects_only_its_group():
  solver = scale_by_coat_adam(quantize_mask=everything)
  grads = normal(0, (4, 256))
  state = solver.init(grads)
  _, state = solver.update(grads.at[1, 3].set(jnp.nan), state)
  updates, _ = solver.update(grads, state)
  bad = np.zeros((4, 256), bool)
  bad[1, :128] = True
  np.testing.assert_array_equal(np.isnan(updates), bad)


def test_small_updates_of_bf16_parameters_do_not_vanish():
  # 1e-3 is less than half of 2^-7, the distance from 1 to the next bf16.
  params = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones(8)}
  update = {"w": jnp.full((64, 64), 1e-3), "b": jnp.full(8, 1e-3)}

  @jax.jit
  def run(params):
    def step(i, pair):
      nearest, ours = pair
      return (
        optax.apply_updates(nearest, update),
        apply_updates(ours, update, step=i),
      )

    return jax.lax.fori_loop(0, 100, step, (params, params))

  nearest, ours = run(params)
  assert np.all(np.asarray(nearest["w"], np.float32) == 1)
  assert ours["w"].dtype == jnp.bfloat16
  # Each of the 100 steps adds 1e-3 on average, with a variance of at most
  # 1e-3 * 2^-7. The bound is five standard deviations of the mean of 4096
  # values.
  mean = np.mean(np.asarray(ours["w"], np.float64))
  assert abs(mean - 1.1) < 5 * np.sqrt(100 * 1e-3 * 2.0**-7 / 4096)
  # f32 parameters are updated as by optax.
  np.testing.assert_array_equal(ours["b"], nearest["b"])


def test_parameters_and_moments_use_independent_words():
  shape = (64, 1024)
  params = jnp.ones(shape, jnp.bfloat16)
  half = jnp.full(shape, 2.0**-8)  # Rounds up with probability 1/2.
  key = stochastic.leaf_key(0, 5, 0)
  words = stochastic.random_words(key, shape)
  up = np.asarray(apply_updates(params, half, step=5), np.float64) > 1
  assert abs(up.mean() - 0.5) < 5 * 0.5 / np.sqrt(up.size)
  for noise in (
    stochastic.uniform(words),
    stochastic.uniform(stochastic.next_words(words)),
  ):
    correlation = np.corrcoef(up.ravel(), np.asarray(noise).ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(up.size)
