# SPDX-License-Identifier: Apache-2.0
"""Computes the memory needed while one layer is differentiated.

This memory is needed in addition to what all layers save. Each function below
adds up the arrays that are alive together at a possible peak, given the order
in which XLA runs operations. We derived these sums from XLA's live ranges in
steps that were compiled for H200s. The sums assume that
  * layers are scanned, so what a layer saved is copied out of stacked arrays;
  * on one GPU, XLA computes the gradients of all weights at a layer's end;
  * on a mesh, XLA sums these gradients over GPUs while the next layer runs.

The tests in tests/train/memory list the arrays of these sums one by one.
"""

import dataclasses

from coat_jax.models import VisionConfig
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.recipes import CoatRecipe
from train.memory.count import saved_bytes

F32, BF16 = 4, 2  # Bytes per value.
# In steps that we compiled, XLA ordered the sums of gradients differently if
# weights were split over more GPUs than this.
_FEW = 8
# XLA sums all gradients of a layer at once if their sums have at most this many
# bytes on each GPU (ReduceScatterCombiner's default).
_COMBINED = 30 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """One GPU's part of a layer of a decoder or a vision tower."""

  model: ModelConfig | VisionConfig
  recipe: CoatRecipe
  tokens: int  # Number of tokens that the GPU processes at a time.
  value: int = F32  # Bytes per value of weights and gradients; 0 if frozen.
  fsdp: int = 1  # Number of GPUs over which a weight's rows are split.
  tensor: int = 1  # Number of GPUs over which heads and columns are split.
  expert: int = 1  # Number of GPUs over which the experts are distributed.
  is_on_mesh: bool = False  # Whether the step runs on several GPUs.
  remat: Remat = "none"
  optimizer_in_backward: bool = False

  @property
  def experts(self) -> int:
    return getattr(self.model, "num_experts", None) or 0

  @property
  def copies(self) -> int:
    return getattr(self.model, "experts_per_token", None) or 0

  @property
  def weights(self) -> dict[str, float]:
    """Counts the values of each weight after its rows are gathered."""
    model, experts = self.model, self.experts or 1
    heads = model.num_heads * model.head_width
    is_gated = getattr(model.choices, "is_gated", False)
    qkv = heads + 2 * model.num_kv_heads * model.head_width
    found = {
      "qkv": model.d_model * qkv,
      "out": heads * model.d_model,
      "gate_up": experts * model.d_model * model.d_ff * (1 + is_gated),
      "down": experts * model.d_ff * model.d_model,
    }
    if self.expert > 1:
      found["gate_up"] /= self.expert
      found["down"] /= self.expert
    return {name: count / self.tensor for name, count in found.items()}

  @property
  def unit(self) -> float:
    """Counts the bytes of the residual stream in BF16."""
    return BF16 * self.model.d_model * self.tokens / self.tensor

  @property
  def key(self) -> float:
    """Counts the bytes of the keys in BF16; the values have as many."""
    width = self.model.num_kv_heads * self.model.head_width
    return BF16 * width * self.tokens / self.tensor

  @property
  def inner(self) -> float:
    """Counts the values of gate for all copies of tokens; up has as many."""
    # A token has one copy for each of its experts. If experts are distributed,
    # each GPU reserves memory for the copies of all GPUs' tokens.
    copies = (self.copies or 1) * self.expert
    return self.tokens * self.model.d_ff * copies / self.tensor

  @property
  def rows(self) -> int:
    """Counts the bytes of all copies of tokens in BF16; 0 without experts."""
    copies = self.copies * self.expert
    return BF16 * self.model.d_model * self.tokens * copies

  @property
  def grad_value(self) -> int:
    """Returns the bytes per value of a gradient before GPUs sum it."""
    axes = self.recipe.axes
    in_bf16 = axes is not None and axes.grad_dtype == "bfloat16"
    return BF16 if in_bf16 else F32

  @property
  def unsummed(self) -> float:
    """Counts gradient values that GPUs have not summed at the next MLP peak."""
    every = sum(self.weights.values())
    if self.fsdp <= _FEW or self.sums_at_once:
      return every
    # With many GPUs, XLA first waits until gate_up's gradient is summed.
    return every - self.weights["gate_up"]

  @property
  def unsummed_last(self) -> float:
    """Counts unsummed gradient values at the embedding gradient's peak."""
    if self.fsdp <= _FEW and not self.sums_at_once:
      return self.weights["gate_up"]
    return self.unsummed

  @property
  def sums_at_once(self) -> bool:
    """Returns whether XLA sums all gradients of a layer at the same time."""
    every = sum(self.weights.values())
    return self.grad_value * every / self.fsdp <= _COMBINED

  @property
  def is_recomputed(self) -> bool:
    """Returns whether a second forward pass recomputes what the layer saves."""
    return self.remat in ("full", "fp8_layer")

  @property
  def recomputes_experts(self) -> bool:
    """Returns whether the experts' gate and up are recomputed, not saved."""
    return bool(self.experts) and (self.remat == "fp8" or self.expert > 1)

  @property
  def gathered(self) -> float:
    """Returns the memory for a gathered weight, relative to its size."""
    # On a mesh, there are the gathered rows and a copy of the GPU's own rows.
    # On one GPU, XLA reads weights in place.
    return 1 + 1 / self.fsdp if self.is_on_mesh else 0

  @property
  def code(self) -> float:
    """Counts the bytes of an FP8 value, including its share of a BF16 scale."""
    return 1 + BF16 / self.recipe.group_size

  def saved(self, remat: Remat = "none") -> float:
    """Counts the bytes that the layer saves for all tokens."""
    return self.tokens * saved_bytes(
      self.model,
      self.recipe,
      remat=remat,
      tensor=self.tensor,
      saves_copies=self.expert == 1,
    )


