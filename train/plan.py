# SPDX-License-Identifier: Apache-2.0
"""Plans the memory that a run will need on each GPU.

  python -m train.plan llama2_7b --mesh fsdp=4 --batch 8 --seq 2048
  python -m train.plan llama2_13b --mesh fsdp=8 --hbm 141GB
  python -m train.plan llama2_13b --gpus 1
  python -m train.plan finetune --init-from llava-1.5-7b-hf --trained decoder

Options mean the same as in `train.pretrain` or, for a LLaVA, in
`train.finetune`. The table has a column for each usual way to train; the
columns "BF16" and "FP8 linears" assume f32 weights and moments. The unit is GB
(10^9 bytes), or MB for small models. With --gpus, the command lists the fastest
settings that fit, and prints the command line for the fastest. Nothing is
compiled and no device is used. docs/plan.md describes what is counted.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import jax
import tyro

from coat_jax.models.config import Remat
from coat_jax.models.ranges import Count, Width, check_fields
from coat_jax.models.vision_language import VisionLanguageConfig
from coat_jax.numerics.scaling import BLOCK
from coat_jax.recipes import GradDtype, Kept, WeightCache
from train import mesh as meshes
from train import pretrained
from train.command_line import read_options
from train.config import TrainConfig
from train.finetune_config import ChatData, FinetuneConfig, Trained
from train.memory import search
from train.memory.search import GB
from train.memory.step import fullest, largest, plan
from train.optim_config import Codec, OptimConfig, Second
from train.options import shown
from train.presets import PRESETS
from train.run.exits import exit_status
from train.run.metrics import format_table
from train.weights import Stored

MB = 10**6
_LARGEST_HBM = 10**6
_Preset = tyro.extras.literal_type_from_choices(PRESETS)


def _lean(run: TrainConfig, **options: Any) -> TrainConfig:
  params = "bfloat16" if run.params == "float32" else run.params
  clip = dataclasses.replace(run.optim, clip="share")
  return dataclasses.replace(
    run, params=params, optimizer_in_backward=True, optim=clip, **options
  )


COLUMNS: dict[str, Callable[[TrainConfig], TrainConfig]] = {
  "BF16": lambda run: run.with_f32_moments("bf16"),
  "FP8 linears": lambda run: run.with_f32_moments("fp8_linear"),
  "COAT": lambda run: dataclasses.replace(run, residuals="coat"),
  "COAT minimal": lambda run: dataclasses.replace(run, residuals="minimal"),
  "lean": _lean,
  "leanest": lambda run: _lean(run, remat="fp8"),
}
_WITH_IMAGES = ("COAT", "COAT minimal")
# These columns run the optimizer in the backward pass, which does not support
# microbatches.
_NOT_IN_MICROBATCHES = ("lean", "leanest")


def table(config: TrainConfig, hbm_bytes: int, images_each: int = 1) -> str:
  """Formats the plan of a run as a table with the columns of `COLUMNS`."""
  names = _WITH_IMAGES if _sees_images(config) else tuple(COLUMNS)
  if config.accumulate > 1:
    names = [name for name in names if name not in _NOT_IN_MICROBATCHES]
  runs = [COLUMNS[name](config) for name in names]
  found = [fullest(plan(run, images_each=images_each)) for run in runs]
  is_small = max(memory.total for _, memory in found) < GB
  unit, name = (MB, "MB") if is_small else (GB, "GB")
  lines: dict[str, list[str]] = {}
  for run, (moment, memory) in zip(runs, found, strict=True):
    most = largest(run, hbm_bytes, images_each=images_each)
    fits = "yes" if memory.total <= hbm_bytes else "no"
    cells = {
      part: f"{count / unit:.2f}" for part, count in memory._asdict().items()
    }
    cells |= {
      "peak": f"{memory.total / unit:.2f}",
      "peak is in the": moment,
      f"fits {hbm_bytes / GB:g} GB": fits,
      "largest batch": str(most) if most else "none",
    }
    for part, cell in cells.items():
      lines.setdefault(part, []).append(cell)
  rows = [[part, *cells] for part, cells in lines.items()]
  return format_table([f"{name} on each GPU", *names], rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
  """Plans the memory of a training run on each GPU, without running it.

  Attributes:
    preset: The run to plan. The columns of the table differ in the recipe and
      in other options.
    hbm: Memory of each GPU, such as 80, 80GB or 74.5GiB.
    gpus: Number of GPUs, all along the mesh axis fsdp. The command searches for
      the recipe, params, remat, batch and optimizer_in_backward that fit on
      these GPUs and train fastest.
    mesh: Devices to train on, as in train.pretrain: data=2,fsdp=4,tensor=1.
    batch: Sequences per step on all GPUs together. --gpus without --batch
      uses as many as fit, but at most the preset's batch.
    seq: Tokens per sequence.
    accumulate: Microbatches, as in train.pretrain.
    params: How weights are stored in the COAT and lean columns, as in
      train.pretrain. With --gpus, "any" tries all choices; otherwise "any" is
      the same as float32. The lean columns store bfloat16 instead of float32.
    remat: What is saved for each layer, as in train.pretrain. With --gpus,
      "any" tries all choices; otherwise "any" is the same as "none".
    attention: The format in which layers save q, k and v, as in train.pretrain.
    experts: The format of the operands of expert matmuls in the COAT and lean
      columns, as in train.pretrain.
    weight_cache: What to compute from the weights once per step, as in
      train.pretrain.
    grad_reduce: Dtype in which gradients are summed over GPUs, as in
      train.pretrain.
    optimizer: The optimizer, as in --optim.optimizer of train.pretrain.
      Estimated speeds always assume AdamW.
    codec: Codec of the moments in the COAT and lean columns, as in
      --optim.codec.
    group_size: How many moments share a scale, as in --optim.group-size.
    second: The format of the second moment, as in --optim.second.
    init_from: Folder of a Hugging Face checkpoint, or of a run that started
      from one. The plan uses the shape of this model, which may be a LLaVA.
    trained: Which parts of a LLaVA to train, as in train.finetune.
    images_each: Number of images that a LLaVA's sequence has room for.
      train.finetune derives this number from its data.
  """

  preset: tyro.conf.Positional[_Preset]  # pyright: ignore
  hbm: str = "80GB"
  gpus: Annotated[Count | None, shown("default: no search")] = None
  mesh: Annotated[str, shown("default: one device")] = ""
  batch: Annotated[Count | None, shown("default: the smallest possible")] = None
  seq: Annotated[
    Count | None, shown("default: the preset's; 2048 for a LLaVA")
  ] = None
  accumulate: Count = TrainConfig.accumulate
  params: Stored | Literal["any"] = "any"
  remat: Remat | Literal["any"] = "any"
  attention: Kept = TrainConfig.attention
  experts: Kept = TrainConfig.experts
  weight_cache: WeightCache = TrainConfig.weight_cache
  grad_reduce: GradDtype = TrainConfig.grad_reduce
  optimizer: Literal["coat_adamw", "coat_lion"] = "coat_adamw"
  codec: Codec = OptimConfig.codec
  group_size: Width = OptimConfig.group_size
  second: Second = OptimConfig.second
  init_from: Annotated[str, shown("default: the preset's shape")] = ""
  trained: Trained = FinetuneConfig.trained
  images_each: Count = 1

  def run(self) -> TrainConfig:
    """Builds the run's configuration; raises ValueError if it is invalid."""
    check_fields(self)
    if self.gpus and self.mesh:
      raise ValueError(
        f"plan: gpus chooses the mesh itself, got mesh {self.mesh} too; leave "
        "one of them out"
      )
    mesh = f"fsdp={self.gpus}" if (self.gpus or 1) > 1 else self.mesh
    preset = PRESETS[self.preset]()
    sizes = meshes.parse_mesh(mesh)
    batch = meshes.batch_devices(sizes) * self.accumulate
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
      experts=self.experts,
      weight_cache=self.weight_cache,
      grad_reduce=self.grad_reduce,
      optim=preset.optim.with_optimizer(
        self.optimizer,
        codec=self.codec,
        group_size=self.group_size,
        second=self.second,
      ),
      report_state=False,
      init_from=self.init_from,
    )
    if self.init_from:
      # `out` must differ from `init_from`, so use a name that no folder has.
      others: dict[str, Any] = dict(out="no run", data=ChatData(), samples=0)
      run = FinetuneConfig(**vars(run) | others, trained=self.trained)
      run = pretrained.with_shape(run)
    if not _sees_images(run):
      self._check_text()
      return run
    if self.seq is None:  # The preset is for text.
      run = dataclasses.replace(run, seq=FinetuneConfig.seq)
    self._check_images(run)
    return run

  def _check_images(self, run: TrainConfig):
    shape: Any = run.model
    if (needed := self.images_each * shape.tokens_each) > run.seq:
      raise ValueError(
        f"plan: the images of a sequence must fit into {run.seq} tokens, got "
        f"{self.images_each} * {shape.tokens_each} = {needed} tokens; "
        "pass a larger --seq or a smaller --images-each"
      )
    if self.gpus:
      raise ValueError(
        "plan: plans of vision-language models do not support gpus, got gpus "
        f"{self.gpus}; leave --gpus out"
      )

  def _check_text(self):
    for name in ("trained", "images_each"):
      if (got := getattr(self, name)) != getattr(type(self), name):
        raise ValueError(
          f"plan: {name} applies to vision-language models, got {got} with a "
          f"text-only model; leave {name} out, or pass --init-from with the "
          "folder of a LLaVA"
        )


