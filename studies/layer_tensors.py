# SPDX-License-Identifier: Apache-2.0
"""Captures the activations and gradients inside the layers of a Llama.

This file implements the layer again, in f32 and with the library's functions,
so that it can return each tensor that recipes quantize. To compute the
gradients of these tensors, it adds zeros to them and differentiates with
respect to the zeros.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from coat_jax import recipes
from coat_jax.layers.activation import plain_activation
from coat_jax.layers.dot_product_attention import dot_product_attention
from coat_jax.layers.linear import linear
from coat_jax.layers.norm import norm
from coat_jax.layers.rope import split_heads
from coat_jax.models.batch import Batch
from coat_jax.models.config import ModelConfig
from coat_jax.models.decoder import Decoder
from coat_jax.models.loss import loss_of_hidden

_PLAIN = recipes.bf16()


class LayerTensors(NamedTuple):
  """Tensors of all layers, f32 [layers, batch, tokens, features].

  Attributes:
    values: tensors by name. "attention's norm" and "MLP's norm" are the inputs
      of norms. "into q, k, v", "into gate, up", "into projection" and "into
      down" are the inputs of matmuls; "q, k, v", "gate, up", "projection" and
      "down" are their outputs. "q", "k" and "v" are the heads after RoPE.
    gradients: the gradients of these tensors.
    loss: loss of the batch, in nats.
  """

  values: dict[str, Array]
  gradients: dict[str, Array]
  loss: Array


def capture(config: ModelConfig, params: Any, tokens: Array) -> LayerTensors:
  """Runs a Llama forward and backward in f32, and returns its layers' tensors.

  `params` are the parameters of a Decoder as nested dicts, and `tokens` is
  int32 [batch, seq + 1].
  """
  if config.family != "llama":
    raise ValueError(
      f"capture: the model must be a llama, got {config.family!r}; pass a "
      "preset of the family llama"
    )
  graph = nnx.split(
    nnx.eval_shape(
      lambda: Decoder(config, _PLAIN, dtype=jnp.float32, rngs=nnx.Rngs(0))
    ),
    nnx.Param,
  )[0]

  def loss(probes, params):
    model = nnx.merge(graph, params)
    batch = Batch.of(tokens)

    def step(x, own):
      weights, probe = own
      found = {}

      def tap(name: str, x: Array) -> Array:
        found[name] = x
        return x if probe is None else x + probe[name]

      return _layer(x, weights, model, tap), found

    x, _ = model.start(batch.inputs)
    x, values = jax.lax.scan(step, x, (params["layers"], probes))
    return loss_of_hidden(model, model.norm(x), batch), values

  @jax.jit
  def run(params):
    _, shapes = jax.eval_shape(lambda: loss(None, params))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    both = jax.value_and_grad(loss, has_aux=True)(zeros, params)
    (value, values), gradients = both
    return LayerTensors(values, gradients, value)

  return run(params)


def _layer(x: Array, weights: Any, model: Decoder, tap: Callable) -> Array:
  """Runs a layer, replacing each of its tensors x with `tap(name, x)`."""
  module, config = model.layers.attention, model.config
  attention, mlp = weights["attention"], weights["mlp"]
  heads = module.middle.heads

  def normed(x, weights):
    scale = weights["scale"]
    return norm(x, scale, kind="rms", eps=config.norm_eps, recipe=_PLAIN)

  def product(x, weights):
    return linear(x, weights["kernel"], recipe=_PLAIN)

  x = tap("attention's norm", x)
  y = tap("into q, k, v", normed(x, attention["qkv"]["norm"]))
  qkv = tap("q, k, v", product(y, attention["qkv"]["linear"]))
  places = jnp.arange(x.shape[1], dtype=jnp.int32)
  q, k, v = (
    tap(name, _merged(y)).reshape(y.shape)
    for name, y in zip("qkv", split_heads(qkv, places, heads), strict=True)
  )
  y = _merged(dot_product_attention(q, k, v, recipe=_PLAIN))
  y = product(tap("into projection", y), attention["out"])
  x = tap("MLP's norm", x + tap("projection", y))
  y = tap("into gate, up", normed(x, mlp["norm"]))
  y = product(y, mlp["gate_up"])
  y = tap("gate, up", _merged(y)).reshape(y.shape)
  y = plain_activation((y[..., 0, :], y[..., 1, :]), "silu")
  return x + tap("down", product(tap("into down", y), mlp["down"]))


def _merged(x: Array) -> Array:
  """Reshapes [B, T, n, m] to [B, T, n * m]."""
  return x.reshape(*x.shape[:2], -1)
