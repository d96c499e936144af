# SPDX-License-Identifier: Apache-2.0
"""The parts of a training step: gradients, clipping and the optimizer.

`update` and `update_in_backward` return a `BackwardStep`, and the new f32
moments that `--report-state` needs (`TrainState.exact`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from coat_jax.layers import with_weight_cache
from coat_jax.models.batch import Batch
from coat_jax.models.loss import loss_of_hidden
from coat_jax.models.params import param_shardings
from coat_jax.models.remat import layer_forward
from coat_jax.optimizer import BackwardStep, step_in_backward
from coat_jax.optimizer.clipping import clip_gradients, global_norm
from train import weights
from train.config import TrainConfig
from train.objective import AnyBatch, objective_of, trained

# The path of the stacked layers in a decoder's parameters.
_STACK = "layers"


def update(
  config: TrainConfig,
  graph: nnx.GraphDef,
  optimizer: Any,
  mesh,
  state,
  batch: AnyBatch,
) -> tuple[BackwardStep, Any]:
  """Computes all gradients, and then updates all trained parameters."""
  loss, grads = _mean_gradients(config, graph, mesh, state.params, batch)
  if mesh is not None:
    # Without barriers, XLA fuses the write of the last layer's gradients into
    # the reductions below, and for this it copies all layers' gradients.
    grads = jax.tree.map(jax.lax.optimization_barrier, grads)
  is_finite = finite_leaves(grads)
  scale, clip_state, exact = jnp.float32(1), state.clip, state.exact
  if clip := config.optim.clipping():
    stacks = objective_of(config.model).stacks
    grads, clip_state, norm = clip_gradients(
      clip, state.clip, grads, stack=stacks
    )
  else:
    # Only compute `scale` here; `optimizer.apply` multiplies gradients by it.
    norm = global_norm(grads)
    largest = config.optim.grad_clip
    scale = jnp.where(norm < largest, 1.0, largest / norm)
  params, optimizer_state = optimizer.apply(
    grads, state.optimizer, trained(config, state.params), grad_scale=scale
  )
  params = state.params | params  # Frozen parts do not change.
  if config.report_state:
    clipped = jax.tree.map(lambda g: g * scale, weights.in_f32(grads))
    exact = exact_adam(config).update(clipped, exact)[1]
  done = BackwardStep(
    params, optimizer_state, clip_state, loss, norm, is_finite
  )
  return done, exact


def update_in_backward(
  config: TrainConfig,
  graph: nnx.GraphDef,
  optimizer: Any,
  mesh,
  state,
  batch: Batch,
) -> tuple[BackwardStep, Any]:
  """Updates each layer of a decoder as soon as its gradients are computed."""
  del mesh
  params = state.params
  graph, cache = with_cache(nnx.merge(graph, params))
  model = nnx.merge(graph, params, cache)
  inputs = batch.inputs, batch.input_segments
  forward = layer_forward(model, batch.input_segments)
  layer_graph, _, others = nnx.split(model.layers, nnx.Param, ...)

  def with_stack(outer):
    return nnx.merge(graph, outer | {_STACK: params[_STACK]}, cache)

  def layer(layer_params, carry, per_layer):
    others, kind = per_layer
    return forward(carry, nnx.merge(layer_graph, layer_params, others), kind)

  def after(outer, carry):
    model = with_stack(outer)
    x, routing = carry
    return loss_of_hidden(model, model.norm(x), batch, routing)

  done = step_in_backward(
    optimizer,
    params,
    state.optimizer,
    before=lambda outer: with_stack(outer).start(*inputs),
    layer=layer,
    after=after,
    stack=_STACK,
    per_layer=(others, model.kinds_of_layers),
    clip=config.optim.clipping(),
    clip_state=state.clip,
  )
  return done, state.exact


def _mean_gradients(config, graph, mesh, params, batch):
  """Computes the loss and gradients of a batch, one microbatch at a time."""
  graph, cache = with_cache(nnx.merge(graph, params))
  objective = objective_of(config.model)

  @jax.value_and_grad
  def share_of(own, batch):
    loss = objective.loss(nnx.merge(graph, params | own, cache), batch)
    # `shares`, the targets' weights, add up to 1 over the whole batch. With
    # them, the batch's loss is the sum of the microbatches' losses.
    return loss / config.accumulate if batch.shares is None else loss

  own = trained(config, params)
  if config.accumulate == 1:
    return share_of(own, batch)
  # Gradients have the dtypes of the weights, but their sums may be f32.
  small = config.grad_accumulate == "bfloat16"
  zeros = jax.tree.map(
    lambda p: jnp.zeros_like(p, dtype=p.dtype if small else jnp.float32), own
  )
  if mesh is not None:
    zeros = jax.lax.with_sharding_constraint(zeros, param_shardings(mesh, own))

  def add(total, batch):
    return jax.tree.map(jnp.add, total, share_of(own, batch)), None

  start = jnp.float32(0), zeros
  return jax.lax.scan(add, start, microbatches(batch, config.accumulate))[0]


def microbatches[Each](batch: Each, accumulate: int) -> Each:
  """Reshapes arrays [B, ...] to [accumulate, B / accumulate, ...].

  A microbatch contains every `accumulate`-th row, so it has rows from each
  device, and no rows move between devices.
  """

  def split(x):
    return jnp.moveaxis(x.reshape(-1, accumulate, *x.shape[1:]), 1, 0)

  return jax.tree.map(split, batch)


def with_cache(model: Any) -> tuple[nnx.GraphDef, nnx.State]:
  """Fills weight caches; returns the graph and all state except weights."""
  graph, _, cache = nnx.split(with_weight_cache(model), nnx.Param, ...)
  return graph, cache


def exact_adam(config: TrainConfig) -> optax.GradientTransformation:
  """Builds Adam with f32 moments, the reference for the stored moments."""
  return optax.scale_by_adam(config.optim.b1, config.optim.b2)


def finite_leaves(tree) -> jax.Array:
  """Returns whether each leaf is finite: bool [leaves], in tree order."""
  return jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)])
