# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run; `presets` contains published settings.

`python -m train.pretrain PRESET` reads a `TrainConfig` from the command line.
Options of the run itself have no prefix (`--steps 100`). Options of a part such
as `optim` begin with its name (`--optim.codec log8`). An option that the chosen
recipe, optimizer or codec would ignore is an error.

Annotations from `coat_jax.models.ranges` limit numbers to a range, and
`train.options` defines which options a resumed run may change.
"""

import dataclasses
from typing import Annotated, Literal, Self

import tyro

from coat_jax import recipes
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.params import mesh_axes
from coat_jax.models.ranges import Count, Range, Width, check_fields
from coat_jax.models.remat import check_remat
from coat_jax.recipes import (
  CoatRecipe,
  GradDtype,
  Kept,
  Residuals,
  WeightCache,
)
from train.data.tokens import DataConfig
from train.mesh import check_fits, parse_mesh
from train.optim_config import OptimConfig, options_of_codecs
from train.options import (
  Flag,
  check_unused,
  converted,
  fixed,
  read_profile,
  shown,
  silent,
  type_of,
  unused,
)
from train.weights import Stored

# The options that each recipe accepts.
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
    data: The files to read tokens from.
    seq: Tokens per sequence.
    batch: Sequences per step, over all devices.
    seed: Seed of the initial weights, the order of the data and stochastic
      rounding.
    model: The model's shape.
    init_from: A Hugging Face checkpoint, or a run that started from one. The
      new run starts with the checkpoint's weights, and the checkpoint's shape
      replaces the preset's; see docs/models.md.
    recipe: Selects the formats of the layers' matmuls and of saved activations;
      int8 is only for comparisons.
    residuals: How much layers save for the backward pass, with recipes coat,
      fp8_block and int8; minimal saves less and recomputes more.
    attention: The format in which layers save q, k and v for the backward pass,
      with recipes coat, fp8_block and int8; bf16 is recommended.
    activation_group_size: How many saved activations share a scale, with
      recipes coat, fp8_block and int8.
    experts: The format of the operands of expert matmuls, for a mixture of
      experts with recipe coat; fp8 is slow without a Hopper GPU.
    weight_cache: What to compute from the weights only once per step: nothing
      (none), their scales (scale), or scales and 8-bit codes (codes). Recipe
      bf16 does not accept this option.
    evaluation: The recipe of evaluations: the same as in training, or bf16.
    compute: The dtype of activations, with recipe bf16. A run in float32 shows
      how much rounding to BF16 matters.
    remat: What jax.checkpoint saves for each layer; the backward pass
      recomputes the rest. none saves all that the recipe saves. dots saves the
      results of matmuls. full saves only the layer's input. fp8 (only with
      recipes coat, fp8_block and int8) saves the inputs of both norms in FP8,
      or in INT8 with int8. fp8_layer saves the layer's input, in FP8 or INT8.
    params: How weights are stored. bfloat16 rounds stochastically;
      bfloat16_low8 stores 8 more bits per weight. Norms and biases are always
      f32.
    implementation: auto uses GPU or TPU kernels where there are any; xla never
      uses kernels.
    optim: The optimizer and the learning rate.
    steps: Number of optimizer steps of the whole run.
    accumulate: Microbatches per step. They go through the model one after
      another, which needs less memory, and their gradients are summed.
    grad_accumulate: The dtype in which gradients of bfloat16 weights are summed
      over microbatches.
    optimizer_in_backward: Update each layer's parameters as soon as its
      gradients are computed, so that only one layer's gradients are in memory
      at a time; needs optim.clip share or adaptive.
    mesh: Devices to train on, such as data=2,fsdp=4,tensor=1; see `train.mesh`.
    grad_reduce: The dtype in which gradients are summed over devices.
    distributed: Join the other processes of the run, which are found through
      SLURM, Open MPI or environment variables; see docs/sharding.md.
    resume: Continue the run in `out` from its last checkpoint.
    convert_state: With resume, convert a checkpoint that was saved with other
      values of params, optim.codec, optim.rounding, optim.group_size,
      optim.second or optim.clip.
    overwrite: Replace the run in `out`.
    save_every: Steps between checkpoints; the last step is always saved.
    keep: How many of the newest checkpoints to keep.
    eval_every: Steps between evaluations; the last step is always evaluated.
    eval_batches: Held-out batches per evaluation.
    compare: Also train a twin with BF16 layers and f32 moments, and compare the
      losses.
    compare_seeds: How many twins to train, with seeds `seed`, `seed + 1` and so
      on. The table at the end shows the spread of their losses.
    report_state: Report the error of the stored moments at each evaluation. For
      this the run also stores f32 moments (8 bytes per parameter).
    watch: Steps between checks for early signs that low precision will harm
      training, such as outliers; see `train.watch`. 0 turns the checks off.
      With 100, they cost 0.3 % of the time.
    tensorboard: Also write metrics to TensorBoard event files.
    wandb: Also write metrics to Weights & Biases, which reads WANDB_PROJECT and
      its other environment variables.
    profile: Number of steps to trace with jax.profiler. 3 traces three steps
      after the first five, and 3:100 traces three after the first hundred.

  Raises:
    ValueError: a value is outside its range, or options are incompatible.
  """

  # --help lists fields in this order: data, model, optimization, the rest.
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
  eval_batches: Count = 16
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
    _check_combinations(self)
    self._check_steps()

  def check_mesh(self):
    """Checks that the run's sequences, experts and mesh fit the model."""
    self.model.check_length(
      "TrainConfig: seq", self.seq, remedy="pass a smaller --seq"
    )
    check_experts(self)
    check_fits(self)

  def _check_steps(self):
    """Checks that the warmup and the profile fit into the run's steps."""
    if self.optim.warmup_steps(self.steps) > self.steps:
      raise ValueError(
        f"TrainConfig: warmup must fit into {self.steps} steps, got "
        f"{self.optim.warmup:g}; lower optim.warmup, or pass a share of all "
        "steps, such as 0.1"
      )
    if (last := sum(read_profile(self.profile))) > self.steps:
      raise ValueError(
        f"TrainConfig: profile must fit into {self.steps} steps, got "
        f"{self.profile}, which ends at step {last}; trace fewer steps, or "
        "earlier ones"
      )

  @property
  def mesh_sizes(self) -> dict[str, int]:
    """Returns the size of each axis of the mesh; {} for one device."""
    return parse_mesh(self.mesh)

  def coat_recipe(self) -> CoatRecipe:
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
    """Returns the run with another recipe, f32 weights and f32 moments.

    Options that the recipe does not accept get their defaults; remat fp8 and
    fp8_layer become full. The result has no twin.
    """
    reset = unused(self, _RECIPES, recipe)
    if self.remat in ("fp8", "fp8_layer"):
      reset["remat"] = "full"
    optim = dataclasses.replace(
      self.optim,
      codec="float32",
      **unused(self.optim, options_of_codecs(), "float32"),
    )
    return dataclasses.replace(
      self,
      recipe=recipe,
      optim=optim,
      params="float32",
      grad_accumulate="float32",
      compare=None,
      **reset,
    )

  def bf16_twin(self, *, seed: int, out: str) -> Self:
    """Builds the twin: a run with BF16 layers and f32 moments."""
    return dataclasses.replace(
      self.with_f32_moments("bf16"),
      compute="bfloat16",
      seed=seed,
      out=out,
      convert_state=False,
      report_state=False,
    )


