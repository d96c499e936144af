# SPDX-License-Identifier: Apache-2.0
"""A whole step with encoded moments, whatever the optimizer's arithmetic.

optax hands updates from one transformation to the next, each a copy of the
parameters in memory. Here a leaf is stepped at once: on a GPU by one kernel in
one pass over memory, in place where parameters and state are donated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax import codecs, stochastic
from coat_jax.checks import ANY, check_number
from coat_jax.ops.dispatch import explain
from coat_jax.ops.types import StepImplementation
from coat_jax.optimizer import moments, shards, weights
from coat_jax.optimizer.arguments import (
  check_decay_mask,
  check_hyperparameters,
)
from coat_jax.optimizer.leaves import LeafSteps
from coat_jax.optimizer.masks import QuantizeMask, leaf_paths
from coat_jax.optimizer.state import (
  FusedState,
  LowBitsState,
  MomentState,
  check_codec,
  init_state,
  next_state,
  pair_leaves,
)
from coat_jax.optimizer.stored_step import StepScalars


class FusedTransformation(NamedTuple):
  """An optimizer that gives new parameters in place of updates.

  Attributes:
    init: `init(params)`, the state of step 0.
    apply: `apply(grads, state, params, *, grad_scale=None)`, the new parameters
      and the new state. `grad_scale` is a scalar that multiplies the gradients
      first, such as min(1, max_norm / global_norm).
    begin: `begin(params, state)`, the same step leaf by leaf, for
      `step_in_backward`: a `LeafSteps`.
    explain: `explain(params)`, by path which implementation a leaf gets and
      why, on the platform that a program is compiled for.
  """

  init: Callable[[optax.Params], FusedState]
  apply: Callable[..., tuple[optax.Params, FusedState]]
  begin: Callable[[optax.Params, FusedState], LeafSteps]
  explain: Callable[[optax.Params], dict[str, str]]


def fused_transformation(
  op: str,
  step_leaf: Any,
  scalars_of: Callable[[ArrayLike], Any],
  kind: type[MomentState],
  *,
  learning_rate: optax.ScalarOrSchedule,
  weight_decay: optax.ScalarOrSchedule,
  mask: Any | Callable[[optax.Params], Any] | None,
  codec: codecs.MomentCodec,
  quantize_mask: QuantizeMask | None,
  low_bits: bool,
  seed: ArrayLike,
  implementation: StepImplementation | None,
  shardings: Any,
) -> FusedTransformation:
  """Makes the public object of an optimizer's step of one leaf.

  Args:
    op: the public function that asks, for error messages.
    step_leaf: `adam.adamw_step` or `lion.lion_step`, an `Op`.
    scalars_of: the scalars of step `count`, the first being 1.
    kind: of the state, which says how many of the codec's moments there are.
    learning_rate, weight_decay, mask, codec, quantize_mask, low_bits, seed,
      implementation, shardings: as of `fused_coat_adamw`.

  Raises:
    NotImplementedError: `implementation` is no such name.
    TypeError: `codec` is not a `MomentCodec`; an argument is of another kind.
    ValueError: a number is outside its range.
  """
  check_codec(op, codec)
  check_hyperparameters(
    op, learning_rate=learning_rate, weight_decay=weight_decay, seed=seed
  )
  mask = check_decay_mask(op, "mask", mask)
  step_leaf.require_known(implementation, op)

  def init_fn(params: optax.Params) -> FusedState:
    state = init_state(op, params, codec, quantize_mask, kind)
    if not low_bits:
      return state
    return LowBitsState(weights.split_weights(params)[1], state)

  def apply_fn(
    grads: optax.Updates,
    state: FusedState,
    params: optax.Params,
    *,
    grad_scale: ArrayLike | None = None,
  ) -> tuple[optax.Params, FusedState]:
    scale = None
    if grad_scale is not None:
      remedy = "pass one, as min(1, max_norm / global_norm)"
      check_number(op, "grad_scale", grad_scale, ANY, remedy)
      scale = jnp.asarray(grad_scale, jnp.float32)
    steps = begin(step_leaf, params, state)
    pairs = pair_leaves(op, grads, _moment_state(state))
    new = [
      steps.step(i, weight, g, stored, grad_scale=scale)
      for i, (weight, (g, stored)) in enumerate(
        zip(steps.weights, pairs, strict=True)
      )
    ]
    return steps.end(*zip(*new, strict=True)) if new else steps.end((), ())

  def begin_fn(params: optax.Params, state: FusedState) -> LeafSteps:
    return begin(step_leaf, params, state)

  def begin(step_leaf, params, state) -> LeafSteps:
    _check_state(op, state, kind, low_bits)
    low = state.low if isinstance(state, LowBitsState) else None
    state = _moment_state(state)
    count = optax.safe_increment(state.count)
    scalars = scalars_of(count)
    rate, decay = (
      jnp.asarray(x(state.count) if callable(x) else x, jnp.float32)
      for x in (learning_rate, weight_decay)
    )
    leaves, treedef = jax.tree.flatten(params)
    if low is not None:
      leaves = weights.pair_weights(op, params, low)
    all_stored = [stored for _, stored in pair_leaves(op, params, state)]
    where = shards.shardings_of(op, shardings, all_stored)
    decayed = _decayed(mask, params)

    def step(i, weight, g, stored, *, layer=None, grad_scale=None):
      groups = codec.groups[: len(stored)]
      leaf_decay = decay if decayed[i] else 0 * decay
      return shards.run_on_shards(
        step_leaf,
        where[i],
        (weight, g),
        stored,
        stochastic.leaf_key(seed, count, i),
        scalars,
        StepScalars(rate, leaf_decay, grad_scale),
        groups=moments.stored_groups(op, stored, groups, codec.name),
        layer=layer,
        implementation=implementation,
      )

    def end(new_leaves, stored):
      new_state = next_state(state, count, stored)
      if low is None:
        return treedef.unflatten(new_leaves), new_state
      high, new_low = weights.unpair_weights(new_leaves, low)
      return treedef.unflatten(high), LowBitsState(new_low, new_state)

    return LeafSteps(leaves, all_stored, step, end)

  def explain_fn(params: optax.Params) -> dict[str, str]:
    found = []

    def explained(*args, implementation, **kwargs):
      del implementation
      found.append(explain(step_leaf, *args, **kwargs))
      return step_leaf.definition(*args, **kwargs)

    def whole_step(params):
      state = init_fn(params)
      if low_bits:
        params, _ = weights.split_weights(params)
      steps = begin(explained, params, state)
      grads = jax.tree.leaves(params)
      leaves = zip(steps.weights, grads, steps.stored, strict=True)
      for i, (weight, g, stored) in enumerate(leaves):
        steps.step(i, weight, g, stored)

    jax.eval_shape(whole_step, params)
    paths = [path for path, _ in leaf_paths(params)]
    return dict(zip(paths, found, strict=True))

  return FusedTransformation(init_fn, apply_fn, begin_fn, explain_fn)


def _check_state(op: str, state: Any, kind: type, low_bits: bool) -> None:
  """Raises `TypeError` for the state of another optimizer."""
  has_low, inner = isinstance(state, LowBitsState), _moment_state(state)
  if isinstance(inner, kind) and has_low == low_bits:
    return
  wanted, got = (
    f"{'LowBitsState of ' if low else ''}{name.__name__}"
    for low, name in ((low_bits, kind), (has_low, type(inner)))
  )
  raise TypeError(
    f"{op}: state must be what its init made with low_bits={low_bits}, a "
    f"{wanted}, got a {got}; make one with {op}(...).init(params)"
  )


def _moment_state(state: FusedState) -> MomentState:
  return state.inner if isinstance(state, LowBitsState) else state


def _decayed(
  mask: Callable[[Any], Any] | None, params: optax.Params
) -> list[bool]:
  """Whether weights decay, leaf by leaf: `optax.masked`'s reading of a mask."""
  treedef = jax.tree.structure(params)
  if mask is None:
    return [True] * treedef.num_leaves
  whole = jax.tree.map(
    lambda chosen, part: jax.tree.map(lambda _: chosen, part),
    mask(params),
    params,
  )
  return treedef.flatten_up_to(whole)
