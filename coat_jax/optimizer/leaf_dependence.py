# SPDX-License-Identifier: Apache-2.0
"""Reads off a jaxpr which leaves an optax update depends on.

An update may be taken leaf by leaf if a leaf's update and state depend on that
leaf alone, state shared by all leaves depends on none, and no random numbers
are drawn: each leaf, and each layer of a stack, would draw the same ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from coat_jax.optimizer.masks import leaf_path, leaf_paths

_RANDOM = ("random_", "rng_", "threefry")


def check_leaf_by_leaf(
  op: str,
  update: Callable[..., tuple[Any, Any]],
  params: Any,
  state: Any,
  owners: Sequence[int | None],
) -> list[str | None]:
  """Raises a ValueError if an update cannot be taken leaf by leaf.

  `owners` has, for each leaf of `state`, the index of the parameter that it
  belongs to, or None if all share it. Returns for each parameter the path of
  some state that every update changes but that lacks the parameter's first
  axis, such as a norm; or None.
  """
  leaves, treedef = jax.tree.flatten(params)
  kept, state_treedef = jax.tree.flatten(state)
  count = len(leaves)

  def flat_update(*inputs):
    grads, params, state = (
      inputs[:count],
      inputs[count : 2 * count],
      inputs[2 * count :],
    )
    updates, state = update(
      treedef.unflatten(grads),
      state_treedef.unflatten(state),
      treedef.unflatten(params),
    )
    return [*jax.tree.leaves(updates), *jax.tree.leaves(state)]

  jaxpr = jax.make_jaxpr(flat_update)(*leaves, *leaves, *kept).jaxpr
  if name := _random_primitive(jaxpr):
    raise ValueError(
      f"{op}: an update must draw no random numbers, got one that does "
      f"({name}): all leaves and layers would draw the same; leave the noise "
      "out"
    )
  own = [{i} for i in range(count)]
  found = _dependencies(
    jaxpr, [*own, *own, *(set() if i is None else {i} for i in owners)]
  )
  paths = [path for path, _ in leaf_paths(params)]
  places = [
    leaf_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(state)
  ]
  for i, depends in enumerate(found[:count]):
    if others := depends - {i}:
      raise ValueError(
        f"{op}: the update of a leaf must depend on its own gradient, got "
        f"one of {paths[i]!r} that depends on {paths[min(others)]!r}, as after "
        "clipping by the global norm; leave that out, and pass clip to "
        "step_in_backward"
      )
  changed: list[str | None] = [None] * count
  state_found = zip(owners, places, kept, found[count:], strict=True)
  for i, place, x, depends in state_found:
    if others := depends - {i}:
      raise ValueError(
        f"{op}: state must depend on the gradient of one leaf, got {place!r}, "
        f"{'shared by all' if i is None else f'kept of {paths[i]!r}'}, that "
        f"depends on {paths[min(others)]!r}; step all leaves at once, with "
        "this optimizer as it is"
      )
    if i is not None and depends and x.shape[:1] != leaves[i].shape[:1]:
      changed[i] = place
  return changed


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
  """Lists the inputs that each result depends on."""
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
