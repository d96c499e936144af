# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding of bf16 weights in programs that call optax.

A trainer that calls `optax.apply_updates` rounds bf16 weights to nearest, and
loses every update below 1/512 of its weight. `stochastic_rounding`, the last
transformation of a chain, rounds the new weights itself, and returns updates
that the trainer can add without rounding.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from coat_jax.numerics import stochastic
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.optimizer import weights
from coat_jax.optimizer.arguments import check_hyperparameters
from coat_jax.optimizer.weights import SplitWeight


class StochasticRoundingState(NamedTuple):
  """State of `stochastic_rounding`.

  Attributes:
    count: int32 [], number of updates so far.
    low: the low bytes of weights of 24 bits, as `split_weights` returns them;
      an empty tuple without `low_bits`.
  """

  count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
  low: Any


def stochastic_rounding(
  seed: ArrayLike = 0, *, low_bits: bool = False
) -> optax.GradientTransformationExtraArgs:
  """Changes updates so that `optax.apply_updates` rounds bf16 stochastically.

  Put it last in a chain. For a bf16 weight p and its update d it returns
  round(p + d) - p in f32, where round is stochastic, so that the expected new
  weight is p + d. `optax.apply_updates` then gives round(p + d) exactly if it
  is within a factor of 2^16 of p. Updates of weights of other dtypes stay as
  they are. With the same seed and step, `coat_jax.apply_updates` returns the
  same weights, bit for bit. `optax.apply_if_finite` requires updates of the
  gradients' dtype, so wrap only the optimizer in it, not the whole chain.

  Args:
    seed: seed of the random words.
    low_bits: store 8 more bits of each bf16 weight in the state, so that
      weights have 24 bits: see `split_weights`. Parameters of other dtypes get
      no extra bits.

  Returns:
    An `optax.GradientTransformationExtraArgs`; its `update` needs `params`.

  Raises:
    TypeError: `seed` is not a whole number.
    ValueError: `update` is called without `params`.

  Examples:
    >>> import jax.numpy as jnp, optax
    >>> from coat_jax import coat_adamw
    >>> from coat_jax.optimizer import stochastic_rounding
    >>> optimizer = optax.chain(coat_adamw(1e-4), stochastic_rounding())
    >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
    >>> state, start = optimizer.init(params), params
    >>> for _ in range(10):
    ...   updates, state = optimizer.update(start, state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> print(f"{params['w'].astype('float32').mean():.4f}")
    0.9990
  """
  op = "stochastic_rounding"
  check_hyperparameters(op, seed=seed)

  def init_fn(params: optax.Params) -> StochasticRoundingState:
    low = weights.split_weights(params)[1] if low_bits else ()
    return StochasticRoundingState(jnp.zeros([], jnp.int32), low)

  def update_fn(updates, state, params=None, **extra_args):
    del extra_args
    if params is None:
      raise ValueError(
        f"{op}: update needs the parameters, got params=None; pass "
        "update(updates, state, params)"
      )
    count = optax.safe_increment(state.count)
    leaves, treedef = jax.tree.flatten(params)
    old = weights.pair_weights(op, params, state.low) if low_bits else leaves
    changes = treedef.flatten_up_to(updates)
    new, rounded = [], []
    for i, (weight, change) in enumerate(zip(old, changes, strict=True)):
      key = stochastic.leaf_key(seed, count, i)
      one = _rounded(weight, change, LeafPart(key))
      new.append(one)
      rounded.append(_difference(one, weight, change))
    low = weights.unpair_weights(new, state.low)[1] if low_bits else ()
    state = StochasticRoundingState(jnp.asarray(count), low)
    return treedef.unflatten(rounded), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_bfloat16(weight: weights.Weight) -> bool:
  return isinstance(weight, SplitWeight) or weight.dtype == jnp.bfloat16


def _rounded(weight: weights.Weight, change: Any, part: LeafPart):
  """Returns the weight after its update, in the same kind of storage."""
  if change is None or not _is_bfloat16(weight):
    return weight
  total = weights.in_f32(weight) + change.astype(jnp.float32)
  return weights.round_like(weight, total, part)


def _difference(new: weights.Weight, old: weights.Weight, change: Any) -> Any:
  """Returns the f32 update that `optax.apply_updates` adds to a bf16 weight."""
  if change is None or not _is_bfloat16(old):
    return change
  high, before = (
    x.high if isinstance(x, SplitWeight) else x for x in (new, old)
  )
  return high.astype(jnp.float32) - before.astype(jnp.float32)