def layer_backward(layer: Layer) -> float:
  """Returns a layer's peak bytes in addition to what all layers save."""
  if layer.recipe.nonlinear == "fp8":
    return _coat_backward(layer)
  is_bf16 = layer.recipe.linear == "bf16"
  backward = _bf16_backward if is_bf16 else _fp8_linear_backward
  if layer.expert > 1:
    backward = _distributed_backward
  if not layer.is_recomputed:
    return backward(layer)
  if is_bf16 and layer.expert == 1:
    return _bf16_recomputed(layer)
  if not layer.is_on_mesh or layer.expert > 1:
    return layer.saved() + backward(layer)
  # The second forward pass allocates gate and up, queries, keys, values, the
  # output and matmuls' operands. With experts, it also allocates copies of
  # tokens and their gradients.
  again = 4 * layer.inner + 4.5 * layer.unit + 2 * layer.key + 2 * layer.rows
  return backward(layer) + again


# The coefficients below are for a gated MLP. GPT-2's MLP has no gate, but the
# sums still predict its compiled peak within 1 %. Instead of arrays for a gate,
# XLA keeps a BF16 gradient, from which it later computes a bias's gradient.
#
# "Product" below is the elementwise product of the activated gate and up.


def _bf16_backward(layer: Layer) -> float:
  inner, unit, weights = layer.inner, layer.unit, layer.weights
  if not layer.is_on_mesh:
    # The MLP's peak has, in BF16:
    #   the gradients of gate, up and product
    #   an array as large as the weight gate_up
    #   two arrays as large as the residual stream
    #   the copies of tokens, and their gradients
    # Attention's peak has gate, up and product, which are not freed yet, and
    # arrays such as q, k, v, the output and their gradients (12 * unit).
    mlp = BF16 * (3 * inner + weights["gate_up"]) + 2 * unit + 2 * layer.rows
    return max(mlp, BF16 * 3 * inner + 12 * unit)
  # On a mesh, the sums contain gathered weights, and copies of the operands
  # that matmuls save, but no copies of tokens.
  mlp = BF16 * (4 * inner + layer.gathered * weights["gate_up"])
  attention = BF16 * (3 * inner + layer.gathered * weights["qkv"])
  return max(mlp, attention + 6 * unit) + 10 * unit


def _bf16_recomputed(layer: Layer) -> float:
  """Counts the bytes while a recomputed BF16 layer is differentiated."""
  inner, unit, weights = layer.inner, layer.unit, layer.weights
  is_gated = getattr(layer.model.choices, "is_gated", False)
  gate_up = (1 + is_gated) * inner
  # The MLP's peak has, in BF16:
  #   gate and up, their gradients, and the product's gradient
  #   all weights except down
  #   queries, attention's output and four arrays of the residual stream
  #   keys and values
  # Attention's peak lacks the product's gradient and the weight gate_up. It has
  # the gradients of attention's output, queries, keys and values instead.
  mlp = BF16 * (2 * gate_up + inner + weights["gate_up"])
  mlp += 6 * unit + 2 * layer.key
  if layer.experts:
    # Add copies of tokens and their gradients (2 * rows), about 2 * unit for q,
    # k and v before RoPE, and 2 * rows for other arrays, which needed less in
    # the steps that we compiled.
    mlp += 4 * layer.rows + 2 * unit
  attention = BF16 * 2 * gate_up + 8 * unit + 4 * layer.key
  if not is_gated:  # GPT-2's biases and LayerNorms need further arrays.
    attention += 4 * unit
  return max(mlp, attention) + BF16 * (weights["qkv"] + weights["out"])


def _distributed_backward(layer: Layer) -> float:
  """Counts a layer's bytes if experts that compute in BF16 are distributed."""
  # The peak is in the MLP. The layer saves nothing for the copies of tokens, so
  # the peak has, in BF16:
  #   gate, up and product, and their gradients
  #   the gathered weight gate_up
  #   two arrays as large as the residual stream
  # XLA puts copies that GPUs exchange into a memory of their own, and does not
  # report it as part of the peak.
  gathered = layer.gathered * layer.weights["gate_up"]
  return BF16 * (6 * layer.inner + gathered) + 2 * layer.unit


