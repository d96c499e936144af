# SPDX-License-Identifier: Apache-2.0
"""Compares the linear INT8 codec with its formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import coat_adamw, codecs
from coat_jax.numerics import stochastic
from coat_jax.optimizer import state_report
from coat_jax.optimizer.serialization import from_integers, to_integers
from tests import cases
from tests.comparing import assert_same_bits

SIZE = 32


def by_formula(x, levels, noise):
  """Returns float64 codes of [rows, SIZE], and magnitudes before rounding."""
  x = x.astype(np.float64)
  y = np.abs(x) / np.abs(x).max(-1, keepdims=True) * levels
  if noise is None:
    level = np.rint(y)
  else:
    level = np.floor(y) + (y - np.floor(y) > noise)
  return np.sign(x) * level, y


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codes_and_decoded_values_match_the_formula(rounding):
  codec = codecs.int8(SIZE, rounding)
  words = stochastic.random_words(stochastic.leaf_key(0, 1, 0), (256, SIZE))
  noise = None
  if rounding == "stochastic":
    noise = stochastic.uniform(words)

  @jax.jit
  def roundtrips(moments):
    found = []
    for group, x in zip(codec.groups, moments, strict=True):
      encoded = group.encode(x, noise)
      found.append((encoded, group.decode(encoded)))
    return found

  moments = cases.moments((256, SIZE))
  found = roundtrips(moments)
  for x, (encoded, decoded), (levels, dtype) in zip(
    moments, found, ((127, jnp.int8), (255, jnp.uint8)), strict=True
  ):
    assert encoded.codes.dtype == dtype
    amax = np.abs(x).max(-1)
    np.testing.assert_array_equal(encoded.amax[:, 0], amax)
    want, y = by_formula(
      x, levels, None if noise is None else np.asarray(noise)
    )
    got = np.asarray(encoded.codes, np.float64)
    # In f32, y is off by at most 2^-23 of 255, which is 2^-15 of a step.
    assert np.mean(got == want) >= 1 - 2**-12 and np.abs(got - want).max() <= 1
    assert np.abs(got).max() == levels
    step = np.float64(amax)[:, None] / levels
    np.testing.assert_allclose(decoded, got * step, rtol=2**-22)
    most = 0.5 if noise is None else 1
    error = np.abs(decoded - np.float64(x))
    assert np.all(error <= step * (most + 2**-14))
    # Rounded to nearest, exactly the values below half a step become zero.
    if noise is None:
      assert np.all((got == 0) == (np.rint(y) == 0)) and np.any(got == 0)


def test_state_can_be_reported_and_stored_as_integers():
  params = {"w": jnp.zeros((16, 256))}
  codec = codecs.int8()
  optimizer = coat_adamw(1e-2, codec=codec)
  grads = {"w": jnp.asarray(cases.moments((16, 256))[0])}
  _, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
  report = state_report(state)["w"]
  assert report["encoded"] and "power" not in report["nu"]
  assert 0.2 < report["mu"]["codes_used"] <= 1
  # Squares span twice as many octaves, so more second moments become zero.
  assert report["nu"]["zeroed"] > report["mu"]["zeroed"] > 0
  assert_same_bits(from_integers(to_integers(state), state), state)
