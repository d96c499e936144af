# SPDX-License-Identifier: Apache-2.0
"""Runs the optimizer's step inside the backward pass of stacked layers.

In an ordinary step, the gradients of all parameters are in memory at the same
time, 4 bytes per parameter in f32. Here the backward scan passes each layer's
gradients to the optimizer immediately, and overwrites the layer's weights and
moments (in place if the caller donates them).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr

from coat_jax.numerics.checks import a, check_function, check_kind
from coat_jax.optimizer.clipping import (
  Clipping,
  ClipState,
  global_norm,
  is_stacked,
  own_numbers,
)
from coat_jax.optimizer.leafwise import check_plain
from coat_jax.optimizer.masks import leaf_paths


class BackwardStep(NamedTuple):
  """The result of `step_in_backward`.

  Attributes:
    params: the new parameters.
    state: the optimizer's new state.
    clip_state: the new state of `Clipping`; () without clipping.
    loss: f32 [], computed with the parameters before the step.
    grad_norm: f32 [], the global norm of the gradients before clipping.
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
  optimizer: Any,
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
  """Runs a training step that applies each layer's gradients immediately.

  The new parameters and state are the same as after an ordinary step with the
  same gradients. Two things are impossible: accumulating gradients over
  microbatches (each microbatch would be a separate step), and clipping by the
  global norm of this step (which is known only at the end).

  Args:
    optimizer: the result of `fused_coat_adamw`, `fused_coat_lion` or
      `leafwise`, or any optimizer with a `begin` like that of
      `FusedTransformation`.
    params: a tree with one subtree of stacked layers, each leaf [layers, ...].
    state: the optimizer's state.
    before: `before(outer)` runs what precedes the stack and returns the first
      layer's input. `outer` is `params` with None instead of stacked leaves.
    layer: `layer(layer_params, x)` runs one layer and returns the next x, an
      array or a tree of arrays, with the shapes and dtypes of x. If `per_layer`
      is passed, its slice for the layer is a third argument. To store fewer
      activations, wrap `layer` in `jax.checkpoint`. If the backward pass reads
      an array that `layer` closes over, each layer stores a copy of it.
    after: `after(outer, x)` runs what follows the stack and returns the loss,
      f32 []. It may use the same parameters as `before`, such as an embedding.
    stack: path of the stacked subtree in `params`, such as `model/layers`.
    per_layer: another tree of arrays [layers, ...], not differentiated.
    clip: clips gradients by the norms of earlier steps; None for no clipping.
    clip_state: the `clip_state` that the previous step returned; in the first
      step, `clip.init(params, stack=stack)`.

  Returns:
    A `BackwardStep`.

  Raises:
    TypeError: `optimizer` has no `begin` (optax's optimizers have none);
      `before`, `layer` or `after` is not a function; `stack` is not a string;
      `clip` is not a `Clipping`.
    ValueError: the optimizer cannot step leaf by leaf; no leaf is below
      `stack`, or the leaves below it differ in the length of their first axis;
      only one of `clip` and `clip_state` is passed; `per_layer` has a different
      number of layers; a layer changes the shape or dtype of x; the loss is not
      a scalar; a function closes over a parameter.

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
  op = "step_in_backward"
  if not hasattr(optimizer, "begin"):
    check_plain(op, state)
    raise TypeError(
      f"{op}: optimizer must step leaf by leaf, got "
      f"{a(type(optimizer))} without begin; pass fused_coat_adamw, "
      "fused_coat_lion or leafwise(optimizer)"
    )
  for name, part in (("before", before), ("layer", layer), ("after", after)):
    check_function(op, name, part, "pass that part of the model's forward")
  check_kind(op, "stack", stack, str, "pass a path in params")
  if clip is not None:
    check_kind(op, "clip", clip, Clipping, "pass Clipping(), or None")
  if (clip is None) == isinstance(clip_state, ClipState):
    raise ValueError(
      f"{op}: clip and clip_state must be passed together, got only one; pass "
      "both (in the first step, clip_state=clip.init(params, stack=stack)), or "
      "neither"
    )
  steps = optimizer.begin(params, state)
  found = _Stack(params, stack)
  outer = found.outer
  for leaf in jax.tree.leaves(per_layer):
    if jnp.shape(leaf)[:1] != (found.num_layers,):
      raise ValueError(
        f"{op}: per_layer must contain arrays [layers, ...] for the stack's "
        f"{found.num_layers} layers, got {jnp.shape(leaf)}; pass one row per "
        "layer"
      )

  # Forward.
  is_read = _arguments_read(_trace("before", before, params, outer))
  x, before_vjp = jax.vjp(before, outer)
  run = _LayerPasses(layer, params)
  x, residuals = lax.scan(run.forward, x, (found.layers, per_layer))
  _trace("after", after, params, outer, x)
  loss, after_vjp = jax.vjp(after, outer, x)
  if loss.shape:
    raise ValueError(
      f"{op}: after must return a scalar, got {loss.shape}; return the mean of "
      "the loss"
    )
  after_grads, dx = after_vjp(jnp.ones_like(loss))

  # Pair each leaf (its weight and state) with its number r (see `Clipping`), or
  # with None if nothing is clipped.
  last: Any = clip_state
  owns = [None] * len(steps.leaves)
  if clip is not None:
    owns = own_numbers(last, params, stack)
  old = list(zip(steps.leaves, owns, strict=True))
  new: dict[int, Any] = {}
  norms: dict[int, Array] = {}

  def step(i, old, g, index=None):
    """Updates leaf i, or one layer of it, by its clipped gradient."""
    leaf, own = old
    norm = global_norm(g)
    scale = None
    if clip is not None:
      mine = own if index is None else own[index]
      scale, mine = clip.scale(last, mine, norm)
      own = mine if index is None else own.at[index].set(mine)
    leaf = steps.step(i, leaf, g, layer=index, grad_scale=scale)
    return (leaf, own), norm

  # First update what `before` does not use, such as an output layer's weight.
  outer_grads = dict(
    zip(found.others, jax.tree.leaves(after_grads), strict=True)
  )
  is_used = dict(zip(found.others, is_read, strict=True))
  for i in found.others:
    if not is_used[i]:
      new[i], norms[i] = step(i, old[i], outer_grads[i])
  dx, new = lax.optimization_barrier((dx, new))

  # Then differentiate the stack. Lists below have one entry per stacked leaf.

  def backward(carry, inputs):
    dx, stacked = carry
    index, residuals, per_layer = inputs
    weights = [jax.tree.leaves(weight)[0] for (weight, _), _ in stacked]
    layer_params = found.structure.unflatten(
      [lax.dynamic_index_in_dim(p, index, keepdims=False) for p in weights]
    )
    # The step below overwrites the stacked weights, so all operations that read
    # the weights must run first; otherwise XLA might copy the stacks.
    grads, dx = lax.optimization_barrier(
      run.backward(residuals, layer_params, per_layer, dx)
    )
    leaves = zip(found.stacked, stacked, jax.tree.leaves(grads), strict=True)
    done = [step(i, each, g[None], index) for i, each, g in leaves]
    return (dx, [each for each, _ in done]), [each for _, each in done]

  inputs = jnp.arange(found.num_layers, dtype=jnp.int32), residuals, per_layer
  (dx, stacked), layer_norms = lax.scan(
    backward, (dx, [old[i] for i in found.stacked]), inputs, reverse=True
  )
  new |= zip(found.stacked, stacked, strict=True)
  for i, of_layers in zip(found.stacked, layer_norms, strict=True):
    norms[i] = global_norm(of_layers)

  # Last, update parameters that `before` uses; `after` may use them too.
  (before_grads,) = before_vjp(dx)
  for i, g in zip(found.others, jax.tree.leaves(before_grads), strict=True):
    if is_used[i]:
      new[i], norms[i] = step(i, old[i], outer_grads[i] + g)

  in_order = range(len(old))
  new_params, new_state = steps.end([new[i][0] for i in in_order])
  in_leaves = [norms[i] for i in in_order]
  norm = global_norm(in_leaves)
  if clip is not None:
    clip_state = clip.next_state(last, [new[i][1] for i in in_order], norm)
  # A leaf's norm is finite if and only if all of its values are.
  is_finite = jnp.isfinite(jnp.stack(in_leaves))
  return BackwardStep(new_params, new_state, clip_state, loss, norm, is_finite)


class _Stack:
  """The stacked layers, and the indices of stacked leaves and of all others."""

  def __init__(self, params: Any, stack: str):
    below = is_stacked(params, stack)
    leaves, treedef = jax.tree.flatten(params)
    self.stacked = [i for i, is_below in enumerate(below) if is_below]
    self.others = [i for i, is_below in enumerate(below) if not is_below]
    sizes = {leaves[i].shape[:1] for i in self.stacked}
    if len(sizes) != 1 or sizes == {()}:
      found = ["none" if size == () else str(*size) for size in sorted(sizes)]
      raise ValueError(
        "step_in_backward: parameters of the stack must have first axes of the "
        "same length, the number of layers, got "
        f"{', '.join(found) or 'no parameters'} below {stack!r}; set stack to "
        "the path of the stacked layers' subtree"
      )
    [[self.num_layers]] = sizes
    self.layers = params
    for word in stack.split("/"):
      if isinstance(self.layers, Mapping):
        self.layers = self.layers[word]
      else:
        self.layers = getattr(self.layers, word)
    self.structure = jax.tree.structure(self.layers)
    for i in self.stacked:
      leaves[i] = None
    self.outer = treedef.unflatten(leaves)


class _LayerPasses:
  """Runs the forward and the backward pass of one layer separately.

  Saves the arrays that the backward pass reads (the leaves of what `jax.vjp`
  returns), except the layer's parameters and `per_layer`.
  """

  def __init__(self, layer: Callable[..., Any], params: Any):
    self._layer, self._params = layer, params
    self._structure: Any = None
    self._places: list[int | None] = []

  def forward(self, x, inputs):
    """Returns the next layer's x, and the arrays to save."""
    layer_params, per_layer = inputs
    extra = () if per_layer is None else (per_layer,)
    _trace("layer", self._layer, self._params, layer_params, x, *extra)
    y, vjp = jax.vjp(
      lambda params, x: self._layer(params, x, *extra), layer_params, x
    )
    given, found = (jax.tree.map(jax.typeof, each) for each in (x, y))
    if jax.tree.flatten(found) != jax.tree.flatten(given):
      raise ValueError(
        "step_in_backward: a layer must return the next x with the structure, "
        f"shapes and dtypes of x, got {found} for {given}; change the layer's "
        "result (cast it if only the dtype differs)"
      )
    leaves, self._structure = jax.tree.flatten(vjp)
    known = jax.tree.leaves((layer_params, per_layer))
    place = {id(leaf): n for n, leaf in enumerate(known)}
    self._places = [place.get(id(leaf)) for leaf in leaves]
    saved = zip(leaves, self._places, strict=True)
    return y, [leaf for leaf, place in saved if place is None]

  def backward(self, saved, layer_params, per_layer, dy):
    """Returns the gradients of the layer's parameters and of its input."""
    known = jax.tree.leaves((layer_params, per_layer))
    rest = iter(saved)
    leaves = [next(rest) if n is None else known[n] for n in self._places]
    return jax.tree.unflatten(self._structure, leaves)(dy)