def _fp8_linear_backward(layer: Layer) -> float:
  inner, unit, weights = layer.inner, layer.unit, layer.weights
  # The MLP's peak has the gradients of gate and up, each in BF16 and twice in
  # E5M2 (in row layout and in column layout).
  mlp = 8 * inner + 1.5 * unit
  if layer.is_on_mesh:
    gradients = layer.grad_value * sum(weights.values())
    return mlp + gradients + layer.gathered * weights["gate_up"]
  # The peak is either in the MLP, with copies of the operands that matmuls
  # save, or at the layer's end, with gate_up's gradient and fewer other arrays.
  last = layer.value * weights["gate_up"] + 4 * inner + 2 * unit
  return max(mlp + inner + 3.5 * unit, last)


def _coat_backward(layer: Layer) -> float:
  if layer.is_on_mesh:
    return _coat_on_mesh(layer)
  every, stream = sum(layer.weights.values()), 1.5 * layer.unit
  mlp = _coat_mlp(layer)
  if not layer.recomputes_experts:
    mlp += _saved_in_mlp(layer)
  # XLA computes the gradients of all four weights last. With experts, the
  # largest other array is then a BF16 copy of gate_up's gradient.
  last = 2 * layer.inner + stream
  if layer.experts:
    last = BF16 * layer.weights["gate_up"]
  return max(mlp, layer.value * every + last)


def _coat_on_mesh(layer: Layer) -> float:
  inner, unit, weights = layer.inner, layer.unit, layer.weights
  every, gate_up = sum(weights.values()), weights["gate_up"]
  mlp = _coat_mlp(layer) + layer.gathered * gate_up
  if layer.is_recomputed:
    mlp += 0.5 * unit + layer.saved()
  elif not layer.recomputes_experts:
    # On a mesh, gate and up are the only saved arrays that XLA copies at this
    # point.
    mlp += 2.25 * inner + 0.5 * unit
  if not layer.optimizer_in_backward:
    return mlp + layer.grad_value * layer.unsummed
  if layer.sums_at_once:
    # The peak has these arrays:
    #   the gradients of all weights
    #   the operands of the matmul that computes the gradient of qkv's input
    #     (weights in E4M3, gradients in E5M2)
    #   in BF16, the gradients of the layer's output, of gate_up's input and of
    #     qkv's input
    last = layer.grad_value * every + weights["qkv"]
    return max(mlp, last + 3.5 * unit + layer.key)
  # The peak has two gradients before they are summed over GPUs, and the GPU's
  # shards of the sums of all gradients except gate_up's. One gradient is in
  # memory both before and after it is summed. The peak also has operands of the
  # gradients' matmuls.
  whole, operands = gate_up + weights["qkv"], 2 * inner
  if layer.experts:
    whole, operands = gate_up + weights["down"], 4 * inner + layer.rows
  share = (every - gate_up) / layer.fsdp
  return max(mlp, layer.grad_value * (whole + share) + operands + 1.5 * unit)


def _coat_mlp(layer: Layer) -> float:
  """Counts the bytes at the MLP's peak, excluding what the layer saved."""
  inner, unit, rows = layer.inner, layer.unit, layer.rows
  if layer.expert > 1:
    # The peak is one of two sums. The first has gate and up in FP8, and 9 bytes
    # for each value of gate, as counted in compiled steps. The second has the
    # product's gradient, arrays computed from it, all copies of tokens, and the
    # gradients of these copies.
    return max((2 * layer.code + 9) * inner, 7 * inner + 1.5 * unit + 2 * rows)
  if layer.recomputes_experts:
    # The peak has these arrays:
    #   gate and up in FP8, and their gradients in BF16
    #   the recomputed product, and its gradient
    #   all copies of tokens, and their gradients
    #   in the residual stream's shape: the input, its gradient, the router's
    #     share of this gradient, and both blocks' inputs in FP8
    return (2 * layer.code + 8) * inner + 2 * rows + (3 + layer.code) * unit
  # The peak has these arrays:
  #   the product's gradient in BF16
  #   the gradients of gate and up in E5M2, in row layout and in column layout
  #   the recomputed product in FP8
  values = 7 * inner
  if layer.recipe.residuals == "coat" and not layer.experts:
    # Instead of the product and its gradient, the peak has the gradients of
    # gate and up in f32.
    values = 12 * inner
  return values + 1.5 * unit + 2 * rows


def _saved_in_mlp(layer: Layer) -> float:
  """Counts the saved and recomputed bytes that are part of the MLP's peak."""
  inner, unit = layer.inner, layer.unit
  saves_product = layer.recipe.residuals == "coat" and not layer.experts
  if layer.is_recomputed:
    # In addition to what the layer saves, there are both blocks' inputs in
    # BF16, and the FP8 operand of gate and up.
    saved = layer.saved() + 2.5 * unit
  elif layer.remat == "fp8":
    # Gate and up are recomputed here; attention is recomputed later.
    saved = layer.saved("fp8") + 2 * layer.code * inner
    if saves_product:  # SiLU's output; the product; the operand of gate and up.
      saved += (layer.code + 1) * inner + 0.5 * unit
  else:
    saved = layer.saved(layer.remat)
  # At the MLP's peak, what the layer saved for SwiGLU is no longer needed.
  return saved - 4.5 * inner * saves_product
