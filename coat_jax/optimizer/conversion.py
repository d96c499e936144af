# SPDX-License-Identifier: Apache-2.0
"""A run switched between `optax.adamw` and `coat_adamw` in its middle."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax import stochastic
from coat_jax.codecs import MomentCodec
from coat_jax.optimizer import moments
from coat_jax.optimizer.masks import QuantizeMask
from coat_jax.optimizer.state import (
  ScaleByCoatAdamState,
  find_states,
  make_state,
)


def to_adam_state(opt_state: Any, codec: MomentCodec) -> Any:
  """The state of optax's Adam that a coat state stands for.

  Every `ScaleByCoatAdamState` in `opt_state` becomes an
  `optax.ScaleByAdamState` with f32 moments; all else stays. So the state of
  `coat_adamw` becomes the state of `optax.adamw`, and a bare one a bare one.

  Args:
    opt_state: a coat state, or any optimizer state that holds some.
    codec: the codec it was made with.

  Returns:
    The same tree with optax's states.

  Raises:
    ValueError: it holds no coat state, or one of another codec.

  Examples:
    >>> import jax.numpy as jnp
    >>> from coat_jax import coat_adamw, codecs, to_adam_state
    >>> codec = codecs.coat()
    >>> state = coat_adamw(1e-3, codec=codec).init({"w": jnp.ones((64, 128))})
    >>> print(to_adam_state(state, codec)[0].mu["w"].dtype)
    float32
  """
  op = "to_adam_state"

  def convert(state):
    decoded = []
    for stored in moments.flatten(moments.moment_trees(state)):
      groups = moments.stored_groups(op, stored, codec.groups, codec.name)
      decoded.append(moments.decode(groups, stored))
    treedef = jax.tree.structure(state.mu_codes)
    # optax has complex second moments of complex leaves.
    decoded = [(mu, nu.astype(mu.dtype)) for mu, nu in decoded]
    mu, nu = (treedef.unflatten([leaf[i] for leaf in decoded]) for i in (0, 1))
    # Donation takes no buffer twice: the count is a copy.
    return optax.ScaleByAdamState(jnp.array(state.count), mu, nu)

  return _convert(op, convert, opt_state, ScaleByCoatAdamState)


def from_adam_state(
  opt_state: Any,
  *,
  codec: MomentCodec,
  quantize_mask: QuantizeMask | None = None,
  seed: ArrayLike = 0,
) -> Any:
  """The coat state that stands for a state of optax's Adam.

  Every `optax.ScaleByAdamState` in `opt_state` becomes a
  `ScaleByCoatAdamState`; all else stays. The inverse of `to_adam_state` up to
  the codec's rounding.

  Args:
    opt_state: a state of Adam, or any optimizer state that holds some.
    codec: how the moments will be stored.
    quantize_mask: as for `scale_by_coat_adam`.
    seed: of the random words of stochastic rounding.

  Returns:
    The same tree with coat states.

  Raises:
    TypeError: as `scale_by_coat_adam`'s.
    ValueError: it holds no state of Adam.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from coat_jax import codecs, from_adam_state
    >>> state = optax.adamw(1e-3).init({"w": jnp.ones((64, 128))})
    >>> state = from_adam_state(state, codec=codecs.coat())
    >>> print(state[0].mu_codes["w"].dtype)
    float8_e4m3fn
  """
  op = "from_adam_state"

  def convert(state):
    trees = state.mu, state.nu
    chosen = moments.choose_groups(op, state.mu, codec.groups, quantize_mask)
    leaves = zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)
    stored = []
    for i, (groups, values) in enumerate(zip(chosen, leaves, strict=True)):
      key = stochastic.leaf_key(seed, state.count, i)
      mu, nu = moments.in_f32(jnp.array(values[0])), jnp.real(values[1])
      nu = jnp.array(nu, jnp.float32)
      stored.append(moments.encode(groups, (mu, nu), key))
    like = moments.trees_like(state.mu, len(trees))
    return make_state(jnp.array(state.count), like, stored)

  return _convert(op, convert, opt_state, optax.ScaleByAdamState)


def _convert(op: str, convert, opt_state: Any, kind: type) -> Any:
  find_states(op, opt_state, kind)
  return jax.tree.map(
    lambda x: convert(x) if isinstance(x, kind) else x,
    opt_state,
    is_leaf=lambda x: isinstance(x, kind),
  )
