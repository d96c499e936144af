# SPDX-License-Identifier: Apache-2.0
"""Memory while one layer is differentiated, besides what all layers save.

Each sum covers the arrays that are alive at once at a point that can be the
peak, in the order in which XLA works. We found them from XLA's live ranges in
steps that were compiled for H200s.

tests/plan/test_terms.py repeats each sum next to the compiled peak:
`test_backward_is_its_arrays_and_what_was_compiled` covers one GPU and four,
`test_bf16_backward_of_few_tokens_is_in_the_mlp` the other terms of `max`.
tests/aot/test_plan.py compiles some of these steps again.
"""

from coat_jax.plan.decoder import BF16, F32, DecoderShape, Load, kept_bytes
from coat_jax.recipe import CoatRecipe


def layer_backward(
  shape: DecoderShape, recipe: CoatRecipe, load: Load, *, value: int = F32
) -> float:
  """Returns the bytes on one GPU at the peak of one layer's backward.

  Args:
    shape: the decoder's dimensions.
    recipe: the recipe of its layers.
    load: the work of the GPU.
    value: bytes per value of a weight and of its gradient.

  Returns:
    The bytes of everything that exists for this layer alone.
  """
  layer = _Layer(shape, recipe, load, value)
  if recipe.nonlinear == "fp8":
    return _coat_backward(layer, recipe)
  again = 0.0
  if load.remat in ("full", "fp8_layer"):
    again = kept_bytes(shape, recipe, tensor=load.tensor) * load.tokens
  if recipe.linear == "bf16":
    return again + _bf16_backward(layer)
  return again + _fp8_linear_backward(layer)


class _Layer:
  """Sizes of one layer on one GPU.

  Attributes:
    unit: bytes of the residual stream in BF16.
    inner: values inside the MLP, for one of gate and up; with experts, those of
      all copies of tokens.
    rows: bytes of all copies of tokens in BF16; 0 without experts.
    every, gate_up, down, qkv: values of weights, with the rows of all GPUs.
    value: bytes per value of a weight and of its gradient.
    summed: bytes of the gradients of all weights before GPUs sum them.
    gathered: how many copies of a weight a product needs: on a mesh all rows
      and the GPU's own rows; elsewhere none, since XLA reads weights in place.
  """

  def __init__(
    self, shape: DecoderShape, recipe: CoatRecipe, load: Load, value: int
  ):
    self.shape, self.load, self.value = shape, load, value
    self.unit = BF16 * shape.d_model * load.tokens / load.tensor
    copies = shape.experts_per_token
    self.inner = load.tokens * shape.d_ff * (copies or 1) / load.tensor
    self.rows = BF16 * shape.d_model * load.tokens * copies
    weights = {k: v / load.tensor for k, v in shape.matrices.items()}
    self.every = sum(weights.values())
    axes = recipe.axes
    in_bf16 = axes is not None and axes.grad_dtype == "bfloat16"
    self.summed = (BF16 if in_bf16 else F32) * self.every
    self.gate_up, self.down = weights["gate_up"], weights["down"]
    self.qkv = weights["qkv"]
    self.gathered = 1 + 1 / load.fsdp if load.is_on_mesh else 0


# The coefficients of the three functions below are for a gated MLP. An MLP
# without a gate has, instead of the gate, the BF16 gradient that is summed to a
# bias's gradient (the plan of GPT-2 is within 1 %).
# test_backward_is_its_arrays_and_what_was_compiled in tests/plan/test_terms.py
# checks them.


def _bf16_backward(layer: _Layer) -> float:
  if not layer.load.is_on_mesh:
    # The MLP needs the gradients of gate and up and of their product, and a
    # weight. Attention still needs the product, and q, k, v, its output and all
    # gradients.
    mlp = BF16 * (3 * layer.inner + layer.gate_up) + 2 * layer.unit
    mlp += 2 * layer.rows
    return max(mlp, BF16 * 3 * layer.inner + 12 * layer.unit)
  # The same, but all that a product saves is copied, and weights are gathered.
  mlp = BF16 * (4 * layer.inner + layer.gathered * layer.gate_up)
  attention = BF16 * (3 * layer.inner + layer.gathered * layer.qkv)
  return max(mlp, attention + 6 * layer.unit) + 10 * layer.unit


