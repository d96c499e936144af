# SPDX-License-Identifier: Apache-2.0
"""Tests which random words round moments that come from optax's Adam."""

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
  """Encodes two leaves with the same moments: uint8 [2, 64, 128] each."""
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
  # Nearly all values are between two codes, so with other random words, many
  # are rounded differently.
  assert share_that_differs(first, codes(4, 5)) > 0.1
  assert share_that_differs(first, codes(3, 6)) > 0.1
  assert share_that_differs(first[:2], first[2:]) > 0.1
