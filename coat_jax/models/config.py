# SPDX-License-Identifier: Apache-2.0
"""The shape of a decoder, and what families of models choose.

A family is a row of `FAMILIES`: a new one needs no other line, unless it
chooses what no `Family` can say yet.
"""

import dataclasses
import difflib
from typing import Annotated, Literal

from coat_jax.layers.qk_norm import NormedOver
from coat_jax.models.ranges import (
  Positive,
  Range,
  Width,
  check_numbers,
)
from coat_jax.models.rope import parse_scaling
from coat_jax.ops import NormKind
from coat_jax.ops.rotary import RopeScaling

Remat = Literal["none", "dots", "full", "fp8", "fp8_layer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """What all models of a family have in common.

  Attributes:
    norm: RMSNorm or LayerNorm.
    norm_has_scale: whether norms have weights.
    qkv_bias: whether q, k and v have biases.
    pre_norm: whether blocks have a norm in front.
    post_norm: whether they have one of what they add to their input.
    qk_norm: norm of q and k, as of `layers.Attention`.
  """

  norm: NormKind = "rms"
  norm_has_scale: bool = True
  qkv_bias: bool = False
  pre_norm: bool = True
  post_norm: bool = False
  qk_norm: NormedOver | None = None


FAMILIES = {
  "llama": Family(),
  "olmo": Family(norm="layer", norm_has_scale=False),
  "qwen2": Family(qkv_bias=True),
  "mistral": Family(),
  "qwen3": Family(qk_norm="head"),
  "olmo2": Family(pre_norm=False, post_norm=True, qk_norm="all"),
  "phi3": Family(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """The shape of a decoder.

  Attributes:
    family: A row of `FAMILIES`.
    num_layers: Decoder layers.
    d_model: Width of the residual stream.
    d_ff: Width of the gated MLP.
    num_heads: Query heads.
    num_kv_heads: Key and value heads, each shared by as many query heads.
    vocab_size: Token ids are below it.
    rope_theta: Base of the rotary embedding.
    norm_eps: What norms add to the mean square.
    tied_embeddings: The output layer is the embedding, transposed.
    clip_qkv: Largest magnitude of q, k and v; None leaves them as they are.
    head_dim: Width of a head; None for d_model / num_heads.
    window: How many keys a query sees, its own and those before; None for all.
    rope_scaling: How RoPE's frequencies are stretched, as
      `llama3,factor=8,low_freq_factor=1,...`, see `models.parse_scaling`; None
      for as they are.

  Raises:
    ValueError: an unknown family, a number outside its range, or sizes that do
      not divide each other.
  """

  family: str
  num_layers: Width
  d_model: Width
  d_ff: Width
  num_heads: Width
  num_kv_heads: Width
  vocab_size: Annotated[int, Range(1, 2**24)]
  rope_theta: Annotated[float, Range(1, 1e12)] = 1e4
  norm_eps: Annotated[float, Range(1.2e-38, 1)] = 1e-5
  tied_embeddings: bool = False
  clip_qkv: Positive | None = None
  head_dim: Width | None = None
  window: Width | None = None
  rope_scaling: str | None = None

  def __post_init__(self):
    if self.family not in FAMILIES:
      near = difflib.get_close_matches(self.family, FAMILIES, n=1)
      raise ValueError(
        f"ModelConfig: family must be one of {tuple(FAMILIES)}, got "
        f"{self.family!r}{f'; did you mean {near[0]!r}?' if near else ''}"
      )
    check_numbers(self)
    parse_scaling(self.rope_scaling)  # Checks it.
    if self.head_dim is None and self.d_model % (2 * self.num_heads):
      raise ValueError(
        "ModelConfig: d_model must be an even multiple of num_heads, got "
        f"{self.d_model} and {self.num_heads}; rotary embeddings turn pairs; "
        "or pass head_dim"
      )
    if self.head_width % 2:
      raise ValueError(
        "ModelConfig: head_dim must be even, because rotary embeddings turn "
        f"pairs, got {self.head_dim}"
      )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        "ModelConfig: num_heads must be a multiple of num_kv_heads, got "
        f"{self.num_heads} and {self.num_kv_heads}; pass num_kv_heads equal to "
        "num_heads for attention without sharing"
      )

  @property
  def scaling(self) -> RopeScaling | None:
    """`rope_scaling`, read."""
    return parse_scaling(self.rope_scaling)

  @property
  def choices(self) -> Family:
    """What the family chooses."""
    return FAMILIES[self.family]

  @property
  def head_width(self) -> int:
    """Width of one head: `head_dim`, or what it is by default."""
    return self.head_dim or self.d_model // self.num_heads
