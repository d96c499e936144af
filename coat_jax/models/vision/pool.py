# SPDX-License-Identifier: Apache-2.0
"""Pools hidden states into one vector per image, at the end of a tower.

Pooling runs in BF16, like a decoder's output projection: only one token per
image is left.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import recipe as recipes
from coat_jax.layers import MLP, Linear, dot_product_attention
from coat_jax.models.vision.config import VisionConfig


class ClassPool(nnx.Module):
  """ViT's pooling: projects the class token, with tanh unless it classifies.

  Attributes:
    linear: `Linear` [D, D], or [D, classes].
  """

  def __init__(
    self,
    config: VisionConfig,
    *,
    dtype: DTypeLike,
    kernel_init: nnx.Initializer,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters; arguments as for `PatchEmbedding`."""
    self.classifies = config.num_classes is not None
    self.linear = Linear(
      config.d_model,
      config.num_classes or config.d_model,
      recipe=recipes.bf16(),
      dtype=dtype,
      kernel_init=kernel_init,
      rngs=rngs,
    )

  def __call__(self, hidden: Array) -> Array:
    """Maps normed hidden states [B, N, D] to [B, D] or logits [B, classes]."""
    y = self.linear(hidden[:, 0])
    return y if self.classifies else jnp.tanh(y)


class AttentionPool(nnx.Module):
  """SigLIP's pooling: a learned query attends to all tokens, then an MLP block.

  Attributes:
    probe: [D], the query's token.
    qkv: `Linear` [D, 3 D]: q, k and v one after the other, each with its heads
      in order.
    out: `Linear` [D, D].
    mlp: `MLP` with a LayerNorm and a residual add.
  """

  def __init__(
    self,
    config: VisionConfig,
    *,
    dtype: DTypeLike,
    kernel_init: nnx.Initializer,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters; arguments as for `PatchEmbedding`."""
    d = config.d_model
    self.num_heads = config.num_heads
    self.probe = nnx.Param(kernel_init(rngs.params(), (d,), jnp.float32))

    def linear(width):
      return Linear(
        d,
        width,
        recipe=recipes.bf16(),
        dtype=dtype,
        kernel_init=kernel_init,
        rngs=rngs,
      )

    self.qkv, self.out = linear(3 * d), linear(d)
    self.mlp = MLP(
      d,
      config.d_ff,
      approximate=config.choices.approximate,
      recipe=recipes.bf16(),
      norm="layer",
      epsilon=config.norm_eps,
      use_norm_bias=True,
      use_bias=True,
      dtype=dtype,
      kernel_init=kernel_init,
      rngs=rngs,
    )

  def __call__(self, hidden: Array) -> Array:
    """Maps normed hidden states [B, N, D] to [B, D]."""
    b, n, d = hidden.shape
    probe = self.probe[...].astype(hidden.dtype)
    x = jnp.broadcast_to(probe[None, None], (b, 1, d))
    q = jnp.split(self.qkv(x), 3, axis=-1)[0]
    _, k, v = jnp.split(self.qkv(hidden), 3, axis=-1)
    heads = (self.num_heads, d // self.num_heads)
    y = dot_product_attention(
      q.reshape(b, 1, *heads),
      k.reshape(b, n, *heads),
      v.reshape(b, n, *heads),
      causal=False,
    )
    return self.mlp(self.out(y.reshape(b, 1, d)))[:, 0]
