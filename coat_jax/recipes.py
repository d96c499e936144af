# SPDX-License-Identifier: Apache-2.0
"""Recipes: where a layer uses FP8, and what it saves for the backward pass.

Each preset uses these formats in the three matmuls of a linear layer with
activations x [T, D], weight w [D, F] and output gradient g [T, F]:

              y = x w            dx = g w^T         dw = x^T g
  bf16        bf16 * bf16        bf16 * bf16        bf16 * bf16
  fp8_linear  E4M3 * E4M3        E5M2 * E4M3        E4M3 * E5M2
  coat        E4M3 * E4M3        E5M2 * E4M3        E4M3 * E5M2
  int8        INT8 * INT8        INT8 * INT8        INT8 * INT8
  fp8_block   E4M3 * E4M3        E4M3 * E4M3        E4M3 * E4M3

Except in `fp8_block`, a quantized operand has one scale per tensor, computed
from its current values. Matmuls accumulate in f32, or in int32 for `int8`.
`coat` differs from `fp8_linear` in the rest of the layer: norms and activation
functions read FP8 values with one scale per 1 x 16 group, and save these
instead of BF16 values (arXiv:2410.19313, section 5). `fp8_block` is `coat` with
the matmuls of DeepSeek-V3: gradients in E4M3, and one scale per 128 values that
a matmul sums over, or per 128 x 128 values of a weight (`scaling.Blocks`).

With recipe `coat`, a Llama layer of width D and MLP width F, with as many key
heads as query heads, saves the following bytes per token. Scales of 1 x G
groups add 2 / G bytes per value, and some statistics of each row are saved too.

  residuals            "coat"                "minimal"
  norm inputs          2 x D bytes           2 x D bytes
  norm outputs         2 x D bytes           recomputed
  gate, up             2 x F bytes           2 x F bytes
  silu(gate), product  2 x F bytes           recomputed
  q, k, v              3 x 2 D bytes         3 x 2 D bytes
  attention's output   2 D bytes             2 D bytes

With attention="fp8", q, k and v are saved in 3 x D bytes.
"""

import dataclasses
import typing
from typing import Literal, TypedDict, Unpack

import jax.numpy as jnp
from jax.typing import DTypeLike

from coat_jax.numerics.checks import (
  check_choice,
  check_group_size,
  check_kind,
  refuse,
)
from coat_jax.numerics.formats import E4M3, E5M2, INT8, as_format
from coat_jax.numerics.scaling import Blocks, PerTensor, Scaling

Residuals = Literal["coat", "minimal"]
Kept = Literal["bf16", "fp8"]
WeightCache = Literal["none", "scale", "codes"]
Evaluation = Literal["same", "bf16"]
GradDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Formats:
  """The number formats of a recipe with FP8 or INT8 matmuls.

  Attributes:
    values: format of activations and weights, in matmuls and when saved for the
      backward pass.
    gradients: format of gradients in the matmuls of the backward pass.

  Raises:
    ValueError: a format is not defined in `coat_jax.numerics.formats`.
  """

  values: DTypeLike = E4M3
  gradients: DTypeLike = E5M2

  def __post_init__(self):
    # Convert names to dtypes, so that equal recipes compare equal.
    for name in ("values", "gradients"):
      object.__setattr__(self, name, as_format(getattr(self, name)))


