# SPDX-License-Identifier: Apache-2.0
"""The patch embedding and the pooling of a vision tower, in BF16."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from coat_jax.layers import MLP, Linear, dot_product_attention
from coat_jax.models.arguments import check_pixels
from coat_jax.models.initialization import Start
from coat_jax.models.vision.config import VisionConfig


class PatchEmbedding(nnx.Module):
  """Embeds the patches of images, prepends the class token, and adds positions.

  The kernel of `linear` is [C P P, D], for patches of P x P pixels and C
  channels. If there is a class token, row 0 of `position_embed` [N, D] is its
  position embedding.
  """

  def __init__(self, config: VisionConfig, start: Start):
    self.config = config
    pixels = config.num_channels * config.patch_size**2
    options = start.options(use_bias=config.choices.patch_bias)
    self.linear = Linear(pixels, config.d_model, **options)
    self.class_embed = nnx.data(None)
    if config.choices.has_class_token:
      self.class_embed = start.param(config.d_model)
    self.position_embed = start.param(config.num_tokens, config.d_model)

  def __call__(self, pixel_values: Array) -> Array:
    """Maps images [B, C, H, W] to [B, N, D]."""
    check_pixels("VisionTower", pixel_values)
    c = self.config
    wanted = (c.num_channels, c.image_size, c.image_size)
    if pixel_values.ndim != 4 or pixel_values.shape[1:] != wanted:
      raise ValueError(
        f"VisionTower: images must be [B, C, H, W] with C, H, W {wanted}, got "
        f"{pixel_values.shape}; resize them, and put channels first"
      )
    x = self.linear(patches(pixel_values, c.patch_size))
    dtype, x = x.dtype, x.astype(jnp.float32)
    if self.class_embed is not None:
      first = self.class_embed[...].astype(jnp.float32)
      shape = (x.shape[0], 1, c.d_model)
      first = jnp.broadcast_to(first[None, None], shape)
      x = jnp.concatenate([first, x], axis=1)
    # Sum in f32, as a decoder does with learned positions.
    positions = self.position_embed[...].astype(jnp.float32)
    return (x + positions[None]).astype(dtype)


def patches(images: Array, size: int) -> Array:
  """Cuts images [B, C, H, W] into patches [B, (H // P) (W // P), C P P]."""
  b, c, *sides = images.shape
  h, w = (side // size for side in sides)
  x = images[:, :, : h * size, : w * size].reshape(b, c, h, size, w, size)
  return x.transpose(0, 2, 4, 1, 3, 5).reshape(b, h * w, c * size * size)


class ClassPool(nnx.Module):
  """Projects ViT's class token to logits.

  If the tower has no classes, computes the tanh of the projection instead.
  """

  def __init__(self, config: VisionConfig, start: Start):
    self.classifies = config.num_classes is not None
    width = config.num_classes or config.d_model
    self.linear = Linear(config.d_model, width, **start.options())

  def __call__(self, hidden: Array) -> Array:
    """Maps normalized states [B, N, D] to [B, D] or logits [B, classes]."""
    y = self.linear(hidden[:, 0])
    return y if self.classifies else jnp.tanh(y)


class AttentionPool(nnx.Module):
  """SigLIP's pooling: a learned query attends to all tokens; an MLP follows.

  The columns of `qkv` are q of all heads, then k, then v.
  """

  def __init__(self, config: VisionConfig, start: Start):
    d = config.d_model
    self.num_heads = config.num_heads
    self.probe = start.param(d)
    self.qkv = Linear(d, 3 * d, **start.options())
    self.out = Linear(d, d, **start.options())
    self.mlp = MLP(
      d,
      config.d_ff,
      activation=config.choices.activation,
      gated=False,
      norm="layer",
      epsilon=config.norm_eps,
      use_norm_bias=True,
      use_bias=True,
      **start.options(),
    )

  def __call__(self, hidden: Array) -> Array:
    """Maps normalized hidden states [B, N, D] to [B, D]."""
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
