# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run; `presets` contains published settings.

`python -m train.pretrain PRESET` reads a `TrainConfig` from the command line.
Options of the run have no prefix (`--steps 100`), options of a part begin with
its name (`--optim.codec log8`). An option that the chosen recipe or codec would
ignore is an error.

Annotations from `coat_jax.models.ranges` limit the values of numbers, and
`train.options` defines what a resumed run may change.
"""

import dataclasses
from typing import Annotated, Literal, Self

import tyro

from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.params import mesh_axes
from coat_jax.models.ranges import Count, Range, Width, check_fields
from coat_jax.models.remat import check_remat
from coat_jax.numerics import recipes
from coat_jax.numerics.recipes import (
  CoatRecipe,
  GradDtype,
  Kept,
  Residuals,
  WeightCache,
)
from train.combinations import check_combinations
from train.data.tokens import DataConfig
from train.mesh import check_fits, parse_mesh
from train.optim_config import OptimConfig, options_of_codecs
from train.options import (
  Flag,
  check_unused,
  converted,
  defaults,
  fixed,
  read_profile,
  shown,
  silent,
  type_of,
)
from train.weights import Stored

# The options that each recipe accepts; the others must keep their defaults.
_CACHED = ("weight_cache", "evaluation")
_COAT = ("residuals", "attention", "activation_group_size", *_CACHED)
_RECIPES = {
  "coat": (*_COAT, "experts"),
  "fp8_block": _COAT,
  "fp8_linear": _CACHED,
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
      docs/models.md.
    recipe: What the layers compute and save for the backward pass in FP8; int8
      is only for comparisons.
    residuals: What layers save for the backward pass, with recipes coat,
      fp8_block and int8; minimal saves less and recomputes more.
    attention: How q, k and v are saved, with the same recipes; bf16 is
      recommended.
    activation_group_size: How many activations share a scale, with the same
      recipes.
    experts: Format of the operands of experts' products, with recipe coat; fp8
      is slow without a Hopper GPU.
    weight_cache: What is computed from weights once per step, with FP8 recipes.
    evaluation: Evaluate in the recipe of training (same) or in bf16, with FP8
      recipes.
    compute: The dtype of activations, with recipe bf16; float32 shows the
      effect of rounding.
    remat: What jax.checkpoint saves of a layer; the backward pass recomputes
      the rest. none saves what the recipe saves, dots the results of matmuls,
      full only the layer's input, fp8 (recipe coat) the inputs of both norms in
      FP8, fp8_layer the layer's input rounded to FP8.
    params: How weights are stored. bfloat16 rounds stochastically;
      bfloat16_low8 adds 8 bits to each weight. Norms and biases are always f32.
    implementation: auto uses GPU kernels if there is a GPU; xla never does.
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
    grad_reduce: The dtype in which gradients are summed over devices.
    distributed: Join the run's other processes, which SLURM, Open MPI or the
      environment names; see docs/sharding.md.
    resume: Continue the run in `out` from its last checkpoint.
    convert_state: With resume, convert a checkpoint that was saved with another
      codec, rounding, group size, second format, params or optim.clip.
    overwrite: Replace the run in `out`.
    save_every: Steps between checkpoints; the last step is always saved.
    keep: How many of the newest checkpoints to keep.
    eval_every: Steps between evaluations; the last step is always evaluated.
    eval_batches: Held-out batches per evaluation.
    compare: Also train a twin with BF16 layers and f32 moments, and compare.
    compare_seeds: How many twins to train, each with another seed; the table
      shows their spread.
    report_state: Report at each evaluation how well the moments fit their
      codes. This stores f32 moments too (8 bytes per parameter).
    watch: Steps between checks for early signs that low precision hurts, such
      as outliers and lost codes; see `train.watch`. 0 for none; 100 is enough
      and costs 0.3 % of the time.
    tensorboard: Also write metrics to TensorBoard event files.
    wandb: Also write metrics to Weights & Biases, which reads WANDB_PROJECT and
      its other environment variables.
    profile: Steps to trace with jax.profiler: 5, or 5:100 for five after the
      first hundred.

  Raises:
    ValueError: a value outside its range, or options that exclude each other.
  """

  # Options of the data come first, then the model, optimization, and the run.
  out: Annotated[str, tyro.conf.arg(metavar="RUN")] = silent()
  data: DataConfig = silent(DataConfig())
  seq: Count = fixed()
  batch: Count = fixed()
  seed: Annotated[int, Range(0, 2**31 - 1)] = fixed(0)
  model: ModelConfig = fixed()
  init_from: Annotated[str, shown("default: random weights")] = silent("")
  recipe: Literal["coat", "bf16", "fp8_linear", "fp8_block", "int8"] = fixed(
    "coat"
  )
  residuals: Residuals = fixed("minimal")
  attention: Kept = fixed("bf16")
  activation_group_size: Width = fixed(16)
  experts: Kept = fixed("bf16")
  weight_cache: WeightCache = "scale"
  evaluation: Literal["same", "bf16"] = silent("same")
  compute: Literal["bfloat16", "float32"] = "bfloat16"
  remat: Remat = "none"
  params: Stored = converted("float32")
  implementation: Literal["auto", "xla"] = "auto"
  optim: OptimConfig
  steps: Count
  accumulate: Count = 1
  grad_accumulate: GradDtype = "float32"
  optimizer_in_backward: Flag = False
  mesh: Annotated[str, shown("default: one device")] = ""
  grad_reduce: GradDtype = "float32"
  distributed: Flag = silent(False)
  resume: Flag = silent(False)
  convert_state: Flag = silent(False)
  overwrite: Flag = silent(False)
  save_every: Count = silent(1000)
  keep: Count = silent(3)
  eval_every: Count = silent(1000)
  eval_batches: Count = silent(16)
  compare: Annotated[Literal["bf16"] | None, shown("default: no twin")] = (
    silent(None)
  )
  compare_seeds: Annotated[int, Range(1, 100)] = silent(1)
  report_state: bool = fixed(False)
  watch: Annotated[int, Range(0, 2**31 - 1)] = silent(0)
  tensorboard: Flag = silent(False)
  wandb: Flag = silent(False)
  profile: Annotated[str, shown("default: no trace")] = silent("")

  def __post_init__(self):
    check_fields(self)
    if not self.init_from:  # Otherwise the checkpoint replaces the model.
      self.check_mesh()
    check_unused(self, "recipe", _RECIPES)
    check_remat(self.remat, self.coat_recipe())
    check_combinations(self)
    self._check_steps()

  def check_mesh(self):
    """Checks that sequences fit the model, and that both fit the mesh."""
    self.model.check_length(
      "TrainConfig: seq", self.seq, remedy="pass a smaller --seq"
    )
    check_fits(self)

  def _check_steps(self):
    """Checks that the warmup and the profile end before the run does."""
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
    """Returns the size of each axis of the mesh; {} for one device."""
    return parse_mesh(self.mesh)

  def coat_recipe(self) -> CoatRecipe:
    """Builds the recipe of the layers."""
    arguments = {name: getattr(self, name) for name in _RECIPES[self.recipe]}
    arguments.pop("compute", None)
    if "activation_group_size" in arguments:
      arguments["group_size"] = arguments.pop("activation_group_size")
    if self.implementation == "xla":
      arguments["implementation"] = "xla"
    axes = None
    if sizes := self.mesh_sizes:
      axes = mesh_axes(sizes, grad_dtype=self.grad_reduce)
    recipe = getattr(recipes, self.recipe)(**arguments)
    return dataclasses.replace(recipe, axes=axes)

  def with_f32_moments(self, recipe: str) -> Self:
    """Returns the run with this recipe, all else in f32, and no twin.

    Options that the recipe does not accept get their defaults. If remat keeps
    inputs in FP8, it becomes full, which keeps them in BF16.
    """
    unused = defaults(self, _RECIPES)
    for name in _RECIPES[recipe]:
      unused.pop(name)
    if self.remat in ("fp8", "fp8_layer"):
      unused["remat"] = "full"
    optim = dataclasses.replace(
      self.optim,
      codec="float32",
      **defaults(self.optim, options_of_codecs()),
    )
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

  The rule is fixed, converted, silent or (by default) reported. The rule of a
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
