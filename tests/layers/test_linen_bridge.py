# SPDX-License-Identifier: Apache-2.0
"""Our NNX modules inside a Linen model: the example runs, and saves FP8."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax.formats import E4M3
from examples import linen_bridge


@pytest.mark.slow
def test_the_example_learns():
  first, last = linen_bridge.main(steps=21)
  # ln(16) = 2.77 at first; eight sequences are soon known by heart.
  assert first > 2.5
  assert last < 0.5 * first


def test_parameters_and_residuals_are_those_of_the_modules():
  model = linen_bridge.Decoder()
  tokens = jnp.zeros((2, 19), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  width = linen_bridge.WIDTH
  assert params["mlp_0"]["gate_up"]["kernel"].shape == (width, 2, 96)
  assert params["attention_1"]["qkv"]["norm"]["scale"].shape == (width,)
  kept = jax.eval_shape(
    lambda p, t: jax.tree.leaves(
      jax.vjp(lambda p: model.apply({"params": p}, t), p)[1]
    ),
    params,
    tokens,
  )
  codes = [a.shape for a in kept if a.dtype == E4M3]
  # For each layer two norm inputs, gate and up.
  assert sorted(codes) == sorted(2 * [(2, 19, width)] * 2 + 4 * [(2, 19, 96)])
