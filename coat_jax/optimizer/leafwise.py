# SPDX-License-Identifier: Apache-2.0
"""Runs optax transformations leaf by leaf, for `step_in_backward`.

An optimizer can step leaf by leaf if a leaf's update and state depend only on
that leaf, and if shared state, such as a step count, depends on no leaf. The
optimizer must not draw random numbers, because all leaves, and all layers of a
stack, would draw the same ones. We check all of this in the update's jaxpr.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.extend.core import jaxprs_in_params

from coat_jax.optimizer.arguments import check_optimizer
from coat_jax.optimizer.fused import LeafSteps
from coat_jax.optimizer.masks import leaf_paths
from coat_jax.optimizer.state import moments_in
from coat_jax.optimizer.step import put_layer, take_layer
from coat_jax.optimizer.weights import StochasticRoundingState

# The owner of state that all leaves share, such as a step count.
_SHARED = -1
_RANDOM = ("random_", "rng_", "threefry")


class LeafwiseTransformation(NamedTuple):
  """An optimizer with `init` and `begin`, as in `FusedTransformation`."""

  init: Any
  begin: Any


def leafwise(tx: optax.GradientTransformation) -> LeafwiseTransformation:
  """Makes an optax transformation usable in `step_in_backward`.

  Args:
    tx: a transformation whose update of a leaf depends on this leaf alone, such
      as `optax.adamw` or `optax.lion`. `tx` is called with one layer of a
      stacked leaf at a time, [1, ...], so values per leaf (a norm, factored
      second moments) are computed per layer.

  Returns:
    An optimizer for `step_in_backward`.

  Raises:
    TypeError: `tx` is not an optimizer.
    ValueError: (by `begin`) an update or state depends on other leaves, as with
      clipping by the global norm or `optax.contrib.dadapt_adamw`; a field of
      the state lacks the parameters' structure, as in `optax.masked`; `tx`
      draws random numbers, as in `optax.noisy_sgd` and `stochastic_rounding`;
      or `tx` encodes moments (instead of `coat_adamw`, use
      `fused_coat_adamw`); (by `step_in_backward`) the state of stacked layers
      has no axis of layers.

  Examples:
    >>> optimizer = leafwise(optax.adamw(3e-4))
    >>> state = optimizer.init(params)
  """
  check_optimizer("leafwise", "tx", tx)

  def begin(params: Any, state: Any) -> LeafSteps:
    check_plain("leafwise", state)
    leaves, treedef = jax.tree.flatten(params)
    kept, state_treedef = jax.tree.flatten(state)
    owners = _owners(tx, state, treedef.unflatten(range(len(leaves))))
    without_layers = _check_leaf_by_leaf(tx, params, state, owners)

    def kept_by(i: int, nodes: Sequence[Any]) -> list[Any]:
      return [x for x, own in zip(nodes, owners, strict=True) if own == i]

    def only(i: int, x: Any) -> Any:
      """Returns the parameters' tree with x at leaf i, and None elsewhere."""
      return treedef.unflatten(
        [x if j == i else None for j in range(len(leaves))]
      )

    def update(i: int, g: Any, weight: Any, own_state: Sequence[Any]):
      """Returns the updates of a tree with only leaf i, and the new state."""
      rest = iter(own_state)
      nodes = [
        x if own == _SHARED else next(rest) if own == i else None
        for x, own in zip(kept, owners, strict=True)
      ]
      updates, new = tx.update(
        only(i, g), state_treedef.unflatten(nodes), only(i, weight)
      )
      return updates, state_treedef.flatten_up_to(new)

    def step(i, leaf, g, *, layer=None, grad_scale=None):
      g = g if grad_scale is None else (g * grad_scale).astype(g.dtype)
      if layer is not None and (place := without_layers[i]):
        raise ValueError(
          "leafwise: the state of stacked layers must have an axis of layers, "
          f"but {place!r} has none; use the optimizer without leafwise, in "
          "an ordinary step"
        )
      weight, own_state = leaf if layer is None else take_layer(leaf, layer)
      updates, nodes = update(i, g, weight, own_state)
      weight = optax.apply_updates(weight, jax.tree.leaves(updates)[0])
      new = weight, kept_by(i, nodes)
      return new if layer is None else put_layer(leaf, new, layer)

    def end(new):
      # Update the shared state by updating a tree without leaves.
      _, shared = update(_SHARED, None, None, ())
      of_leaves = [iter(own_state) for _, own_state in new]
      nodes = [
        x if own == _SHARED else next(of_leaves[own])
        for x, own in zip(shared, owners, strict=True)
      ]
      weights = [weight for weight, _ in new]
      return treedef.unflatten(weights), state_treedef.unflatten(nodes)

    pairs = [(leaf, kept_by(i, kept)) for i, leaf in enumerate(leaves)]
    return LeafSteps(pairs, step, end)

  return LeafwiseTransformation(tx.init, begin)


