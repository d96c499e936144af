# SPDX-License-Identifier: Apache-2.0
"""Converts states of optax's Adam to states of `scale_by_coat_adam`."""

import jax

from coat_jax import scale_by_coat_adam
from coat_jax.optimizer import from_plain_state


def from_adam(adam, codec, seed=0):
  """Encodes the moments of an `optax.ScaleByAdamState`."""
  like = jax.eval_shape(scale_by_coat_adam(codec=codec).init, adam.mu)
  return from_plain_state(adam, like, seed=seed)
