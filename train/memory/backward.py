# SPDX-License-Identifier: Apache-2.0
"""Computes the memory while one layer is differentiated, in closed form.

This memory is needed in addition to what all layers save. Each sum covers the
arrays that are alive together at a possible peak, given the order in which XLA
runs operations. We derived the sums from XLA's live ranges in steps compiled
for H200s, and assume that
  * a stack of layers is scanned, so what a layer saved is copied out of it;
  * on one GPU XLA computes all weights' gradients at the end of a layer;
  * on a mesh it sums them over GPUs while the next layer runs.

tests/train/memory/test_terms.py repeats the sums array by array and compares
the plans with compiled peaks. `python -m benchmarks.memory plan` and
tests/aot/test_plan.py compile again.
"""

import dataclasses

from coat_jax.models import VisionConfig
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.numerics.recipes import CoatRecipe
from train.memory.count import saved_bytes

F32, BF16 = 4, 2  # Bytes per value.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """One layer of a decoder or of a vision tower, on one GPU."""

  model: ModelConfig | VisionConfig
  recipe: CoatRecipe
  tokens: int  # How many tokens the GPU works on at a time.
  value: int = F32  # Bytes of a weight's value and its gradient; 0 if frozen.
  fsdp: int = 1  # GPUs over which a weight's rows are split.
  tensor: int = 1  # GPUs over which heads and columns are split.
  expert: int = 1  # GPUs over which whole experts are split.
  is_on_mesh: bool = False  # Whether there are other GPUs.
  remat: Remat = "none"
  optimizer_in_backward: bool = False

  @property
  def experts(self) -> int:
    """Returns the number of experts; 0 for a single MLP."""
    return getattr(self.model, "num_experts", None) or 0

  @property
  def copies(self) -> int:
    """Returns how many experts a token is sent to; 0 for a single MLP."""
    return getattr(self.model, "experts_per_token", None) or 0

  @property
  def weights(self) -> dict[str, float]:
    """Counts the values of each weight, with the rows of all GPUs."""
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
  def inner(self) -> float:
    """Counts the values of gate, or of up, for all copies of tokens.

    If experts are split, there is room for the copies of all GPUs' tokens.
    """
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
  def is_recomputed(self) -> bool:
    """Returns whether a second forward pass computes what the layer saves."""
    return self.remat in ("full", "fp8_layer")

  @property
  def recomputes_experts(self) -> bool:
    """Returns whether experts' gate and up are not saved."""
    return bool(self.experts) and (self.remat == "fp8" or self.expert > 1)

  @property
  def gathered(self) -> float:
    """Counts the copies of a weight that a product needs.

    On a mesh these are all rows and the GPU's own rows. On one GPU XLA reads
    weights in place.
    """
    return 1 + 1 / self.fsdp if self.is_on_mesh else 0

  @property
  def code(self) -> float:
    """Counts the bytes of an FP8 value with its share of a BF16 scale."""
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
  """Returns the bytes that exist for one layer alone at its peak."""
  if layer.recipe.nonlinear == "fp8":
    return _coat_backward(layer)
  again = layer.saved() if layer.is_recomputed else 0.0
  if layer.recipe.linear == "bf16":
    return again + _bf16_backward(layer)
  return again + _fp8_linear_backward(layer)


# The coefficients below are for a gated MLP, but GPT-2's plan, without a gate,
# is within 1 % too: instead of the gate's arrays there is a gradient in BF16,
# from which a bias's gradient is summed.


def _bf16_backward(layer: Layer) -> float:
  inner, unit, weights = layer.inner, layer.unit, layer.weights
  if not layer.is_on_mesh:
    # At the MLP's peak: gradients of gate, up and their product, and a weight.
    # At attention's peak: gate, up and product, which are not freed yet; q, k,
    # v, the output, and all gradients.
    mlp = BF16 * (3 * inner + weights["gate_up"]) + 2 * unit + 2 * layer.rows
    return max(mlp, BF16 * 3 * inner + 12 * unit)
  # The same, but all that a product saves is copied, and weights are gathered.
  mlp = BF16 * (4 * inner + layer.gathered * weights["gate_up"])
  attention = BF16 * (3 * inner + layer.gathered * weights["qkv"])
  return max(mlp, attention + 6 * unit) + 10 * unit


