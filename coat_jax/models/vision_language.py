# SPDX-License-Identifier: Apache-2.0
"""LLaVA, a vision-language model: a decoder that also reads image features.

A vision tower computes features of an image. Two linear layers with GELU
between them project the features to the decoder's width. A text contains one
image token per feature, and each feature replaces the embedding of its token.

The recipe applies only to the layers of the tower and of the decoder.
"""

import dataclasses
from typing import Annotated, Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.layers import Linear
from coat_jax.models.arguments import check_model, check_pixels, check_tokens
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.decoder import Carry, Decoder
from coat_jax.models.initialization import Start, Store, store_params
from coat_jax.models.placing import Placed, token_rows
from coat_jax.models.ranges import check_fields
from coat_jax.models.vision.config import VisionConfig
from coat_jax.models.vision.tower import VisionTower
from coat_jax.numerics.checks import Range, check_kind, check_whole
from coat_jax.recipes import CoatRecipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionLanguageConfig:
  """The shape of a vision-language model.

  Attributes:
    text: shape of the decoder.
    vision: shape of the tower.
    image_token: the token whose embeddings are replaced by image features.
    feature_layer: the layer of the tower whose hidden states are projected,
      numbered like `layer` in `VisionTower.features`.
    feature_select: "default" drops an image's first hidden state, such as
      CLIP's class token; "full" keeps all.
    projector_bias: whether the projector's layers have biases.

  Raises:
    TypeError: `text` or `vision` has the wrong class.
    ValueError: a number is outside its range, or the decoder's family scales
      its embeddings (it is unclear whether to scale image features too).
  """

  text: ModelConfig
  vision: VisionConfig
  image_token: Annotated[int, Range(0, 2**24)]
  feature_layer: Annotated[int, Range(-(2**20), 2**20)] = -2
  feature_select: Literal["default", "full"] = "default"
  projector_bias: bool = True

  def __post_init__(self):
    op = "VisionLanguageConfig"
    check_kind(op, "text", self.text, ModelConfig, "pass a decoder's shape")
    check_kind(op, "vision", self.vision, VisionConfig, "pass a tower's shape")
    check_fields(self)
    if self.text.choices.scales_embedding:
      raise ValueError(
        "VisionLanguageConfig: text must belong to a family that does not "
        f"scale its embeddings, got {self.text.family}; use another decoder"
      )
    remedy = "copy it from the model's config.json"
    layers = self.vision.num_layers
    for name, allowed in (
      ("image_token", Range(0, self.text.vocab_size - 1)),
      ("feature_layer", Range(-layers - 1, layers)),
    ):
      check_whole(op, name, getattr(self, name), allowed, remedy)

  @property
  def family(self) -> str:
    """The name of the family of vision-language models."""
    return "llava"

  @property
  def tokens_each(self) -> int:
    """The number of image tokens for each image."""
    return self.vision.num_tokens - (self.feature_select == "default")


