# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run; `presets` has published shapes and settings.

`python -m train.pretrain PRESET` reads a `TrainConfig` from the command line:
options of the run have no prefix (`--steps 100`), the others that of their part
(`--optim.codec log8`). An option that the chosen recipe or codec would ignore
is an error.

The type of a number says which are allowed (`coat_jax.models.ranges`), and a
field's metadata what a resumed run may change (`resume_rule`).
"""

import dataclasses
from typing import Annotated, Any, Literal, Self

import jax.numpy as jnp

import coat_jax.recipe
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.ranges import Count, Range, Width, check_numbers
from coat_jax.models.remat import check_remat
from coat_jax.models.specs import mesh_axes
from coat_jax.recipe import GradDtype, MeshAxes
from train.combinations import check_combinations
from train.data.tokens import DataConfig
from train.mesh import check_fits, check_tiles, parse_mesh
from train.optim_config import OptimConfig, options_of_codecs
from train.options import (
  CONVERTED,
  FIXED,
  SILENT,
  check_unused,
  defaults,
  read_profile,
  type_of,
)
from train.weights import Stored

# Which arguments each of these takes; the rest must be left as they are.
_COAT = (
  "residuals",
  "attention",
  "activation_group_size",
  "weight_cache",
  "evaluation",
)
_RECIPES = {
  "coat": (*_COAT, "attention_compute"),
  "fp8_block": (*_COAT, "attention_compute"),
  "fp8_linear": ("weight_cache", "evaluation"),
  "bf16": ("compute",),
  "int8": _COAT,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """A training run.

  Attributes:
    out: Folder of the run.
    steps: Optimizer steps of the whole run.
    mesh: Devices to train on, as `data=2,fsdp=4,tensor=1`; see `train.mesh`.
      Empty for one device.
    distributed: Join the other processes of the run, as SLURM, Open MPI or the
      environment names them; see docs/sharding.md.
    batch: Sequences a step, on all devices together.
    accumulate: Microbatches that go through the model one after another, whose
      gradients are added; less memory for the same step.
    params: How weights are stored; in bfloat16 they are rounded stochastically,
      and bfloat16_low8 adds 8 bits to each. Norms and biases are f32 always.
    grad_reduce: The dtype in which gradients are summed over devices.
    grad_accumulate: Of microbatches, the dtype in which gradients of weights in
      bfloat16 are added.
    seq: Tokens a sequence.
    seed: Of initial weights, order of the data and stochastic rounding.
    recipe: What the layers compute, and save for the backward pass, in FP8, or
      in INT8 to compare with.
    residuals: Of recipes coat, fp8_block and int8, what layers save for the
      backward pass; minimal recomputes more.
    attention: Of the same recipes, how q, k, v and output are saved.
    attention_compute: Of coat and fp8_block, what attention's products read;
      fp8 goes with attention fp8.
    activation_group_size: Of the same recipes, activations that share a scale.
    weight_cache: Of an FP8 recipe, what is computed of a weight once a step.
    evaluation: Of an FP8 recipe, what evaluation computes; same as training
      or bf16.
    compute: Of recipe bf16, what layers compute in; float32 shows what comes
      of rounding.
    remat: What jax.checkpoint saves of a layer, to recompute the rest in the
      backward pass: dots the results of its products, full its input alone;
      fp8, of recipe coat, both norms' inputs in FP8; fp8_layer its input,
      rounded to FP8; none does not use it.
    optimizer_in_backward: Step each layer's parameters as soon as its gradients
      exist, so that those of one layer exist at a time; needs optim.clip
      share or adaptive.
    implementation: Kernels where there is a GPU, or xla for none anywhere.
    init_from: Folder of a checkpoint of transformers, or of a run that began
      with one, whose weights, and whose model's shape in place of the preset's,
      the run begins with; see docs/models.md. Empty for random weights.
    resume: Continue the run in `out` from its last checkpoint.
    convert_state: With resume, convert a checkpoint of another codec, rounding,
      group size or second format, or of other params or optim.clip.
    overwrite: Replace the run in `out`.
    compare: Train a twin in BF16 with f32 moments too, and compare.
    compare_seeds: Twins, from as many seeds; their spread is shown.
    eval_every: Steps between evaluations; the last step is always evaluated.
    eval_batches: Held-out batches of an evaluation.
    report_state: At evaluations, report how well the moments fit their codes,
      against f32 moments that are stored for it (8 bytes a parameter more).
    watch: Steps between looks at what tells early that low precision hurts:
      outliers, lost codes, powers k; see `train.watch`. 0 for none, 100 is
      enough and costs 0.3 % of the time.
    save_every: Steps between checkpoints; the last step is always saved.
    keep: How many of the newest checkpoints stay.
    tensorboard: Write metrics to TensorBoard's event files too.
    wandb: Write metrics to Weights & Biases too; WANDB_PROJECT and its other
      variables say where.
    profile: Steps to trace with jax.profiler, as 5, or 5:100 for five after the
      first hundred. Empty for none.
    model: Shape of the model.
    optim: Optimizer and learning rate.
    data: Where tokens come from.

  Raises:
    ValueError: a value outside its range, or options that exclude each other.
  """

  model: ModelConfig = dataclasses.field(metadata=FIXED)
  optim: OptimConfig
  data: DataConfig = dataclasses.field(default=DataConfig(), metadata=SILENT)
  recipe: Literal["coat", "bf16", "fp8_linear", "fp8_block", "int8"] = (
    dataclasses.field(default="coat", metadata=FIXED)
  )
  residuals: coat_jax.recipe.Residuals = dataclasses.field(
    default="minimal", metadata=FIXED
  )
  attention: coat_jax.recipe.Kept = dataclasses.field(
    default="bf16", metadata=FIXED
  )
  attention_compute: coat_jax.recipe.Kept = dataclasses.field(
    default="bf16", metadata=FIXED
  )
  activation_group_size: Width = dataclasses.field(default=16, metadata=FIXED)
  weight_cache: coat_jax.recipe.WeightCache = "scale"
  evaluation: Literal["same", "bf16"] = dataclasses.field(
    default="same", metadata=SILENT
  )
  compute: Literal["bfloat16", "float32"] = "bfloat16"
  remat: Remat = "none"
  optimizer_in_backward: bool = False
  implementation: Literal["auto", "xla"] = "auto"
  out: str = dataclasses.field(metadata=SILENT)
  steps: Count
  mesh: str = ""
  distributed: bool = dataclasses.field(default=False, metadata=SILENT)
  batch: Count = dataclasses.field(metadata=FIXED)
  accumulate: Count = 1
  params: Stored = dataclasses.field(default="float32", metadata=CONVERTED)
  grad_reduce: GradDtype = "float32"
  grad_accumulate: GradDtype = "float32"
  seq: Count = dataclasses.field(metadata=FIXED)
  seed: Annotated[int, Range(0, 2**31 - 1)] = dataclasses.field(
    default=0, metadata=FIXED
  )
  init_from: str = dataclasses.field(default="", metadata=SILENT)
  resume: bool = dataclasses.field(default=False, metadata=SILENT)
  convert_state: bool = dataclasses.field(default=False, metadata=SILENT)
  overwrite: bool = dataclasses.field(default=False, metadata=SILENT)
  compare: Literal["bf16"] | None = dataclasses.field(
    default=None, metadata=SILENT
  )
  compare_seeds: Annotated[int, Range(1, 100)] = dataclasses.field(
    default=1, metadata=SILENT
  )
  eval_every: Count = dataclasses.field(default=1000, metadata=SILENT)
  eval_batches: Count = dataclasses.field(default=16, metadata=SILENT)
  report_state: bool = dataclasses.field(default=False, metadata=FIXED)
  watch: Annotated[int, Range(0, 2**31 - 1)] = dataclasses.field(
    default=0, metadata=SILENT
  )
  save_every: Count = dataclasses.field(default=1000, metadata=SILENT)
  keep: Count = dataclasses.field(default=3, metadata=SILENT)
  tensorboard: bool = dataclasses.field(default=False, metadata=SILENT)
  wandb: bool = dataclasses.field(default=False, metadata=SILENT)
  profile: str = dataclasses.field(default="", metadata=SILENT)

  def __post_init__(self):
    check_numbers(self)
    if not self.init_from:  # Else the model is not yet the run's.
      self.check_mesh()
    check_unused(self, "recipe", _RECIPES)
    check_remat(self.remat, self.coat_recipe())
    for name in ("grad_reduce", "distributed"):
      if not self.mesh and getattr(self, name) != getattr(type(self), name):
        raise ValueError(
          f"TrainConfig: {name} applies to a run on a mesh, got none; pass "
          "--mesh fsdp=8 with the number of devices, or leave it out"
        )
    check_combinations(self)
    self._check_steps()
    plain = ("bf16", "bfloat16", "float32", "float32")
    own = (self.recipe, self.compute, self.optim.codec, self.params)
    if self.compare and own == plain and self.remat != "fp8_layer":
      raise ValueError(
        "TrainConfig: compare=bf16 needs a run that differs from its twin, got "
        "recipe bf16 with codec float32 and params float32; change one of them"
      )

  def check_mesh(self):
    """Raises ValueError where the mesh cannot split the model or a batch.

    Or where the model cannot have its sequences.
    """
    remedy = "pass a smaller --seq"
    self.model.check_length("TrainConfig: seq", self.seq, remedy=remedy)
    names = ("vocab_size", "max_positions")
    self._check_sharding(**{name: getattr(self.model, name) for name in names})

  def _check_sharding(self, **sizes: Any):
    """Raises where the mesh cannot split the layers, a batch or these sizes."""
    tensor = self.mesh_sizes.get("tensor", 1)
    if self.recipe == "fp8_block" and tensor > 1:
      raise ValueError(
        "TrainConfig: recipe fp8_block needs one device along the tensor axis, "
        f"got {tensor}; split weights over fsdp, or pass --recipe coat"
      )
    shape = ("d_model", "d_ff", "num_heads", "num_kv_heads")
    sizes |= {name: getattr(self.model, name) for name in shape}
    check_fits(
      self.mesh_sizes,
      seq=self.seq,
      batch=self.batch,
      accumulate=self.accumulate,
      activation_group_size=(
        self.activation_group_size
        if "activation_group_size" in _RECIPES[self.recipe]
        else None
      ),
      **sizes,
    )
    if self.recipe == "fp8_block":
      of_heads = self.model.num_heads * self.model.head_width
      rows = {"d_model": self.model.d_model, "num_heads * width": of_heads}
      if self.model.num_experts is None:  # Whose products are BF16.
        rows["d_ff"] = self.model.d_ff
      check_tiles(self.mesh_sizes, rows)

  def _check_steps(self):
    """Raises where something takes more steps than the run has."""
    if self.optim.warmup_steps(self.steps) > self.steps:
      raise ValueError(
        f"TrainConfig: warmup must fit into {self.steps} steps, got "
        f"{self.optim.warmup:g}; lower optim.warmup, or give it as a share "
        "such as 0.1"
      )
    if sum(read_profile(self.profile)) > self.steps:
      raise ValueError(
        f"TrainConfig: profile must fit into {self.steps} steps, got "
        f"{self.profile}; trace fewer or earlier ones"
      )

  @property
  def mesh_sizes(self) -> dict[str, int]:
    """Size of each axis of the mesh; {} of one device."""
    return parse_mesh(self.mesh)

  @property
  def compute_dtype(self) -> jnp.dtype:
    """The dtype of activations."""
    return jnp.dtype(self.compute)

  def coat_recipe(self) -> coat_jax.recipe.CoatRecipe:
    """Builds the recipe of the layers."""
    arguments = {name: getattr(self, name) for name in _RECIPES[self.recipe]}
    arguments.pop("compute", None)
    if "activation_group_size" in arguments:
      arguments["group_size"] = arguments.pop("activation_group_size")
    if self.implementation == "xla":
      arguments["implementation"] = "xla"
    recipe = getattr(coat_jax.recipe, self.recipe)(**arguments)
    return dataclasses.replace(recipe, axes=self._mesh_axes())

  def _mesh_axes(self) -> MeshAxes | None:
    """The mesh axes of the layers."""
    if not (sizes := self.mesh_sizes):
      return None
    return mesh_axes(sizes, grad_dtype=self.grad_reduce)

  def with_f32_moments(self, recipe: str) -> Self:
    """Returns the same run in another recipe, all else in f32, and no twin.

    Options that the recipe does not take get their defaults; what layers keep
    in FP8 they keep in BF16 (remat full).
    """
    unused = defaults(self, _RECIPES)
    for name in _RECIPES[recipe]:
      unused.pop(name)
    optim = dataclasses.replace(
      self.optim,
      codec="float32",
      **defaults(self.optim, options_of_codecs()),
    )
    if self.remat in ("fp8", "fp8_layer"):
      unused["remat"] = "full"
    return dataclasses.replace(
      self,
      recipe=recipe,
      optim=optim,
      params="float32",
      grad_accumulate="float32",
      compare=None,
      **unused,
    )

  def bf16_twin(self, *, seed: int, out: str) -> Self:
    """Returns the run with BF16 layers and f32 moments, to compare with."""
    return dataclasses.replace(
      self.with_f32_moments("bf16"),
      compute="bfloat16",
      seed=seed,
      out=out,
      convert_state=False,
      report_state=False,
    )


def resume_rule(name: str, kind: type = TrainConfig) -> str:
  """Looks up what a resumed run may change.

  Args:
    name: A field of the configuration, or of a part of it as `optim.lr`.
    kind: Of the configuration.

  Returns:
    `fixed`, `converted`, `silent`, or `reported`, which is the default, also of
    names that are no field (any more). A part's rule is that of its fields,
    unless they have one.
  """
  rule, part = "reported", kind
  for word in name.split("."):
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    field = next((field for field in fields if field.name == word), None)
    if field is None:
      break
    rule, part = field.metadata.get("resume", rule), type_of(field)
  return rule