def check_plain(op: str, state: Any) -> None:
  """Raises a ValueError if `state` belongs to a transformation of ours."""
  kept = jax.tree.leaves(state, is_leaf=_is_rounding)
  if any(map(_is_rounding, kept)):
    raise ValueError(
      f"{op}: the optimizer must not round stochastically, because all leaves "
      "and layers would draw the same numbers, got stochastic_rounding; pass "
      "fused_coat_adamw or fused_coat_lion (without leafwise), or keep the "
      "weights in f32"
    )
  if moments_in(state):
    raise ValueError(
      f"{op}: the optimizer must not encode its state, got an encoded moment "
      "(as in coat_adamw, coat_lion, coat_muon and encoded); pass "
      "fused_coat_adamw or fused_coat_lion (without leafwise), or leafwise of "
      "an optimizer such as optax.adamw"
    )


def _is_rounding(node: Any) -> bool:
  return isinstance(node, StochasticRoundingState)


def _owners(tx: Any, state: Any, indices: Any) -> list[int]:
  """Returns, for each leaf of a state, its parameter's index or `_SHARED`."""
  try:
    owners = optax.tree.map_params(
      tx,
      lambda _, i: i,
      state,
      indices,
      transform_non_params=lambda x: jax.tree.map(lambda _: _SHARED, x),
    )
  except ValueError as error:
    raise ValueError(
      "leafwise: each field of the state must have the structure of the "
      "parameters, got another structure, as in optax.masked, optax.partition "
      "and optax.sm3; use the optimizer without leafwise, in an ordinary step"
    ) from error
  return jax.tree.leaves(owners)


def _check_leaf_by_leaf(
  tx: optax.GradientTransformation,
  params: Any,
  state: Any,
  owners: Sequence[int],
) -> list[str | None]:
  """Raises a ValueError if an optimizer cannot step leaf by leaf.

  Returns for each parameter the path of an array in its state that has no axis
  of layers, such as a norm, or None if there is no such array. Arrays that an
  update sets to a constant do not count.
  """
  paths, places = leaf_paths(params), leaf_paths(state)
  count = len(paths)
  closed, (updates, _) = jax.make_jaxpr(
    lambda g, p, s: tx.update(g, s, p), return_shape=True
  )(params, params, state)
  jaxpr = closed.jaxpr
  if name := _random_primitive(jaxpr):
    raise ValueError(
      "leafwise: an update must not draw random numbers, got one that does "
      f"({name}): all leaves and layers would draw the same numbers; leave the "
      "noise out"
    )
  own = [{i} for i in range(count)]
  of_state = [set() if i == _SHARED else {i} for i in owners]
  found = _dependencies(jaxpr, [*own, *own, *of_state])
  num_updates = len(jax.tree.leaves(updates))
  for i, depends in enumerate(found[:num_updates]):
    if others := depends - {i}:
      raise ValueError(
        "leafwise: the update of a leaf must depend on its own gradient only, "
        f"got one of {paths[i][0]!r} that depends on "
        f"{paths[min(others)][0]!r}, as after clipping by the global norm; "
        "leave that out, and pass clip to step_in_backward"
      )
  without_layers: list[str | None] = [None] * count
  of_state = zip(owners, places, found[num_updates:], strict=True)
  for i, (place, x), depends in of_state:
    if others := depends - {i}:
      keeper = "shared by all" if i == _SHARED else f"of {paths[i][0]!r}"
      raise ValueError(
        "leafwise: state must not depend on the gradients of other leaves, got "
        f"{place!r}, {keeper}, that depends on {paths[min(others)][0]!r}; use "
        "the optimizer without leafwise, in an ordinary step"
      )
    if i != _SHARED and depends and x.shape[:1] != paths[i][1].shape[:1]:
      without_layers[i] = place
  return without_layers


def _random_primitive(jaxpr) -> str | None:
  """Returns the name of a primitive that draws random numbers, or None."""
  for equation in jaxpr.eqns:
    if equation.primitive.name.startswith(_RANDOM):
      return equation.primitive.name
    for inner in jaxprs_in_params(equation.params):
      if name := _random_primitive(inner):
        return name
  return None


def _dependencies(jaxpr, inputs: list[set[int]]) -> list[set[int]]:
  """Returns the leaves each result depends on, given those of each input."""
  of = {id(v): each for v, each in zip(jaxpr.invars, inputs, strict=True)}
  for equation in jaxpr.eqns:
    mine = [of.get(id(v), set()) for v in equation.invars]
    inner = equation.params.get("jaxpr")
    if equation.primitive.name == "jit" and inner is not None:
      outputs = _dependencies(inner.jaxpr, mine)
    else:
      outputs = [set().union(*mine)] * len(equation.outvars)
    of |= {id(v): x for v, x in zip(equation.outvars, outputs, strict=True)}
  return [of.get(id(v), set()) for v in jaxpr.outvars]
