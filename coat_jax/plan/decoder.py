# SPDX-License-Identifier: Apache-2.0
"""The dimensions of a decoder, the work of one GPU, and what layers save."""

import dataclasses
from typing import Annotated, Any, get_args

from coat_jax.checks import (
  COUNT,
  Range,
  check_choice,
  check_kind,
  check_whole,
)
from coat_jax.layers.qk_norm import NormedOver
from coat_jax.models.config import Remat
from coat_jax.models.ranges import (
  Count,
  Width,
  check_kinds,
  check_numbers,
)
from coat_jax.ops import Activation
from coat_jax.recipe import CoatRecipe, GradDtype

F32, BF16, FP8 = 4, 2, 1  # Bytes per value.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderShape:
  """The dimensions that determine a decoder's memory.

  Attributes:
    num_layers: number of decoder layers, which are scanned.
    d_model: width of the residual stream.
    d_ff: width of the MLP, or of one expert.
    num_heads: number of query heads.
    num_kv_heads: number of key and value heads.
    vocab_size: number of columns of the output projection.
    head_dim: width of a head; None for d_model / num_heads.
    is_layer_norm: whether norms subtract the mean and so save one more number.
    norm_has_scale: whether norms have weights.
    tied_embeddings: whether the embedding is also the output projection.
    pre_norm: whether blocks have a norm before them.
    post_norm: whether blocks have a norm of what they add.
    qk_norm: norm of q and k, as in `layers.Attention`.
    activation: activation function of the MLP's gate.
    is_gated: whether the MLP has a gate; otherwise its one product goes through
      GELU.
    num_experts: number of experts per layer; 0 for a single MLP.
    experts_per_token: number of experts that a token is sent to.

  Raises:
    ValueError: a number outside its range, or another kind of value.
  """

  num_layers: Width
  d_model: Width
  d_ff: Width
  num_heads: Width
  num_kv_heads: Width
  vocab_size: Annotated[int, Range(0, 2**24)]
  head_dim: Width | None = None
  is_layer_norm: bool = False
  norm_has_scale: bool = True
  tied_embeddings: bool = False
  pre_norm: bool = True
  post_norm: bool = False
  qk_norm: NormedOver | None = None
  activation: Activation = "silu"
  is_gated: bool = True
  num_experts: Annotated[int, Range(0, 2**20)] = 0
  experts_per_token: Annotated[int, Range(0, 2**20)] = 0

  def __post_init__(self):
    check_numbers(self)
    check_kinds(self)

  @property
  def heads_width(self) -> int:
    """The number of columns of the queries."""
    return self.num_heads * (self.head_dim or self.d_model // self.num_heads)

  @property
  def qkv_width(self) -> int:
    """The number of columns of queries, keys and values."""
    width = self.heads_width // self.num_heads
    return self.heads_width + 2 * self.num_kv_heads * width

  @property
  def norms(self) -> int:
    """The number of norms per layer that are as wide as the residual stream."""
    return 2 * (self.pre_norm + self.post_norm)

  @property
  def qk_norms(self) -> int:
    """The number of mean squares that the norms of a token's q and k take."""
    heads = self.num_heads + self.num_kv_heads
    return {None: 0, "head": heads, "all": 2}[self.qk_norm]

  @property
  def inner_width(self) -> int:
    """The number of columns of the MLP's first product."""
    return self.d_ff * (2 if self.is_gated else 1)

  @property
  def matrices(self) -> dict[str, int]:
    """The number of values of each weight of one layer."""
    count = self.num_experts or 1
    return {
      "qkv": self.d_model * self.qkv_width,
      "out": self.heads_width * self.d_model,
      "gate_up": count * self.d_model * self.inner_width,
      "down": count * self.d_ff * self.d_model,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
  """The work of one GPU at a time, and how weights are split.

  Attributes:
    batch: sequences of a microbatch on this GPU; GPUs that share `tensor` with
      it have the same sequences.
    seq: tokens per sequence.
    fsdp: number of GPUs over which a weight's rows are split.
    tensor: number of GPUs over which heads, columns and the vocabulary are
      split.
    is_on_mesh: whether there are other GPUs.
    accumulate: number of microbatches per step.
    loss_positions: number of positions of each sequence whose logits are held
      at a time; None for all of them.
    remat: what `jax.checkpoint` keeps of a layer: "dots" keeps the results of
      its products (`dots_with_no_batch_dims_saveable`), "full" only its input,
      "fp8" both norms' inputs in FP8, "fp8_layer" the layer's input in FP8.
    optimizer_in_backward: whether a layer's gradients are used as soon as they
      exist, as in `coat_jax.step_in_backward`.
    sums_dtype: dtype in which the gradients of microbatches are summed.

  Raises:
    ValueError: a number outside its range, or another kind of value.
  """

  batch: Count
  seq: Count
  fsdp: Count = 1
  tensor: Count = 1
  is_on_mesh: bool = False
  accumulate: Count = 1
  loss_positions: Count | None = None
  remat: Remat = "none"
  optimizer_in_backward: bool = False
  sums_dtype: GradDtype = "float32"

  def __post_init__(self):
    check_numbers(self)
    check_kinds(self)

  @property
  def tokens(self) -> int:
    """The number of tokens at a time."""
    return self.batch * self.seq


def check_shape(op: str, shape: Any, recipe: Any) -> None:
  """Raises a TypeError where these are no `DecoderShape` and no recipe."""
  remedy = "pass one, as in DecoderShape(num_layers=2, ...)"
  check_kind(op, "shape", shape, DecoderShape, remedy)
  remedy = "call a preset, as in recipe.coat()"
  check_kind(op, "recipe", recipe, CoatRecipe, remedy)


def kept_bytes(
  shape: DecoderShape,
  recipe: CoatRecipe,
  *,
  remat: Remat = "none",
  tensor: int = 1,
) -> float:
  """Counts the bytes per token and layer that the backward needs.

  Args:
    shape: the decoder's dimensions.
    recipe: the recipe of its layers.
    remat, tensor: see `Load`; the bytes are those of one GPU.

  Returns:
    The bytes of all arrays that grow with the number of tokens, with scales and
    statistics, as XLA keeps them. For recipe bf16 they include the attention's
    output twice, in its own layout and as an operand, and what a norm without
    weights divides once.

  Raises:
    TypeError: `shape` is no `DecoderShape`, or `recipe` no `CoatRecipe`.
    ValueError: an unknown `remat`, or `tensor` below 1.
  """
  check_shape("kept_bytes", shape, recipe)
  check_choice("kept_bytes", "remat", remat, get_args(Remat))
  check_whole("kept_bytes", "tensor", tensor, COUNT, "1 is one GPU")
  d, f, heads = shape.d_model, shape.d_ff, shape.heads_width

  def groups(width: int) -> int:  # Codes, and a BF16 scale per group.
    return FP8 * width + BF16 * -(-width // recipe.group_size)

  # Bytes per value of a saved operand; blocks of 128 have a scale each.
  fp8 = FP8 + (F32 / 128 if recipe.scaling == "block" else 0)
  # In BF16 layers each GPU holds all positions between products, and inside
  # them its own columns.
  whole = 1.0 if recipe.linear == "bf16" else 1 / tensor
  if remat == "full":
    return whole * BF16 * d
  if remat == "fp8_layer":
    return groups(d) / tensor
  if remat == "dots":  # The input and the results of all products but the last.
    streams = 3 if shape.post_norm else 2  # A post norm reads the last one too.
    # Grouped products do not count as dots.
    inner = shape.qkv_width + (0 if shape.num_experts else shape.inner_width)
    return whole * BF16 * streams * d + BF16 * inner / tensor
  attention = shape.qkv_width + heads
  log_sum_exp = F32 * shape.num_heads
  qk_width = shape.qkv_width // 2 + heads // 2  # Without the values.
  copies = shape.experts_per_token
  if recipe.nonlinear == "bf16":
    operand = BF16 if recipe.linear == "bf16" else fp8
    norm = F32 * (d * (2 if shape.norm_has_scale else 1) + 2)
    outer = shape.norms * norm + 2 * operand * d
    inner = BF16 * attention + log_sum_exp + operand * heads
    if shape.qk_norm:
      inner += F32 * 2 * (qk_width + shape.qk_norms)
    if not shape.num_experts:
      of_mlp = 5 if shape.activation == "silu" else 6
      of_mlp = of_mlp if shape.is_gated else 4  # Each factor of GELU.
      inner += (BF16 * of_mlp + operand) * f
      return whole * outer + inner / tensor
    # The rows of every copy, and once more in f32 where p multiplies them; the
    # router's operand in f32, its probabilities and the positions of copies.
    inner += copies * (BF16 * 6 + F32) * f
    router = F32 * (d + shape.num_experts + 4 + 6 * copies) - operand * d
    router += copies * BF16 * d
    return whole * (outer + router) + inner / tensor

  statistics = F32 * (2 if shape.is_layer_norm else 1)
  norms = shape.norms * (groups(d) + statistics)
  if shape.num_experts:  # An MoE block recomputes its norm's statistics.
    norms -= statistics
  if remat == "fp8":  # The first norm's codes, or the input itself.
    return (norms + (0 if shape.pre_norm else BF16 * d)) / tensor
  kept = norms + shape.inner_width // f * (copies or 1) * groups(f)
  kept += log_sum_exp + 4 * copies  # The experts' indices.
  if not shape.pre_norm and recipe.residuals != "coat":
    kept += 2 * fp8 * d  # The operands of the first products.
  if recipe.attention_compute == "fp8":
    kept += FP8 * attention
    if shape.qk_norm:  # The groups of q and k before the norms.
      width = heads // shape.num_heads
      kept += qk_width // width * (groups(width) - FP8 * width)
  elif recipe.attention == "fp8":
    width = heads // shape.num_heads
    kept += attention // width * groups(width)
  else:
    kept += BF16 * attention
    if shape.qk_norm:  # q and k are codes before the norms instead.
      width = heads // shape.num_heads
      kept += qk_width // width * (groups(width) - BF16 * width)
  if recipe.residuals == "coat":  # Norm outputs, SiLU and the product as well.
    kept += fp8 * d
    if not shape.num_experts:
      kept += fp8 * d + (groups(f) + fp8 * f) * shape.is_gated
  return kept / tensor
