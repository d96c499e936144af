# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of a run on each GPU, before there is one.

  python -m train.plan llama2_7b --mesh fsdp=4 --batch 8 --seq 2048
  python -m train.plan llama2_13b --mesh fsdp=8 --hbm 141GB
  python -m train.plan llama2_13b --gpus 1
  python -m train.plan finetune --init-from llava-1.5-7b-hf --trained decoder

Options are as of `train.pretrain`, and of `train.finetune` where a model sees
images. The table has a column for each of the usual
ways to train, with f32 moments where at most products are in FP8; GB are 10^9
bytes, MB, of small models, 10^6. With --gpus it has what fits on so many, the
fastest first, and a command line that trains so. Nothing is compiled and no
device is used. docs/plan.md says what is counted.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import tyro

from coat_jax.models.config import Remat
from coat_jax.models.ranges import Count, Width, check_numbers
from coat_jax.models.vision_language import VisionLanguageConfig
from coat_jax.plan import fullest
from coat_jax.recipe import GradDtype, Kept, WeightCache
from train import attention, planning, pretrained, search
from train import mesh as meshes
from train.command_line import error_line, plain_errors
from train.config import TrainConfig
from train.finetune_config import ChatData, FinetuneConfig, Trained
from train.optim_config import Codec, OptimConfig
from train.presets import PRESETS
from train.run.metrics import format_table
from train.weights import Stored

GB, MB = 10**9, 10**6
_LARGEST_HBM = 10**6
_Preset = tyro.extras.literal_type_from_choices(PRESETS)


def _coat(run: TrainConfig, **options: Any) -> TrainConfig:
  return dataclasses.replace(run, recipe="coat", **options)


def _lean(run: TrainConfig, **options: Any) -> TrainConfig:
  params = "bfloat16" if run.params == "float32" else run.params
  clip = dataclasses.replace(run.optim, clip="share")
  return _coat(
    run, params=params, optimizer_in_backward=True, optim=clip, **options
  )


COLUMNS: dict[str, Callable[[TrainConfig], TrainConfig]] = {
  "BF16": lambda run: run.with_f32_moments("bf16"),
  "FP8 linears": lambda run: run.with_f32_moments("fp8_linear"),
  "COAT": lambda run: _coat(run, residuals="coat"),
  "COAT minimal": lambda run: _coat(run, residuals="minimal"),
  "lean": _lean,
  "leanest": lambda run: _lean(run, remat="fp8"),
}
_OF_EXPERTS = (
  "not checked: mixtures of experts on meshes with data or tensor axes, and "
  "how fast they are (docs/plan.md)"
)
# These need the gradients of a whole step at once.
_NOT_IN_MICROBATCHES = ("lean", "leanest")
_OF_IMAGES = ("COAT", "COAT minimal")


