# SPDX-License-Identifier: Apache-2.0
"""Steps optax transformations leaf by leaf, for `step_in_backward`."""

from typing import Any, NamedTuple

import jax
import optax

from coat_jax.optimizer.arguments import check_optimizer
from coat_jax.optimizer.leaf_dependence import check_leaf_by_leaf
from coat_jax.optimizer.state import moments_in
from coat_jax.optimizer.step import LeafSteps, put_layer, take_layer


class LeafwiseTransformation(NamedTuple):
  """An optax transformation that is stepped leaf by leaf.

  Attributes:
    init: the transformation's.
    begin: `begin(params, state)` returns `LeafSteps`.
  """

  init: Any
  begin: Any


def leafwise(tx: optax.GradientTransformation) -> LeafwiseTransformation:
  """Lets `step_in_backward` take an optax transformation.

  Args:
    tx: a transformation whose update of a leaf depends on this leaf alone, such
      as `optax.adamw` or `optax.lion`. It sees stacked leaves one layer at a
      time, [1, ...], so what it computes for a whole leaf (a norm, factored
      second moments) is computed for one layer. Masks must be functions.

  Returns:
    What `step_in_backward` takes as its optimizer.

  Raises:
    TypeError: `tx` is not an optimizer.
    ValueError: (by `begin`) an update depends on other leaves, as after
      clipping by the global norm; shared state depends on gradients, as in
      `optax.contrib.dadapt_adamw`; random numbers are drawn, as in
      `optax.noisy_sgd`; or the state is that of `coat_adamw`, `coat_lion` or
      `encoded`: pass `fused_coat_adamw` or `fused_coat_lion` instead. (By
      `step_in_backward`) state of stacked layers has no axis of layers.

  Examples:
    >>> optimizer = leafwise(optax.adamw(3e-4))
    >>> state = optimizer.init(params)
  """

  check_optimizer("leafwise", "tx", tx)

  def begin(params: Any, state: Any) -> LeafSteps:
    check_not_encoded("leafwise", state)
    leaves, treedef = jax.tree.flatten(params)
    places = treedef.unflatten(range(len(leaves)))
    stored: list[list[Any]] = [[] for _ in leaves]

    def take(x, i):
      stored[i].append(x)
      return _Slot(i, len(stored[i]) - 1)

    # The state, in which slots replace what belongs to a leaf.
    try:
      slots = optax.tree.map_params(tx, take, state, places)
    except ValueError as error:
      raise ValueError(
        "leafwise: what an optimizer keeps of a leaf must be one array, got "
        "another structure, as optax.masked, optax.partition and optax.sm3 "
        "have; step all leaves at once, with this optimizer as it is"
      ) from error
    owners = [
      x.leaf if _is_slot(x) else None
      for x in jax.tree.leaves(slots, is_leaf=_is_slot)
    ]
    without_layers = check_leaf_by_leaf(
      "leafwise", tx.update, params, state, owners
    )

    def state_of(only: int | None, kept: Any) -> Any:
      return jax.tree.map(
        lambda x: _filled(x, only, kept), slots, is_leaf=_is_slot
      )

    def tree_of(only: int, x: Any) -> Any:
      return treedef.unflatten(
        [x if i == only else None for i in range(len(leaves))]
      )

    def step(i, weight, g, kept, *, layer=None, grad_scale=None):
      if layer is None:
        return step_part(i, weight, g, kept, grad_scale)
      if place := without_layers[i]:
        raise ValueError(
          "leafwise: what an optimizer keeps of stacked layers must have an "
          f"axis of layers, got {place!r} without it; step all leaves at once, "
          "with this optimizer as it is"
        )
      part = take_layer((weight, kept), layer)
      new = step_part(i, part[0], g, part[1], grad_scale)
      return put_layer((weight, kept), new, layer)

    def step_part(i, weight, g, kept, grad_scale):
      g = g if grad_scale is None else (g * grad_scale).astype(g.dtype)
      update, new = tx.update(
        tree_of(i, g), state_of(i, kept), tree_of(i, weight)
      )
      new_kept: list[Any] = []
      optax.tree.map_params(tx, new_kept.append, new)
      weight = optax.apply_updates(weight, jax.tree.leaves(update)[0])
      return weight, new_kept

    def end(weights, all_kept):
      # Update shared state (step counts) by updating a tree without leaves.
      nothing = tree_of(-1, None)
      _, rest = tx.update(nothing, state_of(None, ()), nothing)
      shared = iter(jax.tree.leaves(rest))
      new = jax.tree.map(
        lambda x: all_kept[x.leaf][x.place] if _is_slot(x) else next(shared),
        slots,
        is_leaf=_is_slot,
      )
      return treedef.unflatten(weights), new

    return LeafSteps(leaves, stored, step, end)

  return LeafwiseTransformation(tx.init, begin)


class _Slot:
  """Marks the place of a leaf's value in a state."""

  def __init__(self, leaf: int, place: int):
    self.leaf, self.place = leaf, place


def _is_slot(x: Any) -> bool:
  return isinstance(x, _Slot)


def _filled(x: Any, only: int | None, kept: Any) -> Any:
  if not _is_slot(x):
    return x
  return kept[x.place] if x.leaf == only else None


def check_not_encoded(op: str, state: Any) -> None:
  """Raises a ValueError if `state` stores moments in groups."""
  if moments_in(state):
    raise ValueError(
      f"{op}: needs a state of the parameters' shapes, which groups have not, "
      "got coat_adamw's, coat_lion's or encoded's; pass fused_coat_adamw or "
      "fused_coat_lion as it is, or leafwise of the optimizer that is encoded"
    )
