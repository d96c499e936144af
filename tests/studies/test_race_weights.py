# SPDX-License-Identifier: Apache-2.0
"""Compares AdamW on rounded weights with a NumPy version."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from studies import race_weights

RATE, B1, B2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-8, 0.1


def take_step(storage):
  rng = np.random.default_rng(0)
  params = {"w": jnp.asarray(rng.normal(size=(32, 128)), jnp.float32)}
  grads = {"w": jnp.asarray(rng.normal(size=(32, 128)), jnp.float32)}
  optimizer = race_weights.adamw(
    lambda count: RATE,
    B1,
    B2,
    EPS,
    weight_decay=DECAY,
    decays=lambda tree: jax.tree.map(lambda _: True, tree),
    storage=storage,
    seed=0,
  )
  updates, state = optimizer.update(grads, optimizer.init(params), params)
  p, g = (np.asarray(x["w"], float) for x in (params, grads))
  # In the first step, the corrected moments are g and g^2.
  exact = p - RATE * DECAY * p - RATE * g / (np.abs(g) + EPS)
  return p + np.asarray(updates["w"], float), exact, g, state.mu["w"]


def test_the_rounding_error_is_fed_into_the_first_moment():
  found, exact, g, mu = take_step("E4M3, fed back")
  amax = np.abs(exact).max(axis=1, keepdims=True)
  codes = (exact / amax * 448).astype(ml_dtypes.float8_e4m3fn)
  rounded = codes.astype(float) * amax / 448
  same = np.isclose(found, rounded, rtol=1e-4, atol=1e-6)
  assert np.mean(same) > 0.99  # The others are at rounding boundaries.
  rate = RATE / (1 - B1) / (np.abs(g) + EPS)
  want = (1 - B1) * g + (1 - 1 / B1) * (exact - rounded) / rate
  np.testing.assert_allclose(mu[same], want[same], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
  "storage, ulp", [("E4M3, stochastic", 2**-3), ("BF16, stochastic", 2**-7)]
)
def test_stochastic_weights_are_right_on_average(storage, ulp):
  found, exact, g, mu = take_step(storage)
  error = (found - exact) / np.abs(exact).max(axis=1, keepdims=True)
  assert 0 < np.abs(error).max() <= ulp
  assert abs(error.mean()) < 4 * error.std() / error.size**0.5
  np.testing.assert_allclose(mu, (1 - B1) * g, rtol=1e-5, atol=1e-9)