def _sees_images(config: TrainConfig) -> bool:
  return isinstance(config.model, VisionLanguageConfig)


def read_bytes(text: str) -> int:
  """Converts text such as 80GB, 74.5GiB or 80 (in GB) to bytes."""
  for unit, size in (("GiB", 2**30), ("GB", GB), ("", GB)):
    number = text.removesuffix(unit)
    if text.endswith(unit) and number.replace(".", "", 1).isdigit():
      if 0 < float(number) <= _LARGEST_HBM:
        return round(float(number) * size)
  raise ValueError(
    "hbm: expected memory such as 80GB or 74.5GiB, above 0 and at most "
    f"{_LARGEST_HBM}GB, got {text[:40]!r}"
  )


def fastest(options: PlanConfig, config: TrainConfig, hbm_bytes: int) -> str:
  """Finds the fastest settings; returns their command line and a table."""

  def command(run: TrainConfig) -> str:
    return search.command(run, options.preset, PRESETS[options.preset]())

  params = None if options.params == "any" else options.params
  remat = None if options.remat == "any" else options.remat
  runs = list(search.candidates(config, params, remat))
  if not runs:
    raise ValueError(
      f"plan: the search has no runs with params {params} and remat {remat}; "
      "leave --params or --remat out"
    )
  fitting, smallest = search.search(
    runs, hbm_bytes, is_batch_fixed=options.batch is not None
  )
  if not fitting:
    raise ValueError(
      f"plan: {options.preset} does not fit into {hbm_bytes / GB:g} GB on each "
      f"of {options.gpus} GPUs: it needs {smallest.peak_bytes / GB:.1f} GB or "
      f"more ({command(smallest.run)}); use more GPUs, a smaller "
      "--seq or --batch, or a smaller state (--second factored or --optimizer "
      "coat_lion)"
    )
  best = fitting[0]
  return (
    f"fastest settings that fit, with a peak of {best.peak_bytes / GB:.1f} GB:"
    "\n\n"
    f"{command(best.run)}\n\n{search.report(fitting)}"
  )


