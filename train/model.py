# SPDX-License-Identifier: Apache-2.0
"""A decoder language model in two families, built of COAT's blocks.

Llama has RMSNorm with weights, OLMo LayerNorm without parameters; both have
RoPE, grouped key heads, SwiGLU and no biases. Layers are stacked, one parameter
array [num_layers, ...] for all, and scanned. As in the paper the embedding, the
final norm and the output projection stay in BF16, the loss in f32.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from coat_jax import recipe as recipes
from coat_jax.layers import (
  Attention,
  GatedMLP,
  LayerNorm,
  RMSNorm,
  with_weight_cache,
)
from coat_jax.recipe import CoatRecipe
from train.config import ModelConfig

# Positions whose logits are held at a time.
LOSS_CHUNK = 256
_INIT_STDDEV = 0.02


def _norm_options(config: ModelConfig) -> dict:
  is_llama = config.family == "llama"
  return dict(
    norm="rms" if is_llama else "layer",
    epsilon=config.norm_eps,
    use_scale=is_llama,
  )


class DecoderLayer(nnx.Module):
  """Attention and gated MLP, each with its norm and residual add."""

  def __init__(
    self, config: ModelConfig, recipe: CoatRecipe, *, rngs: nnx.Rngs
  ):
    # Projections that write to the residual stream start smaller, so that its
    # variance does not grow with depth.
    out_stddev = _INIT_STDDEV * (2 * config.num_layers) ** -0.5
    shared = dict(
      recipe=recipe,
      kernel_init=nnx.initializers.normal(_INIT_STDDEV),
      out_init=nnx.initializers.normal(out_stddev),
      rngs=rngs,
      **_norm_options(config),
    )
    self.attention = Attention(
      config.d_model,
      config.num_heads,
      num_kv_heads=config.num_kv_heads,
      rope_theta=config.rope_theta,
      clip_qkv=config.clip_qkv,
      **shared,
    )
    self.mlp = GatedMLP(config.d_model, config.d_ff, **shared)

  def __call__(self, x: Array) -> Array:
    """[B, T, D] to [B, T, D], BF16."""
    return self.mlp(self.attention(x))


class Decoder(nnx.Module):
  """Tokens to the hidden states in front of the output projection.

  Attributes:
    embedding: [V, D].
    layers: a DecoderLayer whose parameters have a leading axis of layers.
    norm: the final norm.
    head: [D, V], or None where the embedding is tied.
  """

  def __init__(
    self, config: ModelConfig, recipe: CoatRecipe, *, rngs: nnx.Rngs
  ):
    init = nnx.initializers.normal(_INIT_STDDEV)
    shape = (config.vocab_size, config.d_model)
    self.embedding = nnx.Param(init(rngs.params(), shape, jnp.float32))

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap
    def stack(rngs: nnx.Rngs) -> DecoderLayer:
      return DecoderLayer(config, recipe, rngs=rngs)

    self.layers = stack(rngs)
    options = _norm_options(config)
    norm = {"rms": RMSNorm, "layer": LayerNorm}[options.pop("norm")]
    self.norm = norm(
      config.d_model,
      recipe=recipes.bf16(),
      use_bias=False,
      rngs=rngs,
      **options,
    )
    self.head = nnx.data(None)
    if not config.tied_embeddings:
      self.head = nnx.Param(init(rngs.params(), shape[::-1], jnp.float32))

  def __call__(self, tokens: Array) -> Array:
    """Tokens int32 [B, T] to hidden states BF16 [B, T, D]."""
    x = self.embedding[...].astype(jnp.bfloat16)[tokens]

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
      return layer(x)

    recipe = self.layers.attention.active_recipe
    return self.norm(forward(x, with_weight_cache(self.layers, recipe)))

  def output_weight(self) -> Array:
    """The weight [D, V] of the output projection, BF16."""
    if self.head is None:
      return self.embedding[...].T.astype(jnp.bfloat16)
    return self.head[...].astype(jnp.bfloat16)


def loss_fn(model: Decoder, tokens: Array) -> Array:
  """Mean cross-entropy of the next token.

  Logits are computed for `LOSS_CHUNK` positions of all sequences at a time and
  again in the backward, so that [B, T, V] is never held. Chunks run along the
  sequence axis: chunks of flattened tokens would gather a sharded batch.

  Args:
    model: a Decoder.
    tokens: int32 [B, T + 1].

  Returns:
    f32 scalar, nats per token.
  """
  inputs, targets = tokens[:, :-1], tokens[:, 1:]
  hidden, weight = model(inputs), model.output_weight()
  batch, length = targets.shape
  chunk = min(LOSS_CHUNK, length)
  padding = -length % chunk
  hidden = jnp.pad(hidden, [(0, 0), (0, padding), (0, 0)])
  counted = jnp.pad(jnp.ones_like(targets), [(0, 0), (0, padding)])
  targets = jnp.pad(targets, [(0, 0), (0, padding)])

  @jax.checkpoint
  def chunk_loss(total, chunk_of):
    hidden, targets, counted = chunk_of
    logits = jnp.einsum(
      "btd,dv->btv", hidden, weight, preferred_element_type=jnp.float32
    )
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    nats = jax.nn.logsumexp(logits, axis=-1) - at_target[..., 0]
    return total + jnp.sum(nats * counted), None

  chunks = jax.tree.map(
    lambda x: jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0),
    (hidden, targets, counted),
  )
  total, _ = jax.lax.scan(chunk_loss, jnp.float32(0), chunks)
  return total / (batch * length)
