# SPDX-License-Identifier: Apache-2.0
"""Fused AdamW and Lion with FP8 moments: one call returns new parameters.

In a chain, the kernel of `coat_adamw` writes updates to memory, one value per
parameter, and the next transformation reads them. Here the whole step of a leaf
is one computation. A kernel runs it in one pass over memory, and in place if
parameters and state are donated.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax import codecs
from coat_jax.numerics.checks import ANY, check_number
from coat_jax.ops.dispatch import explain
from coat_jax.ops.types import StepImplementation
from coat_jax.optimizer import adam, arguments, lion
from coat_jax.optimizer.masks import QuantizeMask, leaf_paths
from coat_jax.optimizer.state import (
  FusedState,
  LowBitsState,
  MomentOptions,
  ScaleByCoatAdamState,
  ScaleByCoatLionState,
  check_state,
)
from coat_jax.optimizer.step import Leaves, StepScalars
from coat_jax.optimizer.weights import (
  pair_weights,
  split_weights,
  unpair_weights,
)


class LeafSteps(NamedTuple):
  """One step of an optimizer, to be run leaf by leaf.

  Attributes:
    leaves: pairs of a weight and its state, in the order of the parameters. A
      weight is an array, or a tree of arrays of one shape. A state is a tree of
      scalars and arrays. If the weight is stacked, its state's arrays are, too.
    step: `step(i, leaf, gradient, *, layer=None, grad_scale=None)` returns the
      new pair i. If `layer`, int32 [], is passed, only this layer of a stacked
      leaf is updated, and `gradient` is [1, ...].
    end: `end(leaves)` returns the new parameters and the new state.
  """

  leaves: Sequence[tuple[Any, Any]]
  step: Callable[..., tuple[Any, Any]]
  end: Callable[[Sequence[tuple[Any, Any]]], tuple[Any, Any]]


class FusedTransformation(NamedTuple):
  """An optimizer that returns new parameters instead of updates.

  Attributes:
    init: `init(params)` returns the state before the first step.
    apply: `apply(grads, state, params, *, grad_scale=None)` returns the new
      parameters and the new state. Gradients are first multiplied by the scalar
      `grad_scale`, such as min(1, max_norm / global_norm).
    begin: `begin(params, state)` returns the step as `LeafSteps`, so that
      `step_in_backward` can run it leaf by leaf.
    explain: `explain(params)` maps each leaf's path to a sentence that states
      which implementation runs on each platform and why, like `ops.explain`.
  """

  init: Callable[[optax.Params], FusedState]
  apply: Callable[..., tuple[optax.Params, FusedState]]
  begin: Callable[[optax.Params, FusedState], LeafSteps]
  explain: Callable[[optax.Params], dict[str, str]]

  @property
  def update(self) -> Any:
    # optax looks up `update` only when a chain is updated. hasattr() still
    # returns False, because this raises an AttributeError.
    raise AttributeError(
      "FusedTransformation: optax's and nnx's wrappers need an optimizer with "
      "update, got a fused one, which returns new parameters; use coat_adamw "
      "or coat_lion"
    )


def fused_coat_adamw(
  learning_rate: optax.ScalarOrSchedule,
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.999,
  eps: ArrayLike = 1e-8,
  eps_root: ArrayLike = 0.0,
  *,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  weight_decay: optax.ScalarOrSchedule = 1e-4,
  mask: Any | Callable[[optax.Params], Any] | None = None,
  quantize_mask: QuantizeMask | None = None,
  low_bits: bool = False,
  seed: ArrayLike = 0,
  implementation: StepImplementation | None = None,
  shardings: Any = None,
) -> FusedTransformation:
  """AdamW with FP8 moments: `coat_adamw` and `apply_updates` in one step.

  The whole step is computed in f32. At the end, bf16 parameters are rounded
  stochastically: to 24 bits with `low_bits`, otherwise to bf16. Without
  `low_bits`, the step runs the operations of `coat_adamw`, and then those of
  `apply_updates(..., step=count, seed=seed)`, where `count` is the new count.
  Results of different compiled programs may still differ by a few ulps, which
  can change an FP8 code. docs/optimizer.md explains when to use `coat_adamw`
  instead.

  Args:
    learning_rate, b1, b2, eps, eps_root, codec: as for `coat_adamw`.
    weight_decay, mask, quantize_mask: as for `coat_adamw`.
    low_bits: whether the state stores one more byte for each bf16 parameter,
      which extends it to 24 bits. If `init` gets bf16 parameters, these bytes
      start at zero. If `init` gets f32 parameters, it computes the bytes from
      them; `apply` then needs `split_weights(params)[0]` as parameters.
    seed, implementation, shardings: as for `coat_adamw`.

  Returns:
    A `FusedTransformation`.

  Raises:
    NotImplementedError: `implementation` is unknown, or (raised by `apply`)
      does not support a leaf.
    TypeError, ValueError: the same as for `coat_adamw`.

  Examples:
    >>> optimizer = fused_coat_adamw(3e-4, weight_decay=0.1)
    >>> state = optimizer.init(params)
    >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
    ... def step(params, state, grads):
    ...   return optimizer.apply(grads, state, params)

  Source: arXiv:2410.19313, section 4.
  """
  op = "fused_coat_adamw"
  arguments.check_hyperparameters(op, b1=b1, b2=b2, eps=eps, eps_root=eps_root)
  options = MomentOptions(
    op,
    ScaleByCoatAdamState,
    codec,
    quantize_mask,
    seed,
    implementation,
    shardings,
  )
  return _fused(
    options,
    adam.adamw_step,
    lambda count: adam.adam_scalars(count, b1, b2, eps, eps_root),
    low_bits,
    learning_rate,
    weight_decay,
    mask,
  )


def fused_coat_lion(
  learning_rate: optax.ScalarOrSchedule,
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.99,
  *,
  codec: codecs.MomentCodec = codecs.coat(),  # noqa: B008 (it is frozen)
  weight_decay: optax.ScalarOrSchedule = 1e-3,
  mask: Any | Callable[[optax.Params], Any] | None = None,
  quantize_mask: QuantizeMask | None = None,
  low_bits: bool = False,
  seed: ArrayLike = 0,
  implementation: StepImplementation | None = None,
  shardings: Any = None,
) -> FusedTransformation:
  """Lion with FP8 momentum: `coat_lion` and `apply_updates` in one step.

  Args:
    learning_rate, b1, b2, codec: as for `coat_lion`.
    weight_decay, mask, quantize_mask, seed, implementation, shardings: as for
      `coat_adamw`.
    low_bits: as for `fused_coat_adamw`.

  Returns:
    A `FusedTransformation`.

  Raises:
    NotImplementedError, TypeError, ValueError: the same as for
      `fused_coat_adamw`.

  Source: arXiv:2302.06675, algorithm 2.
  """
  op = "fused_coat_lion"
  arguments.check_hyperparameters(op, b1=b1, b2=b2)
  options = MomentOptions(
    op,
    ScaleByCoatLionState,
    codec,
    quantize_mask,
    seed,
    implementation,
    shardings,
  )
  return _fused(
    options,
    lion.lion_step,
    lambda _: lion.lion_scalars(b1, b2),
    low_bits,
    learning_rate,
    weight_decay,
    mask,
  )


def _fused(
  options: MomentOptions,
  step_leaf: Any,
  scalars_of: Callable[[ArrayLike], Any],
  low_bits: bool,
  learning_rate: optax.ScalarOrSchedule,
  weight_decay: optax.ScalarOrSchedule,
  mask: Any,
) -> FusedTransformation:
  """Makes a fused optimizer from a function that steps one leaf."""
  op = options.op
  arguments.check_hyperparameters(
    op, learning_rate=learning_rate, weight_decay=weight_decay
  )
  mask = arguments.check_decay_mask(op, "mask", mask)
  step_leaf.require_known(options.implementation, op)
  dispatched = functools.partial(
    step_leaf, implementation=options.implementation
  )

  def init(params: optax.Params) -> FusedState:
    state = options.init(params)
    if not low_bits:
      return state
    return LowBitsState(split_weights(params)[1], state)

  def apply(
    grads: optax.Updates,
    state: FusedState,
    params: optax.Params,
    *,
    grad_scale: ArrayLike | None = None,
  ) -> tuple[optax.Params, FusedState]:
    scale = None
    if grad_scale is not None:
      remedy = "pass a number such as min(1, max_norm / global_norm)"
      check_number(op, "grad_scale", grad_scale, ANY, remedy)
      scale = jnp.asarray(grad_scale, jnp.float32)
    steps = begin(params, state)
    moments = state.inner if isinstance(state, LowBitsState) else state
    grads = arguments.gradients_like(op, grads, moments.mu.codes)
    pairs = zip(steps.leaves, grads, strict=True)
    return steps.end(
      [
        steps.step(i, leaf, g, grad_scale=scale)
        for i, (leaf, g) in enumerate(pairs)
      ]
    )

  def begin(params, state, run: Callable[..., Any] = dispatched) -> LeafSteps:
    low = None
    if low_bits:
      check_state(op, state, LowBitsState, options.codec)
      low, state = state
    leaves = Leaves(options, state)
    scalars = scalars_of(leaves.count)
    rate, decay = (
      jnp.asarray(x(state.count) if callable(x) else x, jnp.float32)
      for x in (learning_rate, weight_decay)
    )
    is_decayed = jax.tree.leaves(
      jax.tree.broadcast(True if mask is None else mask(params), params)
    )
    treedef = jax.tree.structure(params)
    weights = [weight for _, weight in leaf_paths(params)]
    if low is not None:
      weights = pair_weights(op, params, low)
    arguments.gradients_like(op, params, state.mu.codes, "params")

    def step(i, leaf, g, *, layer=None, grad_scale=None):
      weight, stored = leaf
      own_decay = decay if is_decayed[i] else 0 * decay
      of_step = StepScalars(rate, own_decay, grad_scale)
      return leaves.step(i, run, (weight, g), stored, (scalars, of_step), layer)

    def end(new):
      new_state = leaves.end([stored for _, stored in new])
      new_weights = [weight for weight, _ in new]
      if low is None:
        return treedef.unflatten(new_weights), new_state
      high, new_low = unpair_weights(new_weights, low)
      return treedef.unflatten(high), LowBitsState(new_low, new_state)

    pairs = list(zip(weights, leaves.stored, strict=True))
    return LeafSteps(pairs, step, end)

  def explain_leaves(params: optax.Params) -> dict[str, str]:
    found = []

    def explained(*args, **kwargs):
      found.append(explain(step_leaf, *args, **kwargs))
      return step_leaf.definition(*args, **kwargs)

    def whole_step(params):
      state = init(params)
      if low_bits:
        params, _ = split_weights(params)
      steps = begin(params, state, explained)
      grads = jax.tree.leaves(params)
      for i, pair in enumerate(zip(steps.leaves, grads, strict=True)):
        steps.step(i, *pair)

    jax.eval_shape(whole_step, params)
    paths = [path for path, _ in leaf_paths(params)]
    return dict(zip(paths, found, strict=True))

  return FusedTransformation(init, apply, begin, explain_leaves)
