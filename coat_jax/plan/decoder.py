# SPDX-License-Identifier: Apache-2.0
"""A decoder, what one GPU works on of it, and what its layers save."""

import dataclasses

from coat_jax.models.config import Remat
from coat_jax.recipe import CoatRecipe, GradDtype

F32, BF16, FP8 = 4, 2, 1  # Bytes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderShape:
  """What of a decoder its memory depends on.

  Attributes:
    num_layers: decoder layers, scanned.
    d_model: width of the residual stream.
    d_ff: width of the gated MLP.
    num_heads: query heads.
    num_kv_heads: key and value heads.
    vocab_size: columns of the output projection.
    head_dim: width of a head; None for d_model / num_heads.
    is_layer_norm: norms subtract the mean, and save one more number.
    norm_has_scale: norms have weights.
    tied_embeddings: the embedding is the output projection too.
  """

  num_layers: int
  d_model: int
  d_ff: int
  num_heads: int
  num_kv_heads: int
  vocab_size: int
  head_dim: int | None = None
  is_layer_norm: bool = False
  norm_has_scale: bool = True
  tied_embeddings: bool = False

  @property
  def heads_width(self) -> int:
    """Columns of the queries."""
    return self.num_heads * (self.head_dim or self.d_model // self.num_heads)

  @property
  def qkv_width(self) -> int:
    """Columns of queries, keys and values."""
    width = self.heads_width // self.num_heads
    return self.heads_width + 2 * self.num_kv_heads * width

  @property
  def matrices(self) -> dict[str, int]:
    """Values of each weight of one layer."""
    return {
      "qkv": self.d_model * self.qkv_width,
      "out": self.heads_width * self.d_model,
      "gate_up": 2 * self.d_model * self.d_ff,
      "down": self.d_ff * self.d_model,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
  """What one GPU works on at a time, and how weights are split.

  Attributes:
    batch: sequences of a microbatch on this GPU; those that share `tensor` with
      it have the same.
    seq: tokens a sequence.
    fsdp: GPUs that a weight's rows are split over.
    tensor: GPUs that heads, columns and the vocabulary are split over.
    is_on_mesh: whether there are other GPUs.
    accumulate: microbatches of a step.
    loss_positions: of each sequence, whose logits are held at a time; None for
      all of them.
    remat: what `jax.checkpoint` keeps of a layer: "dots" the results of its
      products (`dots_with_no_batch_dims_saveable`), "full" its input alone,
      "fp8" both norms' inputs in FP8, "fp8_layer" the layer's input in FP8.
    optimizer_in_backward: a layer's gradients are used as soon as they exist,
      as `coat_jax.step_in_backward` does.
    sums_dtype: of microbatches, in what their gradients are added.
  """

  batch: int
  seq: int
  fsdp: int = 1
  tensor: int = 1
  is_on_mesh: bool = False
  accumulate: int = 1
  loss_positions: int | None = None
  remat: Remat = "none"
  optimizer_in_backward: bool = False
  sums_dtype: GradDtype = "float32"

  @property
  def tokens(self) -> int:
    """Tokens at a time."""
    return self.batch * self.seq


def kept_bytes(
  shape: DecoderShape,
  recipe: CoatRecipe,
  *,
  remat: Remat = "none",
  tensor: int = 1,
) -> float:
  """Bytes per token and layer from the forward to the backward.

  Args:
    shape: of the decoder.
    recipe: of its layers.
    remat, tensor: see `Load`; the bytes are those of one GPU.

  Returns:
    All arrays that grow with the tokens, scales and statistics included, as XLA
    keeps them. Of recipe bf16 that is the attention's output twice, in its own
    layout and as an operand, and what a norm without weights divides once.
  """
  d, f, heads = shape.d_model, shape.d_ff, shape.heads_width

  def groups(width: int) -> int:  # Codes, and a BF16 scale for each group.
    return FP8 * width + BF16 * -(-width // recipe.group_size)

  # Of BF16 layers each GPU has all positions between products, and its columns.
  whole = 1.0 if recipe.linear == "bf16" else 1 / tensor
  if remat == "full":
    return whole * BF16 * d
  if remat == "fp8_layer":
    return groups(d) / tensor
  if remat == "dots":  # The input, and what the products give but the last.
    return whole * BF16 * 2 * d + BF16 * (shape.qkv_width + 2 * f) / tensor
  attention = shape.qkv_width + heads
  log_sum_exp = F32 * shape.num_heads
  if recipe.nonlinear == "bf16":
    operand = BF16 if recipe.linear == "bf16" else FP8
    norm = F32 * (d * (2 if shape.norm_has_scale else 1) + 2) + operand * d
    inner = BF16 * (attention + 5 * f) + log_sum_exp + operand * (heads + f)
    return 2 * whole * norm + inner / tensor

  statistics = F32 * (2 if shape.is_layer_norm else 1)
  norms = 2 * (groups(d) + statistics)
  if remat == "fp8":
    return norms / tensor
  kept = norms + 2 * groups(f) + log_sum_exp
  if recipe.attention == "fp8":
    width = heads // shape.num_heads
    kept += attention // width * groups(width)
  else:
    kept += BF16 * attention
  if recipe.residuals == "coat":  # Norm outputs, SiLU and the product too.
    kept += groups(f) + FP8 * (2 * d + f)
  return kept / tensor
