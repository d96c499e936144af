# SPDX-License-Identifier: Apache-2.0
"""Muon's momentum of one leaf, stored in a codec, before orthogonalization."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from coat_jax.optimizer import moments
from coat_jax.optimizer.moments import GroupCodecs, Stored


class MuonScalars(NamedTuple):
  """Scalars of a step of Muon, f32 [].

  Attributes:
    beta, one_minus_beta: of the momentum.
    ratio: of the momentum in the direction: 1 over the bias correction, with
      Nesterov beta over the next step's.
    gradient_ratio: Nesterov's of the gradient, or None.
  """

  beta: Array
  one_minus_beta: Array
  ratio: Array
  gradient_ratio: Array | None


def muon_scalars(
  count: ArrayLike, beta: ArrayLike, *, nesterov: bool
) -> MuonScalars:
  """The scalars of step `count`, the first being 1."""
  c = 1 - beta**count  # pyright: ignore[reportOperatorIssue]
  ratio, gradient_ratio = 1 / c, None
  if nesterov:
    ratio = beta / (1 - beta ** optax.safe_increment(count))
    gradient_ratio = jnp.asarray((1 - beta) / c, jnp.float32)

  def f32(x) -> Array:
    return jnp.asarray(x, jnp.float32)

  return MuonScalars(f32(beta), f32(1 - beta), f32(ratio), gradient_ratio)


def muon_momentum(
  g: Array,
  stored: Stored,
  key: Array,
  scalars: MuonScalars,
  *,
  groups: GroupCodecs,
  start: Array | None = None,
  whole: tuple[int, ...] | None = None,
) -> tuple[Array, Stored]:
  """Returns one leaf's matrix to orthogonalize, f32, and its new momentum.

  Args:
    g: [..., n], the gradient.
    stored: the momentum, as it is stored.
    key: from `stochastic.leaf_key`, for the momentum's random words.
    scalars: from `muon_scalars`.
    groups: its codec.
    start, whole: which part of the leaf this is: see `stochastic.random_words`.

  Returns:
    The direction, and the new momentum, stored likewise.
  """
  s = scalars
  (mu,) = moments.decode(groups, stored)
  gradient = moments.in_f32(g)
  mu = s.beta * mu + s.one_minus_beta * gradient
  direction = s.ratio * mu
  if s.gradient_ratio is not None:
    direction = direction + s.gradient_ratio * gradient
  return direction, moments.encode(groups, (mu,), key, start, whole)