def main(arguments: Sequence[str] | None = None) -> int:
  options = read_options(PlanConfig, "plan", arguments)
  # Planning needs no GPU, and other programs may be using it.
  jax.config.update("jax_platforms", "cpu")
  return exit_status(lambda: show(options))


def show(options: PlanConfig) -> None:
  hbm, config = read_bytes(options.hbm), options.run()
  gpus = math.prod(config.mesh_sizes.values())
  step = f"a step of {_count(config.batch, 'sequence')} of {config.seq} tokens"
  if options.gpus:
    step = f"{hbm / GB:g} GB per GPU, sequences of {config.seq} tokens"
    text = fastest(options, config, hbm)
  else:
    text = table(config, hbm, options.images_each)
    if _sees_images(config):
      images = _count(options.images_each, "image")
      step += f", {images} each, trained: {options.trained}"
  print(f"{options.preset}, {_count(gpus, 'GPU')}, {step}\n{text}")
  for line in _remarks(options, config):
    print(line)


def _count(number: int, name: str) -> str:
  return f"{number} {name}{'s' * (number != 1)}"


def _remarks(options: PlanConfig, config: TrainConfig) -> Iterator[str]:
  """Yields the lines to print below a plan."""
  assumed = []
  if options.preset == "finetune" and not _sees_images(config):
    if not options.init_from:
      assumed.append("the shape of llama2_7b")
    if not options.seq:
      assumed.append(f"sequences of {config.seq}")
  if assumed:
    yield (
      f"assumed, as in train.pretrain finetune: {', '.join(assumed)}; "
      "train.finetune uses the shape of its folder (--init-from), and "
      f"by default --batch {FinetuneConfig.batch} --seq {FinetuneConfig.seq}"
    )
  if getattr(config.model, "num_experts", None):
    tensor = config.mesh_sizes.get("tensor", 1)
    widths = config.model.d_model, config.model.d_ff // tensor
    if config.experts == "fp8" and any(width % BLOCK for width in widths):
      yield (
        "too low: the temporary memory, because XLA multiplies FP8 experts of "
        f"widths {widths}; our kernels need multiples of {BLOCK}"
      )
    yield (
      "not checked: mixtures of experts on meshes with data or tensor axes, "
      "and the speed of mixtures of experts (docs/plan.md)"
    )


if __name__ == "__main__":
  sys.exit(main())