_INTEGERS = Formats(values=INT8, gradients=INT8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshAxes:
  """Specifies what each axis of a mesh splits; an axis may have size 1.

  Attributes:
    batch: axes that split the sequences of a batch.
    fsdp: the axis of `batch` that also splits weights, or None.
    tensor: the axis that splits heads, an MLP's columns and, between blocks,
      the positions of a sequence; or None.
    expert: the axis of `batch` over which the experts of a mixture are
      distributed, or None. Devices along this axis exchange tokens, and all
      weights except the experts' are replicated along it.
    grad_dtype: dtype in which gradients of weights are summed over devices.

  Raises:
    TypeError, ValueError: a field has the wrong type or value.
  """

  batch: tuple[str, ...] = ("data", "fsdp")
  fsdp: str | None = "fsdp"
  tensor: str | None = None
  expert: str | None = None
  grad_dtype: GradDtype = "float32"

  def __post_init__(self):
    op, remedy = "MeshAxes", "pass names of a mesh's axes, as in ('data',)"
    named = "a tuple of one or more different names"
    if not isinstance(self.batch, tuple):
      refuse(TypeError, op, "batch", named, self.batch, remedy)
    if len({*self.batch}) < max(len(self.batch), 1):
      refuse(ValueError, op, "batch", named, self.batch, remedy)
    for name in self.batch:
      check_kind(op, "an axis of batch", name, str, remedy)
    for name in (self.fsdp, self.tensor, self.expert):
      check_kind(op, "an axis", name, (str, type(None)), remedy)
    if self.fsdp is not None and self.fsdp not in self.batch:
      raise ValueError(
        "MeshAxes: fsdp must be one of the axes that the batch is split over, "
        f"{self.batch}, got {self.fsdp!r}; add it to batch, or pass fsdp=None "
        "if the weights are not split"
      )
    if self.tensor in self.batch:
      raise ValueError(
        "MeshAxes: tensor must not be one of the axes that the batch is split "
        f"over, {self.batch}, got {self.tensor!r}; remove it from tensor or "
        "from batch"
      )
    if self.expert is not None and (
      self.expert not in self.batch or self.expert == self.fsdp
    ):
      raise ValueError(
        "MeshAxes: expert must be one of the axes that the batch is split "
        f"over, {self.batch}, and not fsdp, got {self.expert!r}; add an axis "
        "to the mesh and to batch"
      )
    choices = typing.get_args(GradDtype)
    check_choice(op, "grad_dtype", self.grad_dtype, choices)

  @property
  def tokens(self) -> tuple[str, ...]:
    """All axes that split tokens."""
    return self.batch if self.tensor is None else (*self.batch, self.tensor)

  @property
  def same_experts(self) -> tuple[str, ...]:
    """The axes over which devices hold copies or shards of the same experts."""
    return tuple(name for name in self.tokens if name != self.expert)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoatRecipe:
  """A recipe; build one with a function of this module, such as `coat()`.

  Attributes:
    linear: format of the operands of weight matmuls.
    scaling: how operands of FP8 matmuls are scaled: `ops.PerTensor`,
      `ops.Blocks`, or your own subclass of `ops.Scaling`, which runs as plain
      JAX. On a mesh, `Blocks` requires a single device along the tensor axis.
    nonlinear: format of the inputs that norms and activation functions read and
      save.
    residuals: "coat" saves what the code of COAT's authors saves; "minimal"
      recomputes norm outputs, the activated gate, and the product of the
      activated gate and the up projection in the backward pass.
    attention: format in which q, k and v are saved. With "fp8", attention is
      computed from the dequantized values in both passes. Attention's output
      is saved in BF16, because training diverges if it is rounded to FP8.
    group_size: number of values that share a scale in FP8 inputs of norms and
      activation functions, and in FP8 q, k and v.
    experts: format of the operands of grouped expert matmuls. "fp8" requires
      recipe `coat`, and scales each expert's weight separately.
    weight_cache: what is computed from each weight once per step and reused:
      nothing ("none"), its "scale", or its FP8 "codes", both as they are and
      transposed (2 bytes per value).
    implementation: None for kernels on a GPU, "xla" for plain JAX everywhere.
    evaluation: "same" evaluates with the formats of training; "bf16" evaluates
      without FP8, as the authors' code does.
    formats: the formats that "fp8" means for values and for gradients. Kernels
      support the formats of `coat` and `fp8_block`; other formats of
      `coat_jax.numerics.formats` run as plain JAX.
    axes: what the axes of a mesh split. If set, FP8 blocks run on each device's
      shard (`jax.shard_map`); call them under `jax.set_mesh`. Pass None for one
      device, for meshes with explicit data and FSDP axes (arrays' types then
      contain the sharding), and for layers that XLA partitions. Layers that XLA
      partitions use no kernels.

  Raises:
    TypeError: a field has the wrong type.
    ValueError: a field has an unknown value, or fields are incompatible.
  """

  linear: Kept = "fp8"
  scaling: type[Scaling] = PerTensor
  nonlinear: Kept = "fp8"
  residuals: Residuals = "minimal"
  attention: Kept = "bf16"
  group_size: int = 16
  experts: Kept = "bf16"
  weight_cache: WeightCache = "scale"
  implementation: Literal["xla", None] = None
  evaluation: Evaluation = "same"
  formats: Formats = Formats()
  axes: MeshAxes | None = None

  def __post_init__(self):
    op = "CoatRecipe"
    for name, hint in typing.get_type_hints(CoatRecipe).items():
      if typing.get_origin(hint) is Literal:
        check_choice(op, name, getattr(self, name), typing.get_args(hint))
    if not isinstance(self.scaling, type) or not issubclass(
      self.scaling, Scaling
    ):
      rule, remedy = "a subclass of ops.Scaling", "pass ops.PerTensor"
      refuse(TypeError, op, "scaling", rule, self.scaling, remedy)
    check_group_size(op, self.group_size, "16 is the default")
    remedy = "pass one, as in Formats(gradients=E4M3)"
    check_kind(op, "formats", self.formats, Formats, remedy)
    if self.axes is not None:
      remedy = "pass one, as in MeshAxes(fsdp=None)"
      check_kind(op, "axes", self.axes, MeshAxes, remedy)
    if self.linear == "bf16" and "fp8" in (self.nonlinear, self.attention):
      raise ValueError(
        "CoatRecipe: linear='bf16' requires nonlinear='bf16' and "
        f"attention='bf16', got {self.nonlinear!r} and {self.attention!r}; "
        "leave all three out, or pass recipes.bf16()"
      )
    if self.experts == "fp8" and (self.name, self.scaling) != (
      "coat",
      PerTensor,
    ):
      raise ValueError(
        "CoatRecipe: experts='fp8' requires recipe coat and PerTensor scaling, "
        f"got {self.name} and {self.scaling.__name__}; leave experts out"
      )
    if self.in_blocks and self.name in ("bf16", "int8"):
      raise ValueError(
        "CoatRecipe: scaling=Blocks is for FP8 matmuls, got a recipe like "
        f"{self.name}; leave scaling out"
      )

  @property
  def in_blocks(self) -> bool:
    """Whether matmul operands have a scale per block of 128 values."""
    return issubclass(self.scaling, Blocks)

  @property
  def name(self) -> str:
    """The name of the preset that this recipe is a variant of."""
    if self.linear == "bf16":
      return "bf16"
    if self.formats == _INTEGERS:
      return "int8"
    if self.in_blocks:
      return "fp8_block"
    return "fp8_linear" if self.nonlinear == "bf16" else "coat"

  def describe(self) -> str:
    """Describes the formats in which a layer multiplies and saves values.

    Examples:
      >>> from coat_jax import recipes
      >>> print(recipes.bf16().describe())
      matmuls      BF16
      also saved   BF16
      attention    q, k, v and output saved in BF16
    """
    values = jnp.dtype(self.formats.values).name
    gradients = jnp.dtype(self.formats.gradients).name
    in_groups = f"{values}, a scale per {self.group_size} values"
    matmuls, others = "BF16", "BF16"
    attention = "q, k, v and output saved in BF16"
    if self.linear == "fp8":
      scales = self.scaling.description
      matmuls = f"{values}, gradients {gradients}; {scales}"
    if self.nonlinear == "fp8":
      again = "computed again" if self.residuals == "minimal" else "saved too"
      others = (
        f"inputs of norms and activations in {in_groups}; their outputs are "
        f"{again}"
      )
    if self.attention == "fp8":
      attention = f"output saved in BF16; q, k and v in {in_groups}"
    return (
      f"matmuls      {matmuls}\nalso saved   {others}\nattention    {attention}"
    )

  def for_evaluation(self) -> "CoatRecipe":
    """Returns the recipe that evaluation uses."""
    if self.evaluation == "same":
      return self
    preset = bf16(implementation=self.implementation)
    return dataclasses.replace(preset, axes=self.axes)


class Options(TypedDict, total=False):
  """Options of the presets with FP8 or INT8 matmuls; see `CoatRecipe`."""

  residuals: Residuals
  attention: Kept
  group_size: int
  experts: Kept
  weight_cache: WeightCache
  implementation: Literal["xla", None]
  evaluation: Evaluation


def bf16(*, implementation: Literal["xla", None] = None) -> CoatRecipe:
  """Uses BF16 throughout the layer, and saves what autodiff saves."""
  return CoatRecipe(
    linear="bf16", nonlinear="bf16", implementation=implementation
  )


def fp8_linear(**options: Unpack[Options]) -> CoatRecipe:
  """Uses FP8 matmuls with per-tensor scales in an otherwise BF16 layer."""
  return CoatRecipe(nonlinear="bf16", **options)


def coat(**options: Unpack[Options]) -> CoatRecipe:
  """Uses FP8 throughout the layer; `CoatRecipe` documents the options."""
  return CoatRecipe(**options)


def fp8_block(**options: Unpack[Options]) -> CoatRecipe:
  """Returns `coat` with a scale per block in matmuls, and E4M3 gradients.

  Source: arXiv:2412.19437, section 3.3.2; docs/deviations.md 24.
  """
  return CoatRecipe(scaling=Blocks, formats=Formats(gradients=E4M3), **options)


def int8(**options: Unpack[Options]) -> CoatRecipe:
  """Returns `coat` with INT8 instead of FP8, for comparisons at equal memory.

  All values, including gradients, are rounded to nearest. Matmuls accumulate
  exactly in int32 up to 133,144 terms. The recipe runs as plain JAX; XLA runs
  its matmuls on INT8 hardware.
  """
  return CoatRecipe(formats=_INTEGERS, **options)