_SHARED = (
  "let before return x together with the values that all layers share, and let "
  "each layer return these values too"
)
_OUTER = "read it from outer; only layer reads the stack's parameters"


def _trace(name: str, f: Callable[..., Any], params: Any, *args: Any) -> Any:
  """Returns a user function's jaxpr; raises if it closes over a parameter."""
  closed = jax.make_jaxpr(f)(*args)
  constants = {id(x) for x in _constants(closed)}
  for path, leaf in leaf_paths(params):
    if id(leaf) in constants:
      raise ValueError(
        f"step_in_backward: {name} must read parameters from its arguments, "
        f"got a function that closes over {path!r}, which would get no "
        f"gradient; {_SHARED if name == 'layer' else _OUTER}"
      )
  return closed.jaxpr


def _constants(closed: Any) -> list[Any]:
  """Lists all arrays that a traced function closes over."""
  found = list(closed.consts)
  for equation in closed.eqns:
    for value in jax.tree.leaves(tuple(equation.params.values())):
      if isinstance(value, ClosedJaxpr):
        found += _constants(value)
  return found


def _arguments_read(jaxpr: Any) -> list[bool]:
  """Lists for each leaf of the arguments whether a traced function reads it."""
  read = {id(v) for equation in jaxpr.eqns for v in equation.invars}
  read |= {id(v) for v in jaxpr.outvars}
  return [id(v) in read for v in jaxpr.invars]
