# SPDX-License-Identifier: Apache-2.0
"""The shape of a decoder, and the architecture of each family of decoders.

To add a family, add an entry to `FAMILIES`. If the family needs a new option,
add a field to `Family` too.
"""

import dataclasses
from typing import Annotated, Any, Literal

from coat_jax.layers.qk_norm import NormedOver
from coat_jax.models.ranges import (
  NotNegative,
  Positive,
  Range,
  Width,
  check_family,
  check_fields,
)
from coat_jax.models.rope import parse_scaling
from coat_jax.ops import Activation, NormKind
from coat_jax.ops.rope import RopeScaling

# Fields of `ModelConfig` that apply only to families with RoPE or experts.
_OF_ROPE = ["rope_theta", "rope_scaling", "window_rope_theta", "rotary_dim"]
_OF_EXPERTS = [
  *("num_experts", "experts_per_token"),
  *("normalize_experts", "auxiliary_loss"),
]

Remat = Literal["none", "dots", "full", "fp8", "fp8_layer"]
"""Selects what layers recompute in the backward pass.

  none       nothing
  dots       everything except the matmuls of linear layers
  full       everything; only each layer's input is saved
  fp8_layer  everything; each layer's input is rounded to FP8 and saved
  fp8        everything except the last matmuls of attention and of the MLP

"fp8" needs a recipe whose norms save their inputs in FP8, such as coat.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """The architecture that all models of a family share.

  Attributes:
    norm: "rms" for RMSNorm, "layer" for LayerNorm.
    norm_has_scale: whether norms have scales.
    qkv_bias: whether q, k and v have biases.
    pre_norm: whether attention and the MLP start with a norm.
    post_norm: whether attention and the MLP end with a norm, before the
      residual add.
    qk_norm: how q and k are normalized, as for `layers.Attention`.
    activation: activation of the MLP; decoders whose MLP has no gate use
      `ModelConfig.gelu` instead.
    scale_plus_one: whether norms multiply by 1 + scale instead of scale.
    scales_embedding: whether embeddings are multiplied by sqrt(d_model).
    norm_has_bias: whether norms have biases.
    use_bias: whether all linear layers have biases.
    is_gated: whether the MLP has a gate.
    positions: "rope", or "learned" for vectors that are added to embeddings.
    has_experts: whether the MLP is a mixture of experts, `layers.MoE`.

  Raises:
    ValueError: a field has a value that its type does not allow.
  """

  norm: NormKind = "rms"
  norm_has_scale: bool = True
  qkv_bias: bool = False
  pre_norm: bool = True
  post_norm: bool = False
  qk_norm: NormedOver | None = None
  activation: Activation = "silu"
  scale_plus_one: bool = False
  scales_embedding: bool = False
  norm_has_bias: bool = False
  use_bias: bool = False
  is_gated: bool = True
  positions: Literal["rope", "learned"] = "rope"
  has_experts: bool = False

  def __post_init__(self):
    check_fields(self)


_GEMMA2 = Family(
  post_norm=True,
  activation="gelu_tanh",
  scale_plus_one=True,
  scales_embedding=True,
)
FAMILIES = {
  "llama": Family(),
  "olmo": Family(norm="layer", norm_has_scale=False),
  "qwen2": Family(qkv_bias=True),
  "mistral": Family(),
  "qwen3": Family(qk_norm="head"),
  "olmo2": Family(pre_norm=False, post_norm=True, qk_norm="all"),
  "phi3": Family(),
  "gemma2": _GEMMA2,
  "gemma3_text": dataclasses.replace(_GEMMA2, qk_norm="head"),
  "gpt2": Family(
    norm="layer",
    norm_has_bias=True,
    use_bias=True,
    is_gated=False,
    positions="learned",
  ),
  "qwen3_moe": Family(qk_norm="head", has_experts=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """The shape of a decoder.

  Attributes:
    family: llama, olmo, qwen2, mistral, qwen3, olmo2, phi3, gemma2,
      gemma3_text, gpt2 or qwen3_moe (`FAMILIES`).
    num_layers: Number of decoder layers.
    d_model: Width of the residual stream.
    d_ff: Width of the MLP, or of one expert.
    num_heads: Number of query heads.
    num_kv_heads: Number of key/value heads. Must divide `num_heads`.
    vocab_size: Number of tokens in the vocabulary.
    rope_theta: Base of RoPE's frequencies.
    norm_eps: Epsilon that norms add to the mean square or the variance.
    tied_embeddings: Whether the output projection is the transposed embedding.
    clip_qkv: Largest magnitude of q, k and v; None does not clip them.
    head_dim: Width of a head; None for d_model / num_heads.
    window: How many keys a query attends to, including the key of its own
      token; None for all.
    rope_scaling: How RoPE's frequencies are scaled, such as
      `llama3,factor=8,low_freq_factor=1,...`; see `models.parse_scaling`. None
      leaves them unchanged.
    full_every: Every `full_every`-th layer has no window and attends to all
      keys. None if all layers are the same.
    window_rope_theta: Base of RoPE's frequencies in layers with a window. If it
      is set, `rope_scaling` applies only to layers without a window. None if
      RoPE is the same in all layers.
    query_scalar: q k^T is divided by the square root of this number; None for
      head_dim.
    attention_soft_cap: Attention scores become
      soft_cap * tanh(scores / soft_cap); None leaves them unchanged.
    logits_soft_cap: Like `attention_soft_cap`, but for the logits.
    max_positions: Longest sequence, for families with learned positions; None
      for other families, which have no limit.
    rotary_dim: RoPE rotates only the first `rotary_dim` channels of a head;
      None for all.
    gelu: Formula of GELU in families whose MLP has no gate.
    num_experts: Number of experts (gated MLPs) per layer; None if each layer
      has one MLP.
    experts_per_token: How many experts each token is sent to.
    normalize_experts: Whether the weights of a token's experts add up to 1.
    auxiliary_loss: Coefficient of the load-balancing loss that `loss_fn` adds
      in training; 0 for none.

  Raises:
    ValueError: the family is unknown, a number is outside its range, a value
      has the wrong type, a size is not divisible as required, or a field does
      not fit the family or another field.
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
  full_every: Width | None = None
  window_rope_theta: Annotated[float, Range(1, 1e12)] | None = None
  query_scalar: Width | None = None
  attention_soft_cap: Positive | None = None
  logits_soft_cap: Positive | None = None
  max_positions: Width | None = None
  rotary_dim: Width | None = None
  gelu: Literal["tanh", "erf"] = "tanh"
  num_experts: Width | None = None
  experts_per_token: Width | None = None
  normalize_experts: bool = False
  auxiliary_loss: NotNegative = 0.0

  def __post_init__(self):
    check_fields(self)
    check_family(self, FAMILIES)
    parse_scaling(self.rope_scaling)  # Checks it.
    if self.full_every is not None and self.window is None:
      raise ValueError(
        "ModelConfig: full_every needs a window for the other layers, got "
        f"{self.full_every} without a window; pass window too"
      )
    if self.window_rope_theta is not None and self.full_every is None:
      raise ValueError(
        "ModelConfig: window_rope_theta needs full_every, without which all "
        f"layers are the same, got {self.window_rope_theta} alone; pass "
        "full_every too, or use rope_theta instead"
      )
    self._check_choices()
    if self.head_dim is None and self.d_model % (2 * self.num_heads):
      raise ValueError(
        "ModelConfig: d_model must be a multiple of 2 * num_heads, got d_model "
        f"{self.d_model} and num_heads {self.num_heads}; change one, or pass "
        "head_dim"
      )
    if self.head_width % 2:
      raise ValueError(
        f"ModelConfig: head_dim must be even, got {self.head_dim}; pass an "
        "even number"
      )
    size = self.rotary_dim
    if size is not None and (size % 2 or size > self.head_width):
      raise ValueError(
        "ModelConfig: rotary_dim must be even, because RoPE rotates pairs, and "
        f"at most the width of a head, {self.head_width}, got {size}; pass an "
        "even number in this range"
      )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        "ModelConfig: num_heads must be a multiple of num_kv_heads, got "
        f"{self.num_heads} and {self.num_kv_heads}; pass num_kv_heads equal to "
        "num_heads for multi-head attention"
      )

  def _check_choices(self):
    """Raises ValueError if fields do not fit the family."""
    choices, e, k = self.choices, self.num_experts, self.experts_per_token
    has_rope = choices.positions == "rope"
    of_others = {
      *(["max_positions"] if has_rope else _OF_ROPE),
      *(["gelu"] if choices.is_gated else []),
      *([] if choices.has_experts else _OF_EXPERTS),
    }
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name in of_others and value != field.default:
        raise ValueError(
          f"ModelConfig: {field.name} does not apply to family {self.family}, "
          f"got {value}; leave it out"
        )
    if not has_rope and self.max_positions is None:
      raise ValueError(
        f"ModelConfig: {self.family} has learned positions and needs "
        "max_positions, got None; pass the length of the longest sequence"
      )
    if choices.has_experts and (e is None or k is None or k > e):
      raise ValueError(
        f"ModelConfig: {self.family} needs num_experts and experts_per_token, "
        f"which must be at most num_experts, got {e} and {k}; pass both"
      )

  def check_length(
    self, where: str, length: int, *, remedy: str = "pass shorter sequences"
  ) -> None:
    """Raises a ValueError if a sequence is longer than `max_positions`."""
    if self.max_positions is not None and length > self.max_positions:
      raise ValueError(
        f"{where}: {self.family} has learned positions for {self.max_positions}"
        f" tokens, got {length}; {remedy}"
      )

  @property
  def kinds_of_layers(self) -> tuple[int, ...] | None:
    """Each layer's kind: 0 with a window, 1 without; None if all are alike."""
    if self.full_every is None:
      return None
    return tuple(
      int(i % self.full_every == 0) for i in range(1, self.num_layers + 1)
    )

  @property
  def activation(self) -> Activation:
    """The activation of the MLP."""
    if self.choices.is_gated:
      return self.choices.activation
    return "gelu_tanh" if self.gelu == "tanh" else "gelu"

  @property
  def attention_options(self) -> dict[str, Any]:
    """The arguments of `Attention`; tuples have one entry per kind of layer."""
    theta, scaling = self.rope_theta, self.scaling
    if self.choices.positions != "rope":
      theta = None
    if self.window_rope_theta is not None:
      theta, scaling = (self.window_rope_theta, theta), (None, scaling)
    divisor = self.query_scalar
    return dict(
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      rope_theta=theta,
      rope_scaling=scaling,
      rotary_dim=self.rotary_dim,
      window=self.window if self.full_every is None else (self.window, None),
      clip_qkv=self.clip_qkv,
      soft_cap=self.attention_soft_cap,
      query_scale=None if divisor is None else divisor**-0.5,
    )

  @property
  def scaling(self) -> RopeScaling | None:
    """The parsed `rope_scaling`."""
    return parse_scaling(self.rope_scaling)

  @property
  def choices(self) -> Family:
    """The family's entry in `FAMILIES`."""
    return FAMILIES[self.family]

  @property
  def head_width(self) -> int:
    """Width of one head: `head_dim`, or its default."""
    return self.head_dim or self.d_model // self.num_heads
