# SPDX-License-Identifier: Apache-2.0
"""Runs the optimizer's step inside the backward pass of stacked layers.

Ordinarily all gradients exist before the first is used: 4 bytes per parameter
in f32. Here the backward scan passes each layer's gradients to the optimizer
immediately, and writes the layer's weights and moments back where they were
read. So only one layer's gradients exist at a time:

  forward   scan: x_l+1, and what layer l saves for its backward
  after     the loss; its gradients with respect to x_L and to parameters
            outside the stack, which are stepped at once unless `before` uses
            them
  backward  scan from the last layer to the first; the carry is the gradient of
            x, all stacked weights and all that the optimizer stores for them
  before    gradients of what precedes the stack, and their step

The carry is updated in place if the caller donates parameters and state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax

from coat_jax.numerics.checks import check_function, check_kind
from coat_jax.optimizer.clipping import Clipping, ClipState, global_norm
from coat_jax.optimizer.leafwise import check_not_encoded
from coat_jax.optimizer.stacked_layers import (
  LayerPasses,
  StackSplit,
  arguments_read,
  trace,
)
from coat_jax.optimizer.step import LeafSteps


@runtime_checkable
class LeafwiseOptimizer(Protocol):
  """An optimizer that takes its step leaf by leaf."""

  @property
  def begin(self) -> Callable[[Any, Any], LeafSteps]:
    """The function `begin(params, state)`, which returns `LeafSteps`."""
    ...


class BackwardStep(NamedTuple):
  """The result of `step_in_backward`.

  Attributes:
    params: the new parameters.
    state: the optimizer's new state.
    clip_state: the new state of `Clipping`; () without clipping.
    loss: f32 [], at the parameters before the step.
    grad_norm: f32 [], global norm of the gradients before clipping.
    is_finite: bool [leaves], whether each leaf's gradient is finite, in the
      order of the tree.
  """

  params: Any
  state: Any
  clip_state: ClipState | tuple[()]
  loss: Array
  grad_norm: Array
  is_finite: Array


def step_in_backward(
  optimizer: LeafwiseOptimizer,
  params: Any,
  state: Any,
  *,
  before: Callable[[Any], Any],
  layer: Callable[..., Any],
  after: Callable[[Any, Any], Array],
  stack: str = "layers",
  per_layer: Any = None,
  clip: Clipping | None = None,
  clip_state: ClipState | tuple[()] = (),
) -> BackwardStep:
  """Runs a training step that uses each layer's gradients immediately.

  The new parameters and state are those of an ordinary step with the same
  gradients. Two things are impossible: summing gradients over microbatches, as
  each would be a step, and clipping by the global norm, which is only known at
  the end.

  Args:
    optimizer: `fused_coat_adamw`, `fused_coat_lion`, `leafwise` of an optax
      transformation, or any optimizer with such a `begin`.
    params: a tree with one subtree of stacked layers, each leaf [layers, ...].
    state: the optimizer's state.
    before: `before(outer)`, what precedes the stack; it returns the first
      layer's input. `outer` is `params` with None for the leaves of the stack.
    layer: `layer(layer_params, x)`, one layer; it returns x of the same shape
      and dtype, an array or a tree of them, such as the residual stream and a
      sum over layers. With `per_layer` it is called as
      `layer(layer_params, x, per_layer_slice)`. It saves less if wrapped in
      `jax.checkpoint`. It should not close over an array that depends on x's
      shape, because that is saved once per layer. Parameters that it closes
      over get no gradient from it.
    after: `after(outer, x)`, what follows the stack; it returns the loss, f32
      []. It may use what `before` uses, such as an embedding.
    stack: the path of the subtree in `params`, such as `model/layers`.
    per_layer: another tree of arrays [layers, ...], not differentiated.
    clip: clips gradients by the norms of earlier steps; None does not clip.
    clip_state: the last step's; before the first step
      `clip.init(params, stack=stack)`.

  Returns:
    A `BackwardStep`.

  Raises:
    TypeError: `optimizer` has no `begin`, like those of optax; `before`,
      `layer` or `after` is not a function, or `clip` not a `Clipping`.
    ValueError: the optimizer is `coat_adamw`, `coat_lion` or `encoded`, which
      cannot step leaf by leaf; no leaf is below `stack`, or some differ in
      their first axis; `clip` has no state; a layer does not return what it
      takes, or the loss is not a scalar; a function closes over a leaf of
      `params`.

  Examples:
    >>> optimizer = fused_coat_adamw(3e-4)
    >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
    ... def step(params, state, tokens):
    ...   done = step_in_backward(
    ...     optimizer, params, state,
    ...     before=lambda outer: outer["embedding"][tokens[:, :-1]],
    ...     layer=block,
    ...     after=lambda outer, x: loss(x @ outer["head"], tokens[:, 1:]),
    ...   )
    ...   return done.params, done.state, done.loss
  """
  _check_optimizer(optimizer, state)
  op = "step_in_backward"
  for name, part in (("before", before), ("layer", layer), ("after", after)):
    check_function(op, name, part, "pass that part of the model's forward")
  if clip is not None:
    check_kind(op, "clip", clip, Clipping, "pass Clipping(), or None")
  if (clip is None) == isinstance(clip_state, ClipState):
    raise ValueError(
      "step_in_backward: clip and clip_state belong together, got only one of "
      "them; pass clip_state=clip.init(params), then that of the last step"
    )
  steps = optimizer.begin(params, state)
  split = StackSplit(params, stack)
  outer = split.outer(params)

  for leaf in jax.tree.leaves(per_layer):
    if jnp.shape(leaf)[:1] != (split.num_layers,):
      raise ValueError(
        f"{op}: per_layer must be arrays [layers, ...] of the stack's "
        f"{split.num_layers} layers, got {jnp.shape(leaf)}; pass one row for "
        "each"
      )

  # Forward.
  is_read = arguments_read(trace("before", before, params, outer))
  x, before_vjp = jax.vjp(before, outer)
  run = LayerPasses(layer, params)
  x, residuals = lax.scan(run.forward, x, (split.layers(params), per_layer))
  trace("after", after, params, outer, x)
  loss, after_vjp = jax.vjp(after, outer, x)
  if loss.shape:
    raise ValueError(
      f"step_in_backward: after must return a scalar, got {loss.shape}; return "
      "the mean of the loss"
    )
  after_grads, dx = after_vjp(jnp.ones_like(loss))
  after_grads = dict(
    zip(split.others, jax.tree.leaves(after_grads), strict=True)
  )

  # First step the parameters that only the loss uses (an output projection).
  own = _running_norms(clip, clip_state, len(steps.weights))
  slices = _Slices(steps, clip, clip_state)
  done: dict[int, _Slice] = {}
  seen: dict[int, _Seen] = {}

  def step_leaf(i, g):
    whole = _Slice(steps.weights[i], steps.stored[i], own[i])
    done[i], seen[i] = slices.step(i, whole, g)

  is_used = dict(zip(split.others, is_read, strict=True))
  for i in split.others:
    if not is_used[i]:
      step_leaf(i, after_grads[i])
  dx, done = lax.optimization_barrier((dx, done))

  # Backward through the stack: lists have an entry for each stacked leaf.

  def backward(carry, inputs):
    dx, stacked = carry
    index, residuals, per_layer = inputs
    parameters = [jax.tree.leaves(each.weight)[0] for each in stacked]
    layer_params = split.layer_of(
      [lax.dynamic_index_in_dim(p, index, keepdims=False) for p in parameters]
    )
    # Weights are written where they are read, so whatever reads them must run
    # first, or XLA would copy stacks. Today XLA finds that order by itself.
    grads, dx = lax.optimization_barrier(
      run.backward(residuals, layer_params, per_layer, dx)
    )
    new, found = [], []
    for i, each, g in zip(
      split.stacked, stacked, jax.tree.leaves(grads), strict=True
    ):
      after_step, seen = slices.step(i, each, g[None], index)
      new.append(after_step)
      found.append(seen)
    return (dx, new), found

  start = [
    _Slice(steps.weights[i], steps.stored[i], own[i]) for i in split.stacked
  ]
  inputs = jnp.arange(split.num_layers, dtype=jnp.int32), residuals, per_layer
  (dx, stacked), found = lax.scan(backward, (dx, start), inputs, reverse=True)

  for i, new, all_seen in zip(split.stacked, stacked, found, strict=True):
    done[i] = new
    seen[i] = _Seen(global_norm(all_seen.norm), jnp.all(all_seen.is_finite))

  # Last step what precedes the stack, which the loss may use too.
  (before_grads,) = before_vjp(dx)
  for i, g in zip(split.others, jax.tree.leaves(before_grads), strict=True):
    if is_used[i]:
      step_leaf(i, after_grads[i] + g)

  in_order = [done[i] for i in range(len(done))]
  new_params, new_state = steps.end(
    [each.weight for each in in_order], [each.stored for each in in_order]
  )
  norm = global_norm([seen[i].norm for i in range(len(seen))])
  if clip is not None and isinstance(clip_state, ClipState):
    clip_state = clip.next_state(
      clip_state, [each.own for each in in_order], norm
    )
  return BackwardStep(
    new_params,
    new_state,
    clip_state,
    loss,
    norm,
    jnp.stack([seen[i].is_finite for i in range(len(seen))]),
  )


def _check_optimizer(optimizer: Any, state: Any) -> None:
  if isinstance(optimizer, LeafwiseOptimizer):
    return
  check_not_encoded("step_in_backward", state)
  raise TypeError(
    "step_in_backward: optimizer must step leaf by leaf, got a "
    f"{type(optimizer).__name__} without begin; pass fused_coat_adamw, "
    "fused_coat_lion or leafwise(optimizer)"
  )


class _Slice(NamedTuple):
  """A leaf; or all layers of a stacked leaf, or one of them.

  Attributes:
    weight, stored: as in `LeafSteps`.
    own: what clipping keeps for it, or None.
  """

  weight: Any
  stored: Any
  own: Array | None


class _Seen(NamedTuple):
  """The norm of a slice's gradient, and whether the gradient is finite."""

  norm: Array
  is_finite: Array


class _Slices(NamedTuple):
  """Clips and steps slices."""

  steps: LeafSteps
  clip: Clipping | None
  clip_state: Any

  def step(
    self, i: int, old: _Slice, g: Array, layer: Array | None = None
  ) -> tuple[_Slice, _Seen]:
    norm = global_norm(g)
    seen = _Seen(norm, jnp.all(jnp.isfinite(g)))
    scale, own = None, old.own
    if self.clip is not None:
      assert own is not None  # It is kept if gradients are clipped.
      mine = own if layer is None else own[layer]
      scale, mine = self.clip.scale(self.clip_state, mine, norm)
      own = mine if layer is None else own.at[layer].set(mine)
    weight, stored = self.steps.step(
      i, old.weight, g, old.stored, layer=layer, grad_scale=scale
    )
    return _Slice(weight, stored, own), seen


def _running_norms(clip, clip_state, count: int) -> list[Array | None]:
  if clip is None:
    return [None] * count
  return jax.tree.leaves(clip_state.own)
