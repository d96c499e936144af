# SPDX-License-Identifier: Apache-2.0
"""What optimizers with encoded moments do with every leaf of a tree.

`update_leaves` is the loop over leaves behind optax transformations. An
optimizer gives the arithmetic of one leaf: `adam.adam_update`,
`lion.lion_update`, `muon_momentum.muon_momentum`.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array
from jax.typing import ArrayLike

from coat_jax import stochastic
from coat_jax.codecs import MomentCodec
from coat_jax.optimizer import moments, shards
from coat_jax.optimizer.moments import Stored
from coat_jax.optimizer.state import MomentState, next_state, pair_leaves


def update_leaves(
  op: str,
  update_leaf: Callable[..., tuple[Array, Stored]],
  updates: optax.Updates,
  state: MomentState,
  scalars: Any,
  *,
  codec: MomentCodec,
  seed: ArrayLike,
  shardings: Any,
  **kwargs: Any,
) -> tuple[optax.Updates, MomentState]:
  """Updates every leaf, on each device's shard where shardings are known.

  Args:
    op: the public function that asks, for error messages.
    update_leaf: `update_leaf(g, stored, key, scalars, *, groups, start, whole,
      **kwargs)`, the update of a leaf, of g's shape, and its new moments.
    updates: tree of gradients.
    state: as `init_state` made it.
    scalars: of this step.
    codec: how the moments are stored.
    seed: of the random words of stochastic rounding.
    shardings: tree of the parameters' `NamedSharding`s, or None.
    **kwargs: static, for `update_leaf`.

  Returns:
    The tree of updates and the next state.
  """
  count = optax.safe_increment(state.count)
  new_updates, new_stored = [], []
  pairs = pair_leaves(op, updates, state)
  where = shards.shardings_of(op, shardings, [stored for _, stored in pairs])
  for i, (g, stored) in enumerate(pairs):
    groups = codec.groups[: len(stored)]
    update, stored = shards.run_on_shards(
      update_leaf,
      where[i],
      (g,),
      stored,
      stochastic.leaf_key(seed, count, i),
      scalars,
      groups=moments.stored_groups(op, stored, groups, codec.name),
      **kwargs,
    )
    new_updates.append(update)
    new_stored.append(stored)
  new_updates = jax.tree.structure(updates).unflatten(new_updates)
  return new_updates, next_state(state, count, new_stored)
