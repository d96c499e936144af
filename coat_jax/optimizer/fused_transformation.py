# SPDX-License-Identifier: Apache-2.0
"""Makes a fused optimizer of any arithmetic: it steps parameters leaf by leaf.

optax passes updates from one transformation to the next, each a copy of the
parameters in memory. Here a leaf is stepped at once: on a GPU by one kernel in
one pass over memory, in place if parameters and state are donated.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax import codecs
from coat_jax.numerics import stochastic
from coat_jax.numerics.checks import ANY, check_number
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.ops.dispatch import explain
from coat_jax.ops.types import StepImplementation
from coat_jax.optimizer import weights
from coat_jax.optimizer.arguments import (
  check_codec,
  check_decay_mask,
  check_hyperparameters,
)
from coat_jax.optimizer.masks import QuantizeMask, leaf_paths
from coat_jax.optimizer.state import (
  FusedState,
  LowBitsState,
  MomentState,
  check_moments,
  init_state,
  next_state,
  stored_leaves,
)
from coat_jax.optimizer.step import (
  LeafSteps,
  StepScalars,
  gradients_like,
  shardings_of,
  step_on_shards,
)


class FusedTransformation(NamedTuple):
  """An optimizer that returns new parameters instead of updates.

  Attributes:
    init: `init(params)` returns the state before the first step.
    apply: `apply(grads, state, params, *, grad_scale=None)` returns the new
      parameters and the new state. `grad_scale` is a scalar that multiplies the
      gradients first, such as min(1, max_norm / global_norm).
    begin: `begin(params, state)` returns the same step leaf by leaf, as
      `LeafSteps`, for `step_in_backward`.
    explain: `explain(params)` maps each leaf's path to the implementation that
      the leaf gets, and why, on the platform that a program is compiled for.
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
  """Makes a `FusedTransformation` from an optimizer's step of one leaf.

  `step_leaf` is `adam.adamw_step` or `lion.lion_step`, `scalars_of(count)` the
  scalars of a step (the first is 1), and `kind` the type of the state, which
  has as many of the codec's moments as it has fields for them. The other
  arguments are those of `fused_coat_adamw`.
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
    leaves = zip(
      steps.weights,
      gradients_like(op, grads, _moment_state(state)),
      steps.stored,
      strict=True,
    )
    new = [
      steps.step(i, weight, g, stored, grad_scale=scale)
      for i, (weight, g, stored) in enumerate(leaves)
    ]
    return steps.end(*zip(*new, strict=True)) if new else steps.end((), ())

  def begin_fn(params: optax.Params, state: FusedState) -> LeafSteps:
    return begin(step_leaf, params, state)

  def begin(step_leaf, params, state) -> LeafSteps:
    _check_state(op, state, kind, low_bits)
    check_moments(op, state, codec)
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
    gradients_like(op, params, state)
    stored_codecs = stored_leaves(state)
    where = shardings_of(op, shardings, state.mu)
    decayed = _decayed(mask, params)

    def step(i, weight, g, stored, *, layer=None, grad_scale=None):
      leaf_decay = decay if decayed[i] else 0 * decay
      key = stochastic.leaf_key(seed, count, i)
      return step_on_shards(
        functools.partial(
          step_leaf,
          groups=stored_codecs[i][1],
          implementation=implementation,
        ),
        where[i],
        (weight, g),
        stored,
        LeafPart(key, layer=layer),
        scalars,
        StepScalars(rate, leaf_decay, grad_scale),
      )

    def end(new_leaves, stored):
      new_state = next_state(state, count, stored)
      if low is None:
        return treedef.unflatten(new_leaves), new_state
      high, new_low = weights.unpair_weights(new_leaves, low)
      return treedef.unflatten(high), LowBitsState(new_low, new_state)

    all_stored = [stored for stored, _ in stored_codecs]
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
  """Raises a TypeError for another optimizer's state."""
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
  """Lists whether each leaf's weights decay, as `optax.masked` reads masks."""
  treedef = jax.tree.structure(params)
  if mask is None:
    return [True] * treedef.num_leaves
  whole = jax.tree.map(
    lambda chosen, part: jax.tree.map(lambda _: chosen, part),
    mask(params),
    params,
  )
  return treedef.flatten_up_to(whole)
