# SPDX-License-Identifier: Apache-2.0
"""The whole step of AdamW with encoded moments: one kernel a leaf on a GPU.

optax hands updates from one transformation to the next, each a copy of the
parameters in memory. `fused_coat_adamw` is `coat_adamw` and `apply_updates` in
one function, which runs on a GPU leaf by leaf in one pass over memory, in place
where parameters and state are donated. The state is Adam's own
(`ScaleByCoatAdamState`): checkpoints go both ways. With `low_bits` there are
bytes of the weights beside it (`LowBitsState`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from coat_jax import codecs, stochastic
from coat_jax.ops.dispatch import explain
from coat_jax.ops.types import Implementation
from coat_jax.optimizer import adam, moments, shards, weights
from coat_jax.optimizer.leaves import LeafSteps
from coat_jax.optimizer.masks import QuantizeMask, leaf_paths
from coat_jax.optimizer.state import (
  FusedState,
  LowBitsState,
  ScaleByCoatAdamState,
  check_codec,
  init_state,
  next_state,
  pair_leaves,
  parameter_key,
)


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
  nesterov: bool = False,
  quantize_mask: QuantizeMask | None = None,
  low_bits: bool = False,
  seed: ArrayLike = 0,
  implementation: Implementation | None = None,
  shardings: Any = None,
) -> FusedTransformation:
  """`coat_adamw` and `apply_updates` in one step.

  Everything is f32 from the gradient to the new parameter. A bf16 one is
  rounded stochastically, to bf16 with the words that `apply_updates` draws for
  `step=state.count` of the new state and the same seed, or, with `low_bits`, to
  24 bits: see docs/optimizer.md on which one to take. With f32
  gradients and parameters the result is that of the chain, up to how another
  compiled program rounds: some ulp, and a code where one is that close.

  Args:
    learning_rate: a number or a schedule.
    b1, b2: decay of the first and the second moment.
    eps: added to the denominator, outside the root.
    eps_root: added to the second moment, inside the root.
    codec: how the moments are stored, from `codecs`; holds every static choice.
    weight_decay: a number or a schedule; multiplied with the learning rate.
    mask: tree of bools or function of the parameters, where to decay weights.
    nesterov: unsupported: raises, pointing to `coat_adamw`.
    quantize_mask: `(path, leaf) -> bool`, which leaves the codec encodes; None
      for `default_quantize_mask`.
    low_bits: whether `init` makes a state that holds another byte of each bf16
      parameter, 24 bits together: those of f32 parameters, of which the caller
      goes on with `split_weights(params)[0]`, and zeros of bf16 ones. `apply`
      infers it from the state.
    seed: of the random words of stochastic rounding.
    implementation: "mosaic" for the kernel, "xla" for the definition, None for
      the kernel where a leaf and the platform allow it.
    shardings: on a mesh of automatic axes, the parameters' shardings, a tree of
      `NamedSharding`s, so that the kernel can run on each device's shard; None
      leaves partitioning to XLA, which cannot partition a kernel. Not needed on
      explicit axes, where shardings are part of types.

  Returns:
    A `FusedTransformation`.

  Raises:
    NotImplementedError: `nesterov`, or (by `apply`) a named implementation
      that cannot take a leaf.
    TypeError, ValueError: as `coat_adamw`.

  Examples:
    >>> optimizer = fused_coat_adamw(3e-4, weight_decay=0.1)
    >>> state = optimizer.init(params)
    >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
    ... def step(params, state, grads):
    ...   return optimizer.apply(grads, state, params)

  Source: arXiv:2410.19313, section 4.
  """
  op = "fused_coat_adamw"
  if nesterov:
    raise NotImplementedError(
      f"{op}: nesterov must be False, got True; use coat_adamw(nesterov=True) "
      "with coat_jax.apply_updates"
    )
  check_codec(op, codec)

  def init_fn(params: optax.Params) -> FusedState:
    state = init_state(op, params, codec, quantize_mask)
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
    if grad_scale is not None:
      grad_scale = jnp.asarray(grad_scale, jnp.float32)
    pairs = pair_leaves(op, grads, _adam_state(state))
    steps = begin(adam.adamw_step, params, state)
    new = [
      steps.step(i, weight, g, stored, grad_scale=grad_scale)
      for i, (weight, (g, stored)) in enumerate(
        zip(steps.weights, pairs, strict=True)
      )
    ]
    return steps.end(*zip(*new, strict=True)) if new else steps.end((), ())

  def begin_fn(params: optax.Params, state: FusedState) -> LeafSteps:
    return begin(adam.adamw_step, params, state)

  def begin(adamw_step, params, state) -> LeafSteps:
    low = state.low if isinstance(state, LowBitsState) else None
    state = _adam_state(state)
    count = optax.safe_increment(state.count)
    scalars = adam.adam_scalars(count, b1, b2, eps, eps_root)
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
      key = stochastic.leaf_key(seed, count, i)
      leaf_decay = decay if decayed[i] else 0 * decay
      return shards.run_on_shards(
        adamw_step,
        where[i],
        (weight, g),
        stored,
        jnp.stack([key, parameter_key(seed, count, i)]),
        scalars,
        adam.StepScalars(rate, leaf_decay, grad_scale),
        groups=moments.stored_groups(op, stored, codec.groups, codec.name),
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
      found.append(explain(adam.adamw_step, *args, **kwargs))
      return adam.adamw_step.definition(*args, **kwargs)

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


def _adam_state(state: FusedState) -> ScaleByCoatAdamState:
  return state.inner if isinstance(state, LowBitsState) else state


def _decayed(mask: Any, params: optax.Params) -> list[bool]:
  """Whether weights decay, leaf by leaf: `optax.masked`'s reading of a mask."""
  treedef = jax.tree.structure(params)
  if mask is None:
    return [True] * treedef.num_leaves
  mask = mask(params) if callable(mask) else mask
  whole = jax.tree.map(
    lambda chosen, part: jax.tree.map(lambda _: chosen, part), mask, params
  )
  return treedef.flatten_up_to(whole)
