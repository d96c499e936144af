# SPDX-License-Identifier: Apache-2.0
"""Where FP8 flows in a layer, and what is saved for the backward pass.

Presets, each written as the three matrix products of a linear layer
(x [T, D] activations, w [D, F] weights, g [T, F] gradients):

              y = x w            dx = g w^T         dw = x^T g
  bf16        bf16 * bf16        bf16 * bf16        bf16 * bf16
  fp8_linear  E4M3 * E4M3        E5M2 * E4M3        E4M3 * E5M2
  coat        E4M3 * E4M3        E5M2 * E4M3        E4M3 * E5M2
  int8        INT8 * INT8        INT8 * INT8        INT8 * INT8
  fp8_block   E4M3 * E4M3        E4M3 * E4M3        E4M3 * E4M3

Scales of matrix products are found just in time, one per tensor; products
accumulate in f32, those of `int8` in int32. `coat` differs from `fp8_linear` in
the rest of the layer: norms and activation functions read FP8 values with one
scale per 1 x 16 group and save those instead of BF16 (arXiv:2410.19313, section
5). `int8` is `coat` with integers in the place of FP8, byte for byte: a
neighbour to compare with.

`fp8_block` is `coat` with the products of DeepSeek-V3 (arXiv:2412.19437,
section 3.3.2): a scale per block of 128 of what a product sums over, 1 x 128 of
x and g and 128 x 128 of w, and gradients in E4M3. An x that is saved is saved
as its forward read it, and quantized again along tokens where dw = x^T g reads
it; g is quantized along both axes.

Saved per token in one Llama layer, in units of U = 2 D bytes, MLP width F,
G = group_size, before scales (a scale adds 2 / G to each 1 x G byte):

                       coat                  minimal
  norm inputs          2 x D bytes           2 x D bytes
  norm outputs         2 x D bytes           recomputed
  gate, up             2 x F bytes           2 x F bytes
  silu(gate), product  2 x F bytes           recomputed
  q, k, v, output      4 x 2 D bytes         4 x 2 D bytes (attention="fp8": D)
"""

import dataclasses
from typing import Literal

from jax.typing import DTypeLike

from coat_jax.checks import check_group_size, check_kind, refuse
from coat_jax.formats import E4M3, E5M2, INT8, as_format