def _fp8_linear_backward(layer: Layer) -> float:
  inner, unit, weights = layer.inner, layer.unit, layer.weights
  # Gradients of gate and up in BF16, and in E5M2 as rows and as columns.
  mlp = 8 * inner + 1.5 * unit
  if layer.is_on_mesh:
    gradients = layer.grad_value * sum(weights.values())
    return mlp + gradients + layer.gathered * weights["gate_up"]
  # The peak also includes copies of what products save, or a weight's gradient.
  last = layer.value * weights["gate_up"] + 4 * inner + 2 * unit
  return max(mlp + inner + 3.5 * unit, last)


def _coat_backward(layer: Layer) -> float:
  if layer.is_on_mesh:
    return _coat_on_mesh(layer)
  every, stream = sum(layer.weights.values()), 1.5 * layer.unit
  mlp = _coat_mlp(layer)
  if not layer.recomputes_experts:
    mlp += _saved_in_mlp(layer)
  # XLA computes all four weights' gradients last. Those of experts exist in
  # BF16 too, and are most of the total.
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
    # On a mesh XLA copies only gate and up, and copies them later.
    mlp += 2.25 * inner + 0.5 * unit
  if not layer.optimizer_in_backward:
    # XLA sums weights' gradients over GPUs while the next layer runs, so all
    # four gradients exist all the time.
    return mlp + layer.grad_value * every
  # Two gradients before they are summed, and the GPU's share of the others;
  # also tokens, and for experts the operands of their gradients.
  whole, operands = gate_up + weights["qkv"], 2 * inner
  if layer.experts:
    whole, operands = gate_up + weights["down"], 4 * inner + layer.rows
  share = (every - gate_up) / layer.fsdp
  return max(mlp, layer.grad_value * (whole + share) + operands + 1.5 * unit)


def _coat_mlp(layer: Layer) -> float:
  """Counts the bytes inside the MLP, without what the layer saved."""
  inner, unit, rows = layer.inner, layer.unit, layer.rows
  if layer.expert > 1:
    # Gate and up in codes, and 9 bytes for each value of gate, as counted in
    # compiled steps; or the product's gradient and what follows from it, and
    # rows of tokens and of their gradients.
    return max((2 * layer.code + 9) * inner, 7 * inner + 1.5 * unit + 2 * rows)
  if layer.recomputes_experts:
    # Gate and up, in codes; their gradients in BF16, the recomputed product and
    # its gradient; all copies of tokens and of their gradients. In units of the
    # residual stream: the input, its gradient and the router's share of that
    # gradient, and the codes of both blocks' inputs.
    return (2 * layer.code + 8) * inner + 2 * rows + (3 + layer.code) * unit
  # The product's gradient in BF16, E5M2 of gate and up as rows and as columns,
  # and the recomputed product.
  values = 7 * inner
  if layer.recipe.residuals == "coat" and not layer.experts:
    # The gradients of gate and up in f32 exist instead of the product.
    values = 12 * inner
  return values + 1.5 * unit + 2 * rows


def _saved_in_mlp(layer: Layer) -> float:
  """Counts bytes saved or recomputed before the MLP's backward pass."""
  inner, unit = layer.inner, layer.unit
  saves_product = layer.recipe.residuals == "coat" and not layer.experts
  if layer.is_recomputed:
    # All that the layer saves, attention's part too; both blocks' inputs in
    # BF16, and the operand of gate and up.
    saved = layer.saved() + 2.5 * unit
  elif layer.remat == "fp8":
    # Gate and up; attention is recomputed later.
    saved = layer.saved("fp8") + 2 * layer.code * inner
    if saves_product:  # SiLU and the product, and the operand.
      saved += (layer.code + 1) * inner + 0.5 * unit
  else:
    saved = layer.saved(layer.remat)
  # By then, what the layer saved for SwiGLU is no longer needed.
  return saved - 4.5 * inner * saves_product
