# SPDX-License-Identifier: Apache-2.0
"""The shape of a vision tower, and the architecture of each tower family."""

import dataclasses
from typing import Annotated, Any, Literal

from coat_jax.models.config import Family
from coat_jax.models.ranges import Range, Width, check_family, check_fields
from coat_jax.ops import Activation, NormKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionFamily(Family):
  """The architecture that all towers of a family share.

  Attributes:
    has_class_token: whether a learned token comes before the patches.
    patch_bias: whether the projection of patches has a bias.
    norms_input: whether there is a norm before the first layer.
    norms_output: whether the last norm is applied to the hidden states that a
      tower returns. If False, the norm is applied only before pooling.
    pool: how hidden states become one vector. "class" projects the class token,
      to logits if the tower has classes. "attention" lets a learned query
      attend to all tokens. None returns the normalized class token.
  """

  norm: NormKind = "layer"
  norm_has_bias: bool = True
  use_bias: bool = True
  is_gated: bool = False
  positions: Literal["rope", "learned"] = "learned"
  has_class_token: bool = True
  patch_bias: bool = True
  norms_input: bool = False
  norms_output: bool = True
  pool: Literal["class", "attention"] | None = None


VISION_FAMILIES = {
  "vit": VisionFamily(activation="gelu", pool="class"),
  "clip_vision": VisionFamily(
    activation="gelu_quick",
    patch_bias=False,
    norms_input=True,
    norms_output=False,
  ),
  "siglip_vision": VisionFamily(
    activation="gelu_tanh", has_class_token=False, pool="attention"
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
  """The shape of a vision tower.

  Attributes:
    family: "vit", "clip_vision" or "siglip_vision" (`VISION_FAMILIES`).
    num_layers: number of encoder layers.
    d_model: width of the residual stream, a multiple of 2 * `num_heads`.
    d_ff: width of the MLPs.
    num_heads: number of attention heads.
    image_size: height and width of images. If it is not a multiple of
      `patch_size`, the last rows and columns of pixels are ignored.
    patch_size: height and width of a patch.
    num_channels: number of image channels.
    norm_eps: epsilon that norms add to the variance.
    num_classes: number of classes of a "vit" that classifies images; None for
      all other towers.
    has_pool: whether a "vit" without classes or a "siglip_vision" has weights
      for pooling. Leave it True for all other towers.

  Raises:
    ValueError: the family is unknown, a number is outside its range, a size is
      not divisible as required, or a field applies only to other families.
  """

  family: str
  num_layers: Width
  d_model: Width
  d_ff: Width
  num_heads: Width
  image_size: Width
  patch_size: Width
  num_channels: Width = 3
  norm_eps: Annotated[float, Range(1.2e-38, 1)] = 1e-6
  num_classes: Width | None = None
  has_pool: bool = True

  def __post_init__(self):
    check_fields(self)
    check_family(self, VISION_FAMILIES)
    if self.d_model % (2 * self.num_heads):
      raise ValueError(
        "VisionConfig: d_model must be a multiple of 2 * num_heads, got "
        f"d_model {self.d_model} and num_heads {self.num_heads}; change one of "
        "them"
      )
    if self.patch_size > self.image_size:
      raise ValueError(
        "VisionConfig: patch_size must be at most image_size, got "
        f"{self.patch_size} and {self.image_size}; change one of them"
      )
    if self.num_classes is not None and self.choices.pool != "class":
      raise ValueError(
        "VisionConfig: num_classes applies only to family vit, got "
        f"{self.num_classes} for {self.family}; leave it out"
      )
    if not self.has_pool and (self.num_classes or self.choices.pool is None):
      raise ValueError(
        "VisionConfig: has_pool=False applies only to a siglip_vision and to a "
        f"vit without classes, got family {self.family} and num_classes "
        f"{self.num_classes}; leave has_pool out"
      )

  @property
  def choices(self) -> VisionFamily:
    """The family's entry in `VISION_FAMILIES`."""
    return VISION_FAMILIES[self.family]

  @property
  def activation(self) -> Activation:
    """The activation of the MLP."""
    return self.choices.activation

  @property
  def attention_options(self) -> dict[str, Any]:
    """The arguments of `Attention`; queries attend to all tokens."""
    return dict(causal=False, rope_theta=None)

  @property
  def num_kv_heads(self) -> int:
    """The number of key heads: one per query head."""
    return self.num_heads

  @property
  def head_width(self) -> int:
    """Width of one head."""
    return self.d_model // self.num_heads

  @property
  def num_patches(self) -> int:
    """The number of patches of an image."""
    return (self.image_size // self.patch_size) ** 2

  @property
  def num_tokens(self) -> int:
    """The number N of hidden states per image, counting the class token."""
    return self.num_patches + self.choices.has_class_token
