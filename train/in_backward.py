# SPDX-License-Identifier: Apache-2.0
"""A decoder's training step in which gradients are used as soon as they exist.

`coat_jax.step_in_backward` with a `Decoder` cut at its stack of layers.
"""

from typing import Any

import jax
from flax import nnx

from coat_jax import BackwardStep, Clipping, step_in_backward
from coat_jax.models.decoder import loss_of_hidden
from coat_jax.optimizer.in_backward import LeafwiseOptimizer

STACK = "layers"


def step_decoder(
  optimizer: LeafwiseOptimizer,
  params: Any,
  state: Any,
  tokens: jax.Array,
  *,
  graph: nnx.GraphDef,
  cache: nnx.State,
  clip: Clipping,
  clip_state: Any,
) -> BackwardStep:
  """Takes one step.

  Args:
    optimizer: From `train.step.build_optimizer`.
    params: The decoder's, nested dicts.
    state: The optimizer's.
    tokens: int32 [B, T + 1].
    graph: The decoder's, with its caches of weights.
    cache: What it has beside its parameters.
    clip: How gradients are clipped.
    clip_state: What that remembers.

  Returns:
    As `coat_jax.step_in_backward`.
  """
  model = nnx.merge(graph, params, cache)
  forward = model.layer_forward()
  layer_graph, _, per_layer = nnx.split(model.layers, nnx.Param, ...)

  def with_stack(outer):
    return nnx.merge(graph, outer | {STACK: params[STACK]}, cache)

  def layer(layer_params, x, others):
    return forward(x, nnx.merge(layer_graph, layer_params, others))

  def after(outer, x):
    model = with_stack(outer)
    return loss_of_hidden(model, model.norm(x), tokens[:, 1:])

  return step_in_backward(
    optimizer,
    params,
    state,
    before=lambda outer: with_stack(outer).embed(tokens[:, :-1]),
    layer=layer,
    after=after,
    stack=STACK,
    per_layer=per_layer,
    clip=clip,
    clip_state=clip_state,
  )
