# SPDX-License-Identifier: Apache-2.0
"""Tests that each step rounds with different random words.

Two steps that differ only in their count must round different values up. Lion's
momentum and update do not depend on the count, so nothing else can differ.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import apply_updates, codecs, encoded, scale_by_coat_lion
from coat_jax.optimizer import fused_coat_lion

OPTIONS = dict(codec=codecs.coat(16), quantize_mask=lambda *_: True)
GRADS = {
  "w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 64)), "float32")
}
PARAMS = {"w": jnp.ones((8, 64), "bfloat16")}


def transformation(count):
  solver = scale_by_coat_lion(**OPTIONS)
  state = solver.init(PARAMS)._replace(count=count)
  return solver.update(GRADS, state)[1].mu.codes["w"].view("uint8")


def any_optimizer(count):
  solver = encoded(optax.scale_by_lion(), **OPTIONS)
  state = solver.init(GRADS)._replace(count=count)
  return solver.update(GRADS, state)[1].inner.mu.codes["w"].view("uint8")


def fused(count):
  solver = fused_coat_lion(1e-3, **OPTIONS)
  state = solver.init(PARAMS)._replace(count=count)
  return solver.apply(GRADS, state, PARAMS)[1].mu.codes["w"].view("uint8")


def fused_weights(count):
  solver = fused_coat_lion(1e-3, **OPTIONS)
  state = solver.init(PARAMS)._replace(count=count)
  return solver.apply(GRADS, state, PARAMS)[0]["w"]


def updates_applied(count):
  return apply_updates(PARAMS, {"w": 1e-3 * GRADS["w"]}, step=count)["w"]


@pytest.mark.parametrize(
  "step", [transformation, any_optimizer, fused, fused_weights, updates_applied]
)
def test_steps_round_with_different_words(step):
  step = jax.jit(step)
  first, again, second = (
    np.asarray(step(jnp.int32(count)), "float32") for count in (3, 3, 4)
  )
  np.testing.assert_array_equal(first, again)
  # At least a tenth of the values differ. Values close to a code do not.
  assert 0.1 < np.mean(first != second) < 0.9
