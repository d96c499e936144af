# SPDX-License-Identifier: Apache-2.0
"""Tests what determines the random words that round moments of optax's Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from coat_jax import codecs
from tests import cases
from tests.optimizer.adam_states import from_adam

SHAPE = (64, 128)


@jax.jit
def codes(seed, count):
  """Returns codes of mu and nu of leaf a, then of leaf b with equal moments."""
  mu, nu = cases.moments(SHAPE)
  adam = optax.ScaleByAdamState(
    count, {"a": jnp.asarray(mu), "b": jnp.asarray(mu)}, {"a": nu, "b": nu}
  )
  state = from_adam(adam, codecs.coat(), seed)
  trees = state.mu.codes, state.nu.codes
  return [
    jax.lax.bitcast_convert_type(tree[leaf], jnp.uint8)
    for leaf in ("a", "b")
    for tree in trees
  ]


def share_that_differs(xs, ys):
  return min(np.mean(x != y) for x, y in zip(xs, ys, strict=True))


def test_random_words_depend_on_seed_count_and_leaf():
  first = codes(3, 5)
  assert share_that_differs(first, codes(3, 5)) == 0
  # Nearly all values are between two codes, so other random words round many
  # of them differently.
  assert share_that_differs(first, codes(4, 5)) > 0.1
  assert share_that_differs(first, codes(3, 6)) > 0.1
  assert share_that_differs(first[:2], first[2:]) > 0.1
