# SPDX-License-Identifier: Apache-2.0
"""Checks and pads the prompts of `generate`, and computes image features."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from coat_jax.models.arguments import check_pixels
from coat_jax.models.cache import without_fp8
from coat_jax.models.decoder import Decoder
from coat_jax.models.placing import Placed
from coat_jax.models.vision_language import VisionLanguageModel
from coat_jax.numerics.checks import refuse


def check_prompts(model: Decoder, prompts: Sequence[Sequence[int]]) -> None:
  """Raises an error if there are no prompts, or any is empty or invalid."""
  if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
    remedy = "pass a list of token ids for each prompt"
    refuse(TypeError, "generate", "prompts", "a list", prompts, remedy)
  if not len(prompts):
    raise ValueError("generate: needs at least one prompt, got none; pass one")
  for i, prompt in enumerate(prompts):
    if not check_ids(f"prompt {i}", prompt, model):
      raise ValueError(
        "generate: a prompt must have at least one token, got none in prompt "
        f"{i}; pass the token that begins a text"
      )


def check_ids(name: str, tokens: Any, model: Decoder) -> int:
  """Returns the number of tokens; raises an error unless they are token ids."""
  remedy, vocab_size = "use the model's tokenizer", model.embedding.shape[0]
  try:
    found = np.asarray(tokens)
  except (TypeError, ValueError):  # Nested lists of different lengths.
    found = np.asarray("")
  if found.ndim != 1 or found.size and found.dtype.kind not in "iu":
    refuse(TypeError, "generate", name, "token ids", tokens, remedy)
  if found.size and not 0 <= found.min() <= found.max() < vocab_size:
    raise ValueError(
      f"generate: the ids of {name} must be at least 0 and below the "
      f"vocabulary size {vocab_size}, got {found.min()} to {found.max()}; "
      f"{remedy}"
    )
  return found.size


def padded(
  prompts: Sequence[Sequence[int]], length: int, model: Decoder
) -> tuple[np.ndarray, np.ndarray]:
  """Pads prompts on the left with -1, and adds rows if a mesh requires them.

  Returns tokens, int32 [rows, length], and the number of padding tokens in each
  row, int32 [rows]. Added rows have length - 1 padding tokens.
  """
  rows = _rows(model, len(prompts))
  tokens = np.full((rows, length), -1, np.int32)
  padding = np.full(rows, length - 1, np.int32)
  for i, prompt in enumerate(prompts):
    padding[i] = length - len(prompt)
    tokens[i, padding[i] :] = prompt
  return tokens, padding


def _rows(model: Decoder, count: int) -> int:
  """Rounds `count` rows up to a multiple of the number of batch shards."""
  if (axes := model.axes) is None:
    return count
  shape = jax.sharding.get_abstract_mesh().shape
  if missing := [name for name in axes.tokens if name not in shape]:
    raise ValueError(
      f"generate: the model's recipe names the axis {missing[0]!r} of a mesh, "
      f"got {tuple(shape) or 'no mesh'}; call generate under jax.set_mesh of a "
      "mesh with this axis, or make the model with a recipe without axes"
    )
  devices = math.prod(shape[name] for name in axes.batch)
  return -(-count // devices) * devices


def place_images(
  model: VisionLanguageModel,
  tokens: np.ndarray,
  pixel_values: Array | np.ndarray,
) -> Placed:
  """Computes the features that replace image tokens in tokens int32 [B, T].

  The images, `pixel_values` [R, I, C, H, W], belong to the first R sequences.
  """
  missing = [(0, len(tokens) - len(pixel_values))]
  images = np.pad(pixel_values, missing + [(0, 0)] * (pixel_values.ndim - 1))
  return _place(*nnx.split(model), tokens, images)


@functools.partial(jax.jit, static_argnames=("graph",))
def _place(graph: Any, params: Any, tokens: Array, images: Array) -> Placed:
  return without_fp8(nnx.merge(graph, params)).place(tokens, images)


def check_images(
  model: Decoder | VisionLanguageModel,
  prompts: Sequence[Sequence[int]],
  pixel_values: Array | np.ndarray,
) -> None:
  """Raises an error unless images are valid and match the image tokens."""
  if not isinstance(model, VisionLanguageModel):
    raise ValueError(
      "generate: images need a VisionLanguageModel, got pixel_values with a "
      "Decoder; leave pixel_values out"
    )
  check_pixels("generate", pixel_values)
  if pixel_values.ndim != 5 or len(pixel_values) != len(prompts):
    raise ValueError(
      "generate: pixel_values must be [B, I, C, H, W], one row per prompt, got "
      f"{pixel_values.shape} for {len(prompts)} prompts; if some have fewer "
      "images, add all-zero images"
    )
  each, room = model.config.tokens_each, pixel_values.shape[1]
  for i, prompt in enumerate(prompts):
    count = sum(token == model.config.image_token for token in prompt)
    if count % each or count > room * each:
      raise ValueError(
        f"generate: a prompt must have {each} image tokens for each of at most "
        f"{room} images, got {count} in prompt {i}; repeat the image token "
        f"{each} times per image"
      )
