# SPDX-License-Identifier: Apache-2.0
"""Adam states, plain and encoded, for tests of conversions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.optimizer.adam_states import from_adam
from train import step


def moments(like):
  """Returns random Adam moments that span many orders of magnitude."""
  rng = np.random.default_rng(0)

  def draw(leaf):
    spread = np.exp(rng.normal(size=leaf.shape) * 2 - 7)
    return jnp.float32(spread * rng.choice([-1, 1], leaf.shape))

  mu = jax.tree.map(draw, like)
  nu = jax.tree.map(lambda m: jnp.square(m) * 1.5, mu)
  return optax.ScaleByAdamState(jnp.int32(3), mu, nu)


@functools.partial(jax.jit, static_argnames="config")
def encoded(adam, config):
  return from_adam(adam, config.optim.moment_codec(), config.seed)


def assert_same_bytes(tree, other):
  assert jax.tree.structure(tree) == jax.tree.structure(other)
  names = step.leaf_names(tree)
  pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
  for name, (x, y) in zip(names, pairs, strict=True):
    assert x.dtype == y.dtype, name
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name