class Projector(nnx.Module):
  """Projects image features to the decoder's width, in BF16.

  Attributes:
    linear_1: `Linear` from the tower's width to the decoder's.
    linear_2: `Linear` from the decoder's width to the same width.
  """

  def __init__(
    self,
    config: VisionLanguageConfig,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters in f32; `config` describes the whole model."""
    remedy = "pass the config of the whole model"
    check_kind("Projector", "config", config, VisionLanguageConfig, remedy)
    width = config.text.d_model
    options = Start(dtype, rngs).options(use_bias=config.projector_bias)
    self.linear_1 = Linear(config.vision.d_model, width, **options)
    self.linear_2 = Linear(width, width, **options)

  def __call__(self, features: Array) -> Array:
    """Maps [..., vision D] to [..., text D]; the exact GELU runs in f32."""
    x = self.linear_1(features)
    return self.linear_2(
      ops.activation_values(x, activation="gelu").astype(x.dtype)
    )


class VisionLanguageModel(nnx.Module):
  """Maps tokens and images to the hidden states before the output projection.

  Example usage::

    >>> from coat_jax import recipes
    >>> from coat_jax.models import (
    ...   ModelConfig, VisionConfig, VisionLanguageConfig, VisionLanguageModel,
    ... )
    >>> from flax import nnx
    >>> import jax.numpy as jnp

    >>> config = VisionLanguageConfig(
    ...   text=ModelConfig(
    ...     family="llama", num_layers=2, d_model=64, d_ff=160, num_heads=4,
    ...     num_kv_heads=2, vocab_size=384,
    ...   ),
    ...   vision=VisionConfig(
    ...     family="clip_vision", num_layers=2, d_model=64, d_ff=128,
    ...     num_heads=4, image_size=28, patch_size=14,
    ...   ),
    ...   image_token=383,
    ... )
    >>> model = VisionLanguageModel(config, recipes.coat(), rngs=nnx.Rngs(0))
    >>> tokens = jnp.full((2, 16), 383).at[:, config.tokens_each :].set(7)
    >>> images = jnp.zeros((2, 1, 3, 28, 28))  # One in each sequence.
    >>> model.logits(tokens, images).shape
    (2, 16, 384)

  Attributes:
    config: the model's shape.
    tower: a `VisionTower`.
    projector: a `Projector`.
    decoder: a `Decoder`.
  """

  def __init__(
    self,
    config: VisionLanguageConfig,
    recipe: CoatRecipe,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    remat: Remat = "none",
    store: Store | None = None,
    rngs: nnx.Rngs,
  ):
    """Initializes the parameters; arguments and errors as for `Decoder`.

    `remat` applies only to the decoder; the tower's layers recompute nothing.
    The paths passed to `store` are relative to the tower or the decoder; the
    projector's paths start with "projector".
    """
    op = "VisionLanguageModel"
    check_model(op, config, VisionLanguageConfig, recipe, dtype, store, rngs)
    self.config = config
    self.tower = VisionTower(
      config.vision, recipe, dtype=dtype, store=store, rngs=rngs
    )
    self.projector = Projector(config, dtype=dtype, rngs=rngs)
    store_params(self.projector, "projector", store)
    self.decoder = Decoder(
      config.text, recipe, dtype=dtype, remat=remat, store=store, rngs=rngs
    )

  def __call__(
    self,
    tokens: Array,
    pixel_values: Array | None = None,
    segments: Array | None = None,
  ) -> Array:
    """Runs everything but the output projection.

    Args:
      tokens: int32 [B, T], with `config.tokens_each` image tokens for each
        image, in the order of the images. Excess image tokens keep their
        embeddings.
      pixel_values: BF16 or f32 [B, I, C, H, W], I images for each sequence,
        resized and normalized. Images without image tokens have no effect, so
        sequences with fewer images can be padded with all-zero images. None for
        text alone.
      segments: as for `Decoder`.

    Returns:
      Hidden states [B, T, D] in `dtype`.

    Raises:
      TypeError: tokens are not integers, or images are not floats.
      ValueError: tokens or images have the wrong shape.
    """
    return self.routed(tokens, pixel_values, segments)[0]

  def routed(
    self,
    tokens: Array,
    pixel_values: Array | None = None,
    segments: Array | None = None,
  ) -> Carry:
    """Returns hidden states and routing statistics, like `Decoder.routed`."""
    check_tokens("VisionLanguageModel", tokens, segments)
    placed = None if pixel_values is None else self.place(tokens, pixel_values)
    return self.decoder.routed(tokens, segments, placed)

  def place(self, tokens: Array, pixel_values: Array) -> Placed:
    """Computes the features that replace image tokens in tokens [B, T]."""
    check_pixels("VisionLanguageModel", pixel_values)
    if len(pixel_values) != len(tokens):
      raise ValueError(
        "VisionLanguageModel: images and tokens must have the same number of "
        f"sequences, got {len(pixel_values)} and {len(tokens)}; pass "
        "pixel_values [B, I, C, H, W] and tokens [B, T]"
      )
    features = self.features(pixel_values)
    rows = token_rows(tokens, self.config.image_token, features.shape[1])
    return Placed(features, rows)

  def logits(
    self,
    tokens: Array,
    pixel_values: Array | None = None,
    segments: Array | None = None,
  ) -> Array:
    """Computes the logits of the next token, f32 [B, T, V]."""
    hidden = self(tokens, pixel_values, segments)
    return self.decoder.logits_of_hidden(hidden)

  def features(self, pixel_values: Array) -> Array:
    """Maps images [B, I, C, H, W] to features [B, I * tokens_each, D]."""
    check_pixels("VisionLanguageModel", pixel_values)
    if pixel_values.ndim != 5:
      raise ValueError(
        "VisionLanguageModel: images must be [B, I, C, H, W], I images per "
        f"sequence, got {pixel_values.shape}; add the missing axis"
      )
    sequences, images = pixel_values.shape[:2]
    features = self.tower.features(
      pixel_values.reshape(-1, *pixel_values.shape[2:]),
      layer=self.config.feature_layer,
    )
    if self.config.feature_select == "default":
      features = features[:, 1:]
    projected = self.projector(features)
    count = images * self.config.tokens_each
    return projected.reshape(sequences, count, projected.shape[-1])