def _fp8_linear_backward(layer: _Layer) -> float:
  # Gradients of gate and up in BF16, and in E5M2 as rows and as columns.
  mlp = 8 * layer.inner + 1.5 * layer.unit
  if layer.load.is_on_mesh:
    return mlp + layer.summed + layer.gathered * layer.gate_up
  # With copies of what products save; or with a weight's gradient.
  last = layer.value * layer.gate_up + 4 * layer.inner + 2 * layer.unit
  return max(mlp + layer.inner + 3.5 * layer.unit, last)


def _coat_backward(layer: _Layer, recipe: CoatRecipe) -> float:
  # The product's gradient in BF16, E5M2 of gate and up as rows and as columns,
  # and the recomputed product; besides a copy of all that the layer saves.
  mlp = 7 * layer.inner
  kept = _there_in_mlp(layer, recipe)
  is_mixture = layer.shape.num_experts > 0
  if recipe.residuals == "coat" and not is_mixture:
    # Instead of the product: the gradients of gate and up in f32. What the
    # layer saves of SwiGLU is dead by then.
    mlp, kept = 12 * layer.inner, kept - 4.5 * layer.inner
  mlp += 1.5 * layer.unit + 2 * layer.rows
  is_mixture_again = is_mixture and layer.load.remat == "fp8"
  if is_mixture_again:
    mlp, kept = _mixture_computed_again(layer, recipe), 0
  if layer.load.is_on_mesh:
    # On a mesh XLA copies only gate and up, and later.
    copied = 0 if is_mixture_again else 2.25 * layer.inner + 0.5 * layer.unit
    if layer.load.remat in ("full", "fp8_layer"):
      # All that the layer saves is recomputed, attention's part too.
      copied = 0.5 * layer.unit + layer.load.tokens * kept_bytes(
        layer.shape, recipe, tensor=layer.load.tensor
      )
    mlp += copied + layer.gathered * layer.gate_up
    if not layer.load.optimizer_in_backward:
      # XLA sums weights' gradients over GPUs while the next layer runs, so all
      # four gradients exist all the time.
      return mlp + layer.summed
    # Two gradients before they are summed, and the GPU's share of the others;
    # also tokens, and for experts the operands of their gradients.
    whole, operands = layer.gate_up + layer.qkv, 2 * layer.inner
    if is_mixture:
      whole, operands = layer.gate_up + layer.down, 4 * layer.inner + layer.rows
    share = (layer.every - layer.gate_up) / layer.load.fsdp
    last = layer.summed / layer.every * (whole + share)
    return max(mlp, last + operands + 1.5 * layer.unit)
  # XLA computes all four weights' gradients last.
  last = layer.value * layer.every + 2 * layer.inner + 1.5 * layer.unit
  if is_mixture:  # Also the experts' gradients in BF16, most of the total.
    last = layer.value * layer.every + BF16 * layer.gate_up
  return max(mlp + kept, last)


def _mixture_computed_again(layer: _Layer, recipe: CoatRecipe) -> float:
  # Gate and up, in codes; their gradients in BF16, the recomputed product and
  # its gradient; all copies of tokens and of their gradients. For the residual
  # stream, the input, its gradient and the router's share of that gradient, and
  # the codes of both blocks' inputs.
  codes = 1 + BF16 / recipe.group_size
  inner = 2 * codes + 8
  return inner * layer.inner + 2 * layer.rows + (3 + codes) * layer.unit


def _there_in_mlp(layer: _Layer, recipe: CoatRecipe) -> float:
  """Returns what a layer saved or recomputed when its MLP is differentiated."""
  remat, tokens = layer.load.remat, layer.load.tokens
  if remat in ("full", "fp8_layer"):
    # Attention's part too; both blocks' inputs in BF16, and the operand of gate
    # and up.
    return kept_bytes(layer.shape, recipe) * tokens + 2.5 * layer.unit
  kept = kept_bytes(layer.shape, recipe, remat=remat) * tokens
  if remat == "fp8":
    # Gate and up; attention is recomputed later.
    codes = 1 + BF16 / recipe.group_size
    kept += 2 * codes * layer.inner
    if (
      recipe.residuals == "coat" and not layer.rows
    ):  # SiLU and the product, and the operand.
      kept += (codes + 1) * layer.inner + 0.5 * layer.unit
  return kept
