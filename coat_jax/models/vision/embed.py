# SPDX-License-Identifier: Apache-2.0
"""Turns pixels into tokens: patches, a class token and positions."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import recipe as recipes
from coat_jax.layers import Linear
from coat_jax.models.arguments import check_pixels
from coat_jax.models.vision.config import VisionConfig


class PatchEmbedding(nnx.Module):
  """Turns images into the input of a tower's first layer or of its pre-norm.

  Attributes:
    config: the tower's shape.
    linear: BF16 `Linear` [C P P, D] of patches, whose pixels are ordered by
      channel, row and column.
    class_embed: [D], or None without a class token.
    position_embed: [N, D], starting with the class token's.
  """

  def __init__(
    self,
    config: VisionConfig,
    *,
    dtype: DTypeLike,
    kernel_init: nnx.Initializer,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters in f32.

    Args:
      config: the tower's shape.
      dtype: dtype of activations.
      kernel_init: initializer of everything but biases.
      rngs: its stream `params` initializes the parameters.
    """
    self.config = config
    self.linear = Linear(
      config.num_channels * config.patch_size**2,
      config.d_model,
      recipe=recipes.bf16(),
      use_bias=config.choices.patch_bias,
      dtype=dtype,
      kernel_init=kernel_init,
      rngs=rngs,
    )
    self.class_embed = nnx.data(None)
    if config.choices.has_class_token:
      shape = (config.d_model,)
      self.class_embed = nnx.Param(
        kernel_init(rngs.params(), shape, jnp.float32)
      )
    shape = (config.num_tokens, config.d_model)
    self.position_embed = nnx.Param(
      kernel_init(rngs.params(), shape, jnp.float32)
    )

  def __call__(self, pixel_values: Array) -> Array:
    """Maps images [B, C, H, W] to [B, N, D] in `dtype`.

    Raises:
      TypeError: the images are not a floating array.
      ValueError: the images have another size.
    """
    check_pixels("VisionTower", pixel_values)
    c = self.config
    wanted = (c.num_channels, c.image_size, c.image_size)
    if pixel_values.ndim != 4 or pixel_values.shape[1:] != wanted:
      raise ValueError(
        f"VisionTower: images must be [B, C, H, W] with C, H, W {wanted}, got "
        f"{pixel_values.shape}; resize them, channels first"
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
  """Cuts images [B, C, H, W] into patches [B, (H / P) (W / P), C P P].

  Patches are ordered row by row; rows and columns that do not fill a patch are
  left out.
  """
  b, c, *sides = images.shape
  h, w = (side // size for side in sides)
  x = images[:, :, : h * size, : w * size].reshape(b, c, h, size, w, size)
  return x.transpose(0, 2, 4, 1, 3, 5).reshape(b, h * w, c * size * size)
