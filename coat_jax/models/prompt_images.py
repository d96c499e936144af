# SPDX-License-Identifier: Apache-2.0
"""Images of prompts that `generate` is given, in the place of their tokens.

The tower runs once for all prompts, without FP8 as all of generation: one scale
for all images would have an answer depend on the images beside it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from coat_jax.models.arguments import check_pixels
from coat_jax.models.cache import without_fp8
from coat_jax.models.decoder import Decoder
from coat_jax.models.placing import Placed, token_rows
from coat_jax.models.vision_language import VisionLanguageModel


def place_images(
  model: VisionLanguageModel,
  tokens: np.ndarray,
  padding: np.ndarray,
  pixel_values: Array | np.ndarray,
) -> Placed:
  """Computes the features that replace the image tokens of prompts.

  Tokens int32 [B, T] are padded on the left by `padding` int32 [B]; images
  [R, I, C, H, W] belong to the first R rows.
  """
  missing = [(0, len(tokens) - len(pixel_values))]
  images = np.pad(pixel_values, missing + [(0, 0)] * (pixel_values.ndim - 1))
  return _place(*nnx.split(model), tokens, padding, images)


@functools.partial(jax.jit, static_argnames=("graph",))
def _place(
  graph: Any, params: Any, tokens: Array, padding: Array, images: Array
) -> Placed:
  model: VisionLanguageModel = without_fp8(nnx.merge(graph, params))
  features = model.features(images)
  is_prompt = jnp.arange(tokens.shape[1])[None] >= padding[:, None]
  # Padding, which is 0, may be the image token.
  own = jnp.where(is_prompt, tokens, -1)
  rows = token_rows(own, model.config.image_token, features.shape[1])
  return Placed(features, rows)


def check_images(
  model: Decoder | VisionLanguageModel,
  prompts: Sequence[Sequence[int]],
  pixel_values: Array | np.ndarray,
) -> None:
  """Raises ValueError if prompts lack the tokens of their images."""
  if not isinstance(model, VisionLanguageModel):
    raise ValueError(
      "generate: images are of a VisionLanguageModel, got pixel_values with a "
      "Decoder; leave them out"
    )
  check_pixels("generate", pixel_values)
  if pixel_values.ndim != 5 or len(pixel_values) != len(prompts):
    raise ValueError(
      "generate: pixel_values must be [B, I, C, H, W], of as many sequences as "
      f"there are prompts, got {pixel_values.shape} of {len(prompts)} prompts; "
      "zeros are in the place of images that a prompt has not"
    )
  each, room = model.config.tokens_each, pixel_values.shape[1]
  for i, prompt in enumerate(prompts):
    count = sum(token == model.config.image_token for token in prompt)
    if count % each or count > room * each:
      raise ValueError(
        f"generate: a prompt must have {each} image tokens for each of at most "
        f"{room} images, got {count} in prompt {i}; repeat the image token"
      )
