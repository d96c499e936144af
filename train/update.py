# SPDX-License-Identifier: Apache-2.0
"""What a training step does: gradients, clipping and the optimizer.

`update` computes all gradients and then steps all parameters,
`update_in_backward` each layer's when its gradients exist. Both take the state
of `train.step` and give the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from coat_jax import BackwardStep, step_in_backward
from coat_jax.layers import with_weight_cache
from coat_jax.models import specs
from coat_jax.models.decoder import Decoder, loss_fn, loss_of_hidden
from coat_jax.optimizer.clipping import clip_gradients
from train import weights
from train.config import TrainConfig

# Where a decoder's parameters have their stacked layers.
_STACK = "layers"


def update(
  config: TrainConfig, graph: nnx.GraphDef, optimizer: Any, mesh, state, tokens
) -> tuple[BackwardStep, Any]:
  """Computes all gradients, then steps all parameters.

  Args:
    config: The run.
    graph: From `train.step.build_graph`.
    optimizer: From `train.step.build_optimizer`.
    mesh: From `train.mesh.make_mesh`, or None.
    state: A `train.step.TrainState`.
    tokens: int32 [B, T + 1].

  Returns:
    The step, and the next `exact` of the state.
  """
  loss, grads = _mean_gradients(config, graph, mesh, state.params, tokens)
  is_finite = finite_leaves(grads)
  scale, clip_state, exact = jnp.float32(1), state.clip, state.exact
  if clip := config.optim.clipping():
    grads, clip_state, norm = clip_gradients(clip, state.clip, grads)
  else:
    # By the global norm, in the optimizer's pass over the gradients.
    norm = optax.tree.norm(weights.in_f32(grads))
    largest = config.optim.grad_clip
    scale = jnp.where(norm < largest, 1.0, largest / norm)
  params, optimizer_state = optimizer.apply(
    grads, state.optimizer, state.params, grad_scale=scale
  )
  if config.report_state:
    clipped = jax.tree.map(lambda g: g * scale, weights.in_f32(grads))
    exact = exact_adam(config).update(clipped, exact)[1]
  done = BackwardStep(
    params, optimizer_state, clip_state, loss, norm, is_finite
  )
  return done, exact


def update_in_backward(
  config: TrainConfig, graph: nnx.GraphDef, optimizer: Any, mesh, state, tokens
) -> tuple[BackwardStep, Any]:
  """Steps each layer's parameters when its gradients exist.

  Args and Returns: as of `update`.
  """
  del mesh
  params = state.params
  graph, cache = with_cache(nnx.merge(graph, params))
  model = nnx.merge(graph, params, cache)
  forward = model.layer_forward()
  layer_graph, _, per_layer = nnx.split(model.layers, nnx.Param, ...)

  def with_stack(outer):
    return nnx.merge(graph, outer | {_STACK: params[_STACK]}, cache)

  def layer(layer_params, x, others):
    return forward(x, nnx.merge(layer_graph, layer_params, others))

  def after(outer, x):
    model = with_stack(outer)
    return loss_of_hidden(model, model.norm(x), tokens[:, 1:])

  done = step_in_backward(
    optimizer,
    params,
    state.optimizer,
    before=lambda outer: with_stack(outer).embed(tokens[:, :-1]),
    layer=layer,
    after=after,
    stack=_STACK,
    per_layer=per_layer,
    clip=config.optim.clipping(),
    clip_state=state.clip,
  )
  return done, state.exact


def _mean_gradients(config, graph, mesh, params, tokens):
  """Computes the loss and gradients of a batch, a microbatch at a time.

  Gradients have the dtypes of the weights, their sums over microbatches f32 or
  what `grad_accumulate` says.
  """
  graph, cache = with_cache(nnx.merge(graph, params))

  @jax.value_and_grad
  def share_of(params, tokens):
    loss = loss_fn(nnx.merge(graph, params, cache), tokens)
    return loss / config.accumulate

  if config.accumulate == 1:
    return share_of(params, tokens)
  small = config.grad_accumulate == "bfloat16"
  zeros = jax.tree.map(
    lambda p: jnp.zeros_like(p, dtype=p.dtype if small else jnp.float32), params
  )
  if mesh is not None:
    zeros = jax.lax.with_sharding_constraint(
      zeros, specs.param_shardings(mesh, params)
    )

  def add(total, tokens):
    return jax.tree.map(jnp.add, total, share_of(params, tokens)), None

  start = jnp.float32(0), zeros
  return jax.lax.scan(add, start, microbatches(tokens, config.accumulate))[0]


def microbatches(tokens: jax.Array, accumulate: int) -> jax.Array:
  """Reshapes [B, T + 1] to [accumulate, B / accumulate, T + 1].

  A microbatch has every `accumulate`-th sequence, so that each device takes
  from its own sequences and no token moves.
  """
  split = tokens.reshape(-1, accumulate, tokens.shape[-1])
  return jnp.moveaxis(split, 1, 0)


def with_cache(model: Decoder) -> tuple[nnx.GraphDef, nnx.State]:
  """Fills the model's weight caches; returns all of it but the weights."""
  recipe = model.layers.attention.active_recipe
  graph, _, cache = nnx.split(with_weight_cache(model, recipe), nnx.Param, ...)
  return graph, cache


def exact_adam(config: TrainConfig) -> optax.GradientTransformation:
  return optax.scale_by_adam(config.optim.b1, config.optim.b2)


def finite_leaves(tree) -> jax.Array:
  """Finds which leaves are finite: bool [leaves], in the order of the tree."""
  return jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)])
