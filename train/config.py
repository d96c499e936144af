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

import coat_jax.numerics.recipes
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.params import mesh_axes
from coat_jax.models.ranges import Count, Range, Width, check_numbers
from coat_jax.models.remat import check_remat
from coat_jax.numerics.recipes import GradDtype, MeshAxes
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
  "coat": _COAT,
  "fp8_block": _COAT,
  "fp8_linear": ("weight_cache", "evaluation"),
  "bf16": ("compute",),
  "int8": _COAT,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """A training run.

  Attributes:
    out: The run's folder.
    data: Where tokens come from.
    seq: Tokens per sequence.
    batch: Sequences per step, over all devices.
    seed: Seed of the initial weights, the order of the data and stochastic
      rounding.
    model: The model's shape.
    init_from: A Hugging Face checkpoint, or a run that started from one. The
      run starts with its weights, and its shape replaces the preset's; see
      docs/models.md. Empty for random weights.
    recipe: What the layers compute and save for the backward pass in FP8; int8
      is there to compare with.
    residuals: What layers save for the backward pass, with recipes coat,
      fp8_block and int8; minimal saves less and recomputes more.
    attention: How q, k, v and the output of attention are saved, with the same
      recipes.
    activation_group_size: Activations that share a scale, with the same
      recipes.
    weight_cache: What is computed of a weight once per step, with FP8 recipes.
    evaluation: Evaluate in the recipe of training (same) or in bf16, with FP8
      recipes.
    compute: The dtype of activations, with recipe bf16; float32 shows the
      effect of rounding.
    remat: What jax.checkpoint saves of a layer; the backward pass recomputes
      the rest. none saves what the recipe says, dots the results of matmuls,
      full only the layer's input, fp8 (recipe coat) the inputs of both norms in
      FP8, fp8_layer the layer's input rounded to FP8.
    params: How weights are stored. bfloat16 rounds stochastically;
      bfloat16_low8 adds 8 bits to each weight. Norms and biases are always f32.
    implementation: auto uses kernels where there is a GPU, xla never does.
    optim: The optimizer and the learning rate.
    steps: Optimizer steps of the whole run.
    accumulate: Microbatches per step. They go through the model one after
      another and their gradients are added, which needs less memory.
    grad_accumulate: The dtype in which microbatches' gradients of bfloat16
      weights are added.
    optimizer_in_backward: Step each layer's parameters as soon as its gradients
      exist, so that only one layer's gradients exist at a time; needs
      optim.clip share or adaptive.
    mesh: Devices to train on, such as data=2,fsdp=4,tensor=1; see `train.mesh`.
      Empty for one device.
    grad_reduce: The dtype in which gradients are summed over devices.
    distributed: Join the run's other processes, which SLURM, Open MPI or the
      environment names; see docs/sharding.md.
    resume: Continue the run in `out` from its last checkpoint.
    convert_state: With resume, convert a checkpoint of another codec, rounding,
      group size or second format, or of other params or optim.clip.
    overwrite: Replace the run in `out`.
    save_every: Steps between checkpoints; the last step is always saved.
    keep: How many of the newest checkpoints to keep.
    eval_every: Steps between evaluations; the last step is always evaluated.
    eval_batches: Held-out batches per evaluation.
    compare: Also train a twin with BF16 layers and f32 moments, and compare.
    compare_seeds: How many twins to train, each with another seed; the table
      shows their spread.
    report_state: Whether evaluations report how well the moments fit their
      codes. This stores f32 moments too (8 bytes per parameter).
      --no-report-state skips it.
    watch: Steps between checks for early signs that low precision hurts, such
      as outliers and lost codes; see `train.watch`. 0 for none; 100 is enough
      and costs 0.3 % of the time.
    tensorboard: Also write metrics to TensorBoard event files.
    wandb: Also write metrics to Weights & Biases, which reads WANDB_PROJECT and
      its other environment variables.
    profile: Steps to trace with jax.profiler: 5, or 5:100 for five after the
      first hundred. Empty for none.

  Raises:
    ValueError: a value outside its range, or options that exclude each other.
  """

  # Options of data, then of the model, of optimization, and of the run.
  out: str = dataclasses.field(metadata=SILENT)
  data: DataConfig = dataclasses.field(default=DataConfig(), metadata=SILENT)
  seq: Count = dataclasses.field(metadata=FIXED)
  batch: Count = dataclasses.field(metadata=FIXED)
  seed: Annotated[int, Range(0, 2**31 - 1)] = dataclasses.field(
    default=0, metadata=FIXED
  )
  model: ModelConfig = dataclasses.field(metadata=FIXED)
  init_from: str = dataclasses.field(default="", metadata=SILENT)
  recipe: Literal["coat", "bf16", "fp8_linear", "fp8_block", "int8"] = (
    dataclasses.field(default="coat", metadata=FIXED)
  )
  residuals: coat_jax.numerics.recipes.Residuals = dataclasses.field(
    default="minimal", metadata=FIXED
  )
  attention: coat_jax.numerics.recipes.Kept = dataclasses.field(
    default="bf16", metadata=FIXED
  )
  activation_group_size: Width = dataclasses.field(default=16, metadata=FIXED)
  weight_cache: coat_jax.numerics.recipes.WeightCache = "scale"
  evaluation: Literal["same", "bf16"] = dataclasses.field(
    default="same", metadata=SILENT
  )
  compute: Literal["bfloat16", "float32"] = "bfloat16"
  remat: Remat = "none"
  params: Stored = dataclasses.field(default="float32", metadata=CONVERTED)
  implementation: Literal["auto", "xla"] = "auto"
  optim: OptimConfig
  steps: Count
  accumulate: Count = 1
  grad_accumulate: GradDtype = "float32"
  optimizer_in_backward: bool = False
  mesh: str = ""
  grad_reduce: GradDtype = "float32"
  distributed: bool = dataclasses.field(default=False, metadata=SILENT)
  resume: bool = dataclasses.field(default=False, metadata=SILENT)
  convert_state: bool = dataclasses.field(default=False, metadata=SILENT)
  overwrite: bool = dataclasses.field(default=False, metadata=SILENT)
  save_every: Count = dataclasses.field(default=1000, metadata=SILENT)
  keep: Count = dataclasses.field(default=3, metadata=SILENT)
  eval_every: Count = dataclasses.field(default=1000, metadata=SILENT)
  eval_batches: Count = dataclasses.field(default=16, metadata=SILENT)
  compare: Literal["bf16"] | None = dataclasses.field(
    default=None, metadata=SILENT
  )
  compare_seeds: Annotated[int, Range(1, 100)] = dataclasses.field(
    default=1, metadata=SILENT
  )
  report_state: bool = dataclasses.field(default=False, metadata=FIXED)
  watch: Annotated[int, Range(0, 2**31 - 1)] = dataclasses.field(
    default=0, metadata=SILENT
  )
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

  def coat_recipe(self) -> coat_jax.numerics.recipes.CoatRecipe:
    """Builds the recipe of the layers."""
    arguments = {name: getattr(self, name) for name in _RECIPES[self.recipe]}
    arguments.pop("compute", None)
    if "activation_group_size" in arguments:
      arguments["group_size"] = arguments.pop("activation_group_size")
    if self.implementation == "xla":
      arguments["implementation"] = "xla"
    recipe = getattr(coat_jax.numerics.recipes, self.recipe)(**arguments)
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
  """Looks up whether a resumed run may change a field.

  The rule is fixed, converted, silent or reported, the default. The rule of a
  part such as `optim` applies to its fields unless they have their own.
  """
  rule, part = "reported", kind
  for word in name.split("."):
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    field = next((field for field in fields if field.name == word), None)
    if field is None:
      break
    rule, part = field.metadata.get("resume", rule), type_of(field)
  return rule