def check_experts(config: TrainConfig) -> None:
  """Checks that a run with FP8 experts has experts."""
  if config.experts == "fp8" and not getattr(config.model, "num_experts", None):
    raise ValueError(
      "TrainConfig: experts fp8 needs a mixture of experts, got a model "
      "without experts; leave experts out"
    )


def _check_combinations(config: TrainConfig) -> None:
  for name in ("grad_reduce", "distributed"):
    if not config.mesh and getattr(config, name) != getattr(type(config), name):
      raise ValueError(
        f"TrainConfig: {name} applies to a run on a mesh, got no mesh; pass "
        f"--mesh (fsdp=8 for eight devices), or leave {name} out"
      )
  if config.grad_accumulate != "float32" and (
    config.accumulate == 1 or config.params == "float32"
  ):
    raise ValueError(
      "TrainConfig: grad_accumulate applies to runs with several microbatches "
      f"and bfloat16 weights, got accumulate {config.accumulate} and params "
      f"{config.params}; leave grad_accumulate out, or pass accumulate 2 or "
      "more and params bfloat16"
    )
  if config.resume and config.overwrite:
    raise ValueError(
      "TrainConfig: resume and overwrite are mutually exclusive, got both; "
      "pass resume to continue the run, or overwrite to replace it"
    )
  if config.convert_state and not config.resume:
    raise ValueError(
      "TrainConfig: convert_state applies to a resumed run, got resume False; "
      "pass resume too, or leave convert_state out"
    )
  twin = ("bf16", "bfloat16", "float32", "float32")
  own = (config.recipe, config.compute, config.optim.codec, config.params)
  if config.compare and own == twin and config.remat != "fp8_layer":
    raise ValueError(
      "TrainConfig: compare=bf16 would train the same run twice, got recipe "
      "bf16 with codec float32 and params float32; leave compare out, or pass "
      "another recipe"
    )
  _check_optimizer(config)
  if config.optimizer_in_backward:
    _check_in_backward(config)


def _check_optimizer(config: TrainConfig) -> None:
  adamw, both = ("coat_adamw",), ("coat_adamw", "coat_lion")
  needs = {
    "optimizer_in_backward": (config.optimizer_in_backward, both),
    "params bfloat16_low8": (config.params == "bfloat16_low8", both),
    "report_state": (config.report_state, adamw),
    "convert_state": (config.convert_state, adamw),
  }
  for option, (is_set, optimizers) in needs.items():
    if is_set and config.optim.optimizer not in optimizers:
      raise ValueError(
        f"TrainConfig: {option} needs optim.optimizer "
        f"{' or '.join(optimizers)}, got {config.optim.optimizer}; leave "
        f"{option} out, or pass --optim.optimizer coat_adamw"
      )


def _check_in_backward(config: TrainConfig) -> None:
  impossible = {
    f"accumulate {config.accumulate}": (
      config.accumulate > 1,
      "each microbatch would be a separate step; lower batch instead, and "
      "raise optim.b2 for the smaller batches",
    ),
    "optim.clip global": (
      config.optim.clip == "global",
      "the global norm is known only after the last gradient; pass "
      "--optim.clip share",
    ),
    "report_state": (
      config.report_state,
      "the report's f32 moments need all gradients at once; pass "
      "--no-report-state",
    ),
  }
  for option, (is_set, reason) in impossible.items():
    if is_set:
      raise ValueError(
        "TrainConfig: optimizer_in_backward cannot be combined with "
        f"{option}: {reason}"
      )


def resume_rule(name: str, kind: type = TrainConfig) -> str:
  """Returns the rule by which a resumed run may change an option.

  The rule is that of the field or, if the field has none, of the part that
  contains it. The default is "reported".
  """
  rule, part = "reported", kind
  for word in name.split("."):
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    field = next((field for field in fields if field.name == word), None)
    if field is None:
      break
    rule, part = field.metadata.get("resume", rule), type_of(field)
  return rule