Residuals = Literal["coat", "minimal"]
Kept = Literal["bf16", "fp8"]
WeightCache = Literal["none", "scale", "codes"]
Scaling = Literal["tensor", "block"]
GradDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Formats:
  """The number formats of a recipe that is not BF16.

  Attributes:
    values: of activations and weights: what products read, and what is saved
      for the backward pass.
    gradients: of the gradients that products read in the backward pass.

  Raises:
    ValueError: another format than those of `coat_jax.formats`.
  """

  values: DTypeLike = E4M3
  gradients: DTypeLike = E5M2

  def __post_init__(self):
    # By one name each: recipes are compared.
    for name in ("values", "gradients"):
      object.__setattr__(self, name, as_format(getattr(self, name)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshAxes:
  """The axes of a mesh by what they split; an axis may have one device.

  Attributes:
    batch: axes that sequences are split over.
    fsdp: the one of them that weights are split over too, or None.
    tensor: the axis that heads and an MLP's columns are split over and, between
      blocks, the positions of a sequence; or None.
    grad_dtype: in which weights' gradients are summed over devices.

  Raises:
    TypeError: `batch` is no tuple, or an axis no name.
    ValueError: `batch` names no axis, or one twice; `fsdp` is not one of
      `batch`, `tensor` is, or an unknown dtype.
  """

  batch: tuple[str, ...] = ("data", "fsdp")
  fsdp: str | None = "fsdp"
  tensor: str | None = None
  grad_dtype: GradDtype = "float32"

  def __post_init__(self):
    op, remedy = "MeshAxes", "pass names of a mesh's axes"
    named = "a tuple of different names"
    if not isinstance(self.batch, tuple):
      refuse(
        TypeError, op, "batch", named, self.batch, "pass one, as in ('data',)"
      )
    if len({*self.batch}) < max(len(self.batch), 1):
      refuse(ValueError, op, "batch", named, self.batch, remedy)
    for name in (*self.batch, self.fsdp, self.tensor):
      check_kind(op, "an axis", name, (str, type(None)), remedy)
    if self.fsdp is not None and self.fsdp not in self.batch:
      raise ValueError(
        "MeshAxes: fsdp must be one of the axes that the batch is split over, "
        f"{self.batch}, got {self.fsdp!r}; gradients are summed over it"
      )
    if self.tensor is not None and self.tensor in self.batch:
      raise ValueError(
        "MeshAxes: tensor must be another axis than those that the batch is "
        f"split over, {self.batch}, got {self.tensor!r}; leave it out of one"
      )
    if self.grad_dtype not in ("float32", "bfloat16"):
      raise ValueError(
        "MeshAxes: grad_dtype must be 'float32' or 'bfloat16', got "
        f"{self.grad_dtype!r}; pass one of these"
      )

  @property
  def tokens(self) -> tuple[str, ...]:
    """All axes that tokens are split over."""
    return self.batch if self.tensor is None else (*self.batch, self.tensor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoatRecipe:
  """A recipe; build one with a function of this module, such as `coat()`.

  Attributes:
    linear: operands of matrix products.
    scaling: of FP8 products: "tensor", one scale per tensor, or "block", one
      per 128 values of what a product sums over. On a mesh blocks need one
      device along the tensor axis.
    nonlinear: what norms and activation functions read and save.
    residuals: "coat" saves what the reference does; "minimal" recomputes
      norm outputs, SiLU and products elementwise in the backward.
    attention: how q, k, v and the attention's output are saved. With "fp8"
      the forward attends to the dequantized values too.
    attention_compute: what attention's products read. "fp8" is for long
      sequences on Hopper (cuDNN); q, k, v and the output then have one scale
      per tensor and are saved so, with attention="fp8".
    group_size: values that share a scale in front of a non-linear operation.
    weight_cache: what is computed of a weight once for all its uses in a step:
      "none", its "scale", or its "codes" in both layouts (2 bytes a parameter).
    implementation: None for kernels on a GPU, "xla" for none anywhere.
    evaluation: "same" computes in evaluation what training computes; "bf16"
      leaves FP8 out there, as the reference does.
    formats: E4M3 for values and E5M2 for gradients, which kernels know; others
      of `coat_jax.formats` run as plain JAX.
    axes: on a mesh, what its axes split: FP8 blocks then run on each device's
      part (`jax.shard_map`), under `jax.set_mesh`. None on one device, where
      types say it (explicit axes of data and FSDP), and to leave it to XLA,
      which can partition no kernel.
  """

  linear: Kept = "fp8"
  scaling: Scaling = "tensor"
  nonlinear: Kept = "fp8"
  residuals: Residuals = "minimal"
  attention: Kept = "bf16"
  attention_compute: Kept = "bf16"
  group_size: int = 16
  weight_cache: WeightCache = "scale"
  implementation: Literal["xla"] | None = None
  evaluation: Literal["same", "bf16"] = "same"
  formats: Formats = Formats()
  axes: MeshAxes | None = None

  def __post_init__(self):
    for field, choices in _CHOICES.items():
      value = getattr(self, field)
      if value not in choices:
        raise ValueError(
          f"CoatRecipe: {field} must be one of {choices}, got {value!r}; pass "
          "one of these"
        )
    op = "CoatRecipe"
    check_group_size(op, self.group_size, "16 is the default")
    remedy = "pass one, as in Formats(gradients=E4M3)"
    check_kind(op, "formats", self.formats, Formats, remedy)
    if self.axes is not None:
      check_kind(
        op, "axes", self.axes, MeshAxes, "pass one, as in MeshAxes(fsdp=None)"
      )
    if self.linear == "bf16" and "fp8" in (self.nonlinear, self.attention):
      raise ValueError(
        "CoatRecipe: linear='bf16' goes with nonlinear='bf16' and "
        f"attention='bf16', got {self.nonlinear!r} and {self.attention!r}; "
        "FP8 residuals pay where the matrix products read them"
      )
    if self.linear == "bf16" and self.scaling == "block":
      raise ValueError(
        "CoatRecipe: scaling='block' is of FP8 products, got linear='bf16'; "
        "leave scaling out"
      )
    if self.attention_compute == "fp8":
      own = (self.nonlinear, self.attention, self.formats.values)
      if own != ("fp8", "fp8", E4M3):
        raise ValueError(
          "CoatRecipe: attention_compute='fp8' saves the E4M3 codes that it "
          "multiplies and goes with nonlinear='fp8', attention='fp8' and "
          f"values in E4M3, got {own}; pass attention='fp8' to coat or "
          "fp8_block, or leave attention_compute out"
        )
    if self.scaling == "block" and self.formats == _INTEGERS:
      raise ValueError(
        "CoatRecipe: scaling='block' is of FP8 products, got formats of int8; "
        "leave scaling out"
      )

  @property
  def name(self) -> str:
    """The preset this recipe is a variant of."""
    if self.linear == "bf16":
      return "bf16"
    if self.formats == _INTEGERS:
      return "int8"
    if self.scaling == "block":
      return "fp8_block"
    return "fp8_linear" if self.nonlinear == "bf16" else "coat"

  def for_evaluation(self) -> "CoatRecipe":
    """The recipe to evaluate with."""
    if self.evaluation == "same":
      return self
    preset = bf16(implementation=self.implementation)
    return dataclasses.replace(preset, axes=self.axes)


_INTEGERS = Formats(values=INT8, gradients=INT8)

_CHOICES = {
  "linear": ("bf16", "fp8"),
  "scaling": ("tensor", "block"),
  "nonlinear": ("bf16", "fp8"),
  "residuals": ("coat", "minimal"),
  "attention": ("bf16", "fp8"),
  "attention_compute": ("bf16", "fp8"),
  "weight_cache": ("none", "scale", "codes"),
  "implementation": (None, "xla"),
  "evaluation": ("same", "bf16"),
}


def bf16(*, implementation: Literal["xla"] | None = None) -> CoatRecipe:
  """The ordinary layer in BF16, which saves what autodiff saves."""
  return CoatRecipe(
    linear="bf16", nonlinear="bf16", implementation=implementation
  )


def fp8_linear(
  *,
  weight_cache: WeightCache = "scale",
  implementation: Literal["xla"] | None = None,
  evaluation: Literal["same", "bf16"] = "same",
) -> CoatRecipe:
  """Per-tensor FP8 matrix products in an otherwise BF16 layer."""
  return CoatRecipe(
    nonlinear="bf16",
    weight_cache=weight_cache,
    implementation=implementation,
    evaluation=evaluation,
  )


def coat(
  *,
  residuals: Residuals = "minimal",
  attention: Kept = "bf16",
  attention_compute: Kept = "bf16",
  group_size: int = 16,
  weight_cache: WeightCache = "scale",
  implementation: Literal["xla"] | None = None,
  evaluation: Literal["same", "bf16"] = "same",
) -> CoatRecipe:
  """FP8 from end to end inside the layer; `CoatRecipe` has the arguments."""
  return CoatRecipe(
    residuals=residuals,
    attention=attention,
    attention_compute=attention_compute,
    group_size=group_size,
    weight_cache=weight_cache,
    implementation=implementation,
    evaluation=evaluation,
  )


def fp8_block(
  *,
  residuals: Residuals = "minimal",
  attention: Kept = "bf16",
  attention_compute: Kept = "bf16",
  group_size: int = 16,
  weight_cache: WeightCache = "scale",
  implementation: Literal["xla"] | None = None,
  evaluation: Literal["same", "bf16"] = "same",
) -> CoatRecipe:
  """`coat` whose products have scales of blocks, and E4M3 gradients.

  `CoatRecipe` has the arguments. Source: arXiv:2412.19437, section 3.3.2;
  docs/deviations.md 24.
  """
  return CoatRecipe(
    scaling="block",
    formats=Formats(gradients=E4M3),
    residuals=residuals,
    attention=attention,
    attention_compute=attention_compute,
    group_size=group_size,
    weight_cache=weight_cache,
    implementation=implementation,
    evaluation=evaluation,
  )


def int8(
  *,
  residuals: Residuals = "minimal",
  attention: Kept = "bf16",
  group_size: int = 16,
  weight_cache: WeightCache = "scale",
  implementation: Literal["xla"] | None = None,
  evaluation: Literal["same", "bf16"] = "same",
) -> CoatRecipe:
  """`coat` with INT8 in the place of FP8, to compare the two at the same bytes.

  All is rounded to nearest, gradients too. Sums of products are exact in int32
  up to 133,144 terms, more than the tokens of a step on one device. No kernel
  of ours knows INT8: plain JAX, whose products XLA gives to INT8 hardware.

  Args:
    residuals, attention, group_size, weight_cache, implementation, evaluation:
      as of `coat`; where it says "fp8" this has INT8.

  Returns:
    The recipe.
  """
  recipe = coat(
    residuals=residuals,
    attention=attention,
    group_size=group_size,
    weight_cache=weight_cache,
    implementation=implementation,
    evaluation=evaluation,
  )
  return dataclasses.replace(recipe, formats=_INTEGERS)
