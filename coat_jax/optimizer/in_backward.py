# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step inside the backward pass of stacked layers.

Ordinarily all gradients exist before the first is used: 4 bytes a parameter in
f32. Here the backward scan hands each layer's gradients to the optimizer at
once and writes its weights and moments where they were read, so that gradients
of one layer exist at a time:

  forward   scan: x_l+1, and what layer l saves for its backward
  after     the loss; its gradients of x_L and of parameters outside the stack,
            which are stepped at once if `before` does not use them
  backward  scan from the last layer to the first; its carry is the gradient of
            x, all stacked weights and all that the optimizer stores of them
  before    gradients of what precedes the stack, and their step

The carry is updated in place where the caller donates parameters and state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax

from coat_jax.checks import check_function, check_kind
from coat_jax.optimizer.clipping import Clipping, ClipState, global_norm
from coat_jax.optimizer.leafwise import check_not_encoded
from coat_jax.optimizer.leaves import LeafSteps
from coat_jax.optimizer.stacked_layers import (
  LayerPasses,
  StackSplit,
  arguments_read,
  trace,
)


@runtime_checkable
class LeafwiseOptimizer(Protocol):
  """An optimizer that takes its step leaf by leaf."""

  @property
  def begin(self) -> Callable[[Any, Any], LeafSteps]:
    """`begin(params, state)`."""
    ...


class BackwardStep(NamedTuple):
  """What `step_in_backward` returns.

  Attributes:
    params: the new parameters.
    state: the optimizer's new state.
    clip_state: as `Clipping` has it; () without clipping.
    loss: f32 [], at the parameters before the step.
    grad_norm: f32 [], global norm of the gradients before clipping.
    is_finite: bool [leaves], whether each leaf's gradient is, in the order of
      the tree.
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
  """A training step that uses each layer's gradients as soon as they exist.

  The new parameters and state are those of an ordinary step with the same
  gradients. What cannot be had: gradients of several microbatches added up, for
  each would be a step, and clipping by their global norm, known at the end.

  Args:
    optimizer: `fused_coat_adamw`, `fused_coat_lion`, `leafwise` of an optax
      transformation, or any that has their `begin`.
    params: a tree with one subtree of stacked layers, each leaf [layers, ...].
    state: the optimizer's.
    before: `before(outer)`, what precedes the stack: the first layer's input.
      `outer` is `params` with None for the leaves of the stack.
    layer: `layer(layer_params, x)`, one layer: x of the same shape and dtype,
      an array or a tree of them, such as the residual stream and a sum over
      layers; with `per_layer`, `layer(layer_params, x, per_layer_slice)`. In
      `jax.checkpoint` it saves less. It should close over no array that depends
      on x's shape: such a one is saved once a layer. What it computes from
      parameters that it closes over gets no gradient.
    after: `after(outer, x)`, what follows the stack: the loss, f32 []. It may
      use what `before` uses, such as an embedding.
    stack: where the subtree is in `params`: its path, as `model/layers`.
    per_layer: further tree of arrays [layers, ...], not differentiated.
    clip: scales gradients first, by what earlier steps had; None for not at
      all.
    clip_state: the last step's; at first `clip.init(params, stack=stack)`.

  Returns:
    A `BackwardStep`.

  Raises:
    TypeError: `optimizer` has no `begin`, as optax's; `before`, `layer` or
      `after` is no function, or `clip` no `Clipping`.
    ValueError: it is `coat_adamw`, `coat_lion` or `encoded`, whose step is not
      leaf by leaf; no leaf is below `stack`, or some differ in their first
      axis; `clip` without its state; a layer that does not return what it
      takes, or a loss that is no scalar; a function that closes over a leaf of
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

  # What only the loss uses, an output projection, before all else.
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
    # Weights are written where they are read, so all that reads them is to come
    # first. XLA finds that order by itself today; else it would copy stacks.
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

  # What precedes the stack, and the loss may use too.
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
  """A leaf, or of a stacked leaf all layers or one.

  Attributes:
    weight, stored: as of `LeafSteps`.
    own: what clipping keeps of it, or None.
  """

  weight: Any
  stored: Any
  own: Array | None


class _Seen(NamedTuple):
  """What is known of a slice's gradient: its norm, whether it is finite."""

  norm: Array
  is_finite: Array


class _Slices(NamedTuple):
  """Steps slices."""

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
      assert own is not None  # Kept wherever gradients are clipped.
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