def table(config: TrainConfig, hbm_bytes: int, images_each: int = 1) -> str:
  """Writes the plan of a run, a column for each of `COLUMNS`.

  Args:
    config: The run; each column replaces its recipe.
    hbm_bytes: Memory of a GPU.
    images_each: As of `planning.plan`.

  Returns:
    Lines of text.
  """
  columns = dict(COLUMNS)
  if _sees_images(config):
    columns = {name: COLUMNS[name] for name in _OF_IMAGES}
  if config.accumulate > 1:
    for name in _NOT_IN_MICROBATCHES:
      columns.pop(name)
  states = planning.States()
  runs = [column(config) for column in columns.values()]
  found = [
    fullest(planning.plan(run, states.of(run), images_each=images_each))
    for run in runs
  ]
  is_small = max(memory.total for _, memory in found) < GB
  unit, name = (MB, "MB") if is_small else (GB, "GB")
  lines: dict[str, list[str]] = {}
  for run, (moment, memory) in zip(runs, found, strict=True):
    for part, count in memory._asdict().items():
      lines.setdefault(part, []).append(f"{count / unit:.2f}")
    most = planning.largest(
      run, hbm_bytes, states.of(run), images_each=images_each
    )
    lines.setdefault("peak", []).append(f"{memory.total / unit:.2f}")
    lines.setdefault("it is in the", []).append(moment)
    fits = "yes" if memory.total <= hbm_bytes else "no"
    lines.setdefault(f"fits {hbm_bytes / GB:g} GB", []).append(fits)
    lines.setdefault("largest batch", []).append(str(most) if most else "none")
  rows = [[part, *cells] for part, cells in lines.items()]
  return format_table([f"{name} on each GPU", *columns], rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
  """Memory of a training run on each GPU, without one.

  Attributes:
    preset: The run, with its recipe replaced by each of the columns.
    hbm: Memory of a GPU, as 80, 80GB or 74.5GiB.
    gpus: Tries recipes, weights, remat, the optimizer in the backward and
      batches on so many GPUs (fsdp), and prints the fastest that fits.
    mesh: As of train.pretrain: data=2,fsdp=4,tensor=1.
    batch: Sequences a step, on all GPUs; default 1 on each, with --gpus the
      most that fit, up to the preset's.
    seq: Tokens a sequence; default the preset's, of a LLaVA train.finetune's.
    accumulate: As of train.pretrain.
    params: As of train.pretrain, where layers are COAT's; any is float32, with
      --gpus all that there are.
    remat: As of train.pretrain; any is none, with --gpus all that there are.
    attention: As of train.pretrain.
    attention_compute: As of train.pretrain; speeds are those of bf16.
    weight_cache: As of train.pretrain.
    grad_reduce: As of train.pretrain.
    optimizer: As --optim.optimizer of train.pretrain; speeds are AdamW's.
    codec: As --optim.codec of train.pretrain, in the columns of COAT.
    group_size: As --optim.group-size of train.pretrain.
    init_from: As of train.pretrain: a folder of transformers, or a run that
      began with one, whose model's shape is planned in place of the preset's.
      It may be a LLaVA.
    trained: As of train.finetune, of a LLaVA.
    images_each: Of a LLaVA, images that a sequence has room for; train.finetune
      finds in its data how many.
  """

  preset: tyro.conf.Positional[_Preset]  # pyright: ignore
  hbm: str = "80GB"
  gpus: Count | None = None
  mesh: str = ""
  batch: Count | None = None
  seq: Count | None = None
  accumulate: Count = TrainConfig.accumulate
  params: Stored | Literal["any"] = "any"
  remat: Remat | Literal["any"] = "any"
  attention: Kept = TrainConfig.attention
  attention_compute: Kept = TrainConfig.attention_compute
  weight_cache: WeightCache = TrainConfig.weight_cache
  grad_reduce: GradDtype = TrainConfig.grad_reduce
  optimizer: Literal["coat_adamw", "coat_lion"] = "coat_adamw"
  codec: Codec = OptimConfig.codec
  group_size: Width = OptimConfig.group_size
  init_from: str = ""
  trained: Trained = FinetuneConfig.trained
  images_each: Count = 1

  def run(self) -> TrainConfig:
    """Builds the configuration of the run.

    Raises:
      ValueError: `train.pretrain` would refuse it.
    """
    check_numbers(self)
    if self.gpus and self.mesh:
      raise ValueError(
        "plan: gpus looks for settings on a mesh of its own, got mesh "
        f"{self.mesh} too; leave one of them out"
      )
    mesh = f"fsdp={self.gpus}" if (self.gpus or 1) > 1 else self.mesh
    preset = PRESETS[self.preset]()
    sizes = meshes.parse_mesh(mesh)
    devices = sizes.get("data", 1) * sizes.get("fsdp", 1)
    batch = devices * self.accumulate  # One each.
    if self.gpus:
      batch = max(batch, preset.batch // batch * batch)
    run = dataclasses.replace(
      preset,
      mesh=mesh,
      batch=batch if self.batch is None else self.batch,
      seq=preset.seq if self.seq is None else self.seq,
      accumulate=self.accumulate,
      params="float32" if self.params == "any" else self.params,
      remat="none" if self.remat == "any" else self.remat,
      attention=self.attention,
      attention_compute=self.attention_compute,
      weight_cache=self.weight_cache,
      grad_reduce=self.grad_reduce,
      optim=preset.optim.with_optimizer(
        self.optimizer, codec=self.codec, group_size=self.group_size
      ),
      report_state=False,
      init_from=self.init_from,
    )
    return self._with_shape(run)

  def _with_shape(self, run: TrainConfig) -> TrainConfig:
    """Gives the run the shape of the checkpoint that it begins with.

    Raises:
      ValueError: there is none, or an option is for another kind of model.
    """
    if self.init_from:
      options = {
        field.name: getattr(run, field.name)
        for field in dataclasses.fields(TrainConfig)
      }
      # No folder's, and so none that the run could begin with.
      options |= dict(out="no run", data=ChatData(), samples=0)
      run = pretrained.with_shape(
        FinetuneConfig(**options, trained=self.trained)
      )
    if not _sees_images(run):
      self._check_text()
      return run
    if self.seq is None:  # No preset has images.
      run = dataclasses.replace(run, seq=FinetuneConfig.seq)
    self._check_images(run)
    for name, is_set in {
      "gpus": self.gpus,
      "mesh": self.mesh,
      "accumulate": self.accumulate > 1,
      "remat": self.remat not in ("any", "none"),
      "weight_cache": self.weight_cache != TrainConfig.weight_cache,
    }.items():
      if is_set:
        raise ValueError(
          f"plan: a model that sees images is planned without {name}, on one "
          f"GPU, got {name} {getattr(self, name)}; leave it out"
        )
    return run

  def _check_images(self, run: TrainConfig):
    """Raises ValueError where a sequence has no room for its images."""
    shape: Any = run.model
    if (needed := self.images_each * shape.tokens_each) > run.seq:
      raise ValueError(
        f"plan: images of a sequence must fit into its {run.seq} tokens, got "
        f"{self.images_each} of {shape.tokens_each} tokens, {needed} in all; "
        "pass a larger --seq or a smaller --images-each"
      )

  def _check_text(self):
    """Raises ValueError where an option is for images."""
    for name, default in {
      "trained": FinetuneConfig.trained,
      "images_each": 1,
    }.items():
      if (got := getattr(self, name)) != default:
        raise ValueError(
          f"plan: {name} is of models that see images, got {got} with a model "
          "of text alone; leave it out, or pass --init-from with the folder of "
          "a LLaVA"
        )


def _sees_images(config: TrainConfig) -> bool:
  return isinstance(config.model, VisionLanguageConfig)


def read_bytes(text: str) -> int:
  """Reads 80GB, 74.5GiB, or 80, which is in GB.

  Raises:
    ValueError: it is written in another way, is 0 or absurd.
  """
  for unit, size in (("GiB", 2**30), ("GB", GB), ("", GB)):
    number = text.removesuffix(unit)
    if text.endswith(unit) and number.replace(".", "", 1).isdigit():
      if 0 < float(number) <= _LARGEST_HBM:
        return round(float(number) * size)
  raise ValueError(
    "hbm: memory is written as 80GB or 74.5GiB, above 0 and at most "
    f"{_LARGEST_HBM}GB, got {text[:40]!r}"
  )


def fastest(options: PlanConfig, hbm_bytes: int) -> str:
  """Looks for the settings that train fastest on `options.gpus`.

  Args:
    options: The command line.
    hbm_bytes: Memory of a GPU.

  Returns:
    Lines of text: a command, and a table of what fits.

  Raises:
    ValueError: no settings fit, or `train.pretrain` would refuse them all.
  """
  config = options.run()
  params = None if options.params == "any" else options.params
  remat = None if options.remat == "any" else options.remat
  fitting, smallest = search.search(
    search.candidates(config, params, remat),
    hbm_bytes,
    is_batch_fixed=options.batch is not None,
  )
  if not fitting:
    raise ValueError(
      f"plan: {options.preset} must fit {hbm_bytes / GB:g} GB on each of "
      f"{options.gpus} GPUs, got {smallest.peak_bytes / GB:.1f} GB at least "
      f"({search.describe(smallest.run)}); take more GPUs, or a smaller --seq "
      "or --batch"
    )
  best = fitting[0]
  preset = PRESETS[options.preset]()
  line = search.command(best.run, options.preset, preset)
  return (
    f"fastest that fits, {best.peak_bytes / GB:.1f} GB planned at the peak:\n\n"
    f"{line}\n\n{search.report(fitting)}"
  )


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit status."""
  with plain_errors():
    options = tyro.cli(PlanConfig, args=arguments, prog="python -m train.plan")
  # Nothing is computed, and a GPU that is in use is left alone.
  jax.config.update("jax_platforms", "cpu")
  try:
    hbm = read_bytes(options.hbm)
    config = options.run()
    text = (
      fastest(options, hbm)
      if options.gpus
      else table(config, hbm, options.images_each)
    )
  except ValueError as error:
    print(error_line(error), file=sys.stderr)
    return 2
  gpus = math.prod(config.mesh_sizes.values())
  step = f"a step of {_count(config.batch, 'sequence')} of {config.seq}"
  if options.gpus:
    step = f"{hbm / GB:g} GB on each, sequences of {config.seq}"
  elif _sees_images(config):
    images = _count(options.images_each, "image")
    step += f", {images} each, trained: {options.trained}"
  print(f"{options.preset}, {_count(gpus, 'GPU')}, {step}\n{text}")
  for line in _remarks(options, config):
    print(line)
  return 0


def _count(number: int, name: str) -> str:
  return f"{number} {name}{'s' * (number != 1)}"


def _remarks(options: PlanConfig, config: TrainConfig) -> Iterator[str]:
  """Yields what to know of a plan that its table does not say."""
  is_finetune = options.preset == "finetune"
  if is_finetune and not _sees_images(config):
    shape = "" if options.init_from else ", the shape of llama2_7b"
    seq = "" if options.seq else f", sequences of {config.seq}"
    if shape or seq:
      yield (
        f"as train.pretrain finetune: {(shape + seq)[2:]}; train.finetune has "
        f"the shape of its folder (--init-from) and by default --batch "
        f"{FinetuneConfig.batch} --seq {FinetuneConfig.seq}"
      )
  if getattr(config.model, "num_experts", None):
    yield _OF_EXPERTS
  # Its layers keep the same in all columns that compute in FP8.
  config = dataclasses.replace(config, recipe="coat")
  # Conversations have segments, packed or not, and tokens of train.pretrain
  # none; a preset's plan is for either.
  sees_images = _sees_images(config)
  of_tokens = _slow_attention(config, has_segments=sees_images)
  for part, why in _slow_attention(
    config, has_segments=is_finetune or sees_images
  ).items():
    where = "" if part in of_tokens else " in train.finetune alone"
    yield (
      f"not counted: attention in FP8 of the {part}{where}, which XLA computes"
      f"{why}; docs/plan.md#what-is-not-counted"
    )


def _slow_attention(config: TrainConfig, *, has_segments: bool) -> dict:
  """By part of the model, why XLA computes its attention in FP8."""
  found = attention.explain_fp8(config, has_segments=has_segments).items()
  start = attention.EVERYWHERE
  return {x: y.removeprefix(start) for x, y in found if y.startswith(start)}


if __name__ == "__main__":
  sys.exit(main())
