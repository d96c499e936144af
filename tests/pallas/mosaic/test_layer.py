# SPDX-License-Identifier: Apache-2.0
"""Tests the optimizer's kernel on one layer of a stacked leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import codecs
from coat_jax.optimizer import adam, weights
from coat_jax.pallas.mosaic import adam as kernel
from tests.matrices import quick
from tests.pallas.mosaic.test_adam import numbers, problem

SHAPE = (3, 8, 128)  # 8 groups per layer.
LAYER = 2
CODEC = codecs.coat()


def by_kernel(p, g, stored, **part):
  args = p, g, stored, *numbers(2, **part)
  return kernel.adamw_step(*args, groups=CODEC.groups, interpret=True)


def by_definition(p, g, stored, **part):
  args = p, g, stored, *numbers(2, **part)
  return adam.adamw_step.definition(*args, groups=CODEC.groups)


def assert_only_that_layer_was_updated(got, whole, before):
  """Checks that one layer is as in `whole`, and the others as in `before`."""
  leaves = zip(*map(jax.tree.leaves, (got, whole, before)), strict=True)
  for x, stepped, old in leaves:
    x, stepped, old = map(np.asarray, (x, stepped, old))
    expected = old.copy()
    expected[LAYER] = stepped[LAYER]
    assert x.dtype == old.dtype and x.tobytes() == expected.tobytes()
    # All powers k may stay the same, because they are multiples of 1/16.
    powers = x.dtype == np.uint8
    assert powers or expected[LAYER].tobytes() != old[LAYER].tobytes()


@pytest.mark.parametrize(
  ("run", "dtype"),
  quick(
    1,
    [
      (by_kernel, "split"),
      (by_definition, "float32"),
      (by_kernel, "bfloat16"),
      (by_definition, "split"),
    ],
  ),
)
def test_one_layer_is_updated_in_place(run, dtype):
  p, g, stored = problem(
    CODEC, jnp.float32 if dtype == "split" else dtype, shape=SHAPE
  )
  p = weights.split(p) if dtype == "split" else p
  whole = run(p, g, stored)
  got = run(p, g[LAYER : LAYER + 1], stored, layer=jnp.int32(LAYER))
  assert_only_that_layer_was_updated(got, whole, (p, stored))


@pytest.mark.slow
def test_layer_of_a_shard_uses_the_random_words_of_its_position():
  p, g, stored = problem(CODEC, jnp.bfloat16, shape=(3, 16, 128))
  whole = by_kernel(p, g, stored)
  half = jax.tree.map(lambda x: x[:, 8:], (p, g, stored))
  p, g, stored = half
  got = by_kernel(
    p,
    g[LAYER : LAYER + 1],
    stored,
    layer=jnp.int32(LAYER),
    start=jnp.array([0, 8, 0], jnp.uint32),
    whole=(3, 16, 128),
  )
  whole = jax.tree.map(lambda x: x[:, 8:], whole)
  assert_only_that_layer_was_updated(got, whole, (p, stored))
