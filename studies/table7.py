# SPDX-License-Identifier: Apache-2.0
"""Computes the memory of the training steps in Table 7 of arXiv:2410.19313.

  python -m studies.table7

Each row describes a whole training step. The step is compiled for H200s, so no
GPU is needed. Some steps take minutes to compile. The number of GPUs (with
FSDP), the batch per GPU and the sequence length come from the paper, except in
one case.

Weights and gradients are f32, except in the variants "lean" and "leanest".
These variants store BF16 weights, and hold the BF16 gradients of only one layer
at a time. Moments are f32 with the `bf16` and `fp8_linear` recipes, and FP8
otherwise.
"""

import argparse
import dataclasses
from collections.abc import Iterable, Iterator

from benchmarks import aot, training_step
from benchmarks import arguments as args
from benchmarks.harness import emit, say
from train.memory.step import device_bytes


@dataclasses.dataclass(frozen=True)
class Case:
  """A setup in the paper's table, with `batch` sequences on each GPU."""

  preset: str
  gpus: int
  batch: int
  seq: int = 2048
  # The peak memory in GB that the paper reports for each variant. Variants that
  # ran out of memory in the paper are missing.
  peaks: dict[str, float] = dataclasses.field(default_factory=dict)

  def published_ratio(self, variant: str) -> float | None:
    """Returns the ratio of BF16's peak to the variant's peak in the paper.

    The paper does not have the variants minimal and minimal_attention, so their
    ratio uses the peak of COAT. If the paper does not report both peaks, the
    result is None.
    """
    reference = {"minimal": "coat", "minimal_attention": "coat"}
    peak = self.peaks.get(reference.get(variant, variant))
    return self.peaks["bf16"] / peak if peak and "bf16" in self.peaks else None


CASES = (
  Case("llama2_7b", 1, 1, peaks=dict(coat=79.3)),
  Case("llama2_7b", 2, 2, peaks=dict(coat=52.8)),
  Case("llama2_7b", 4, 2, peaks=dict(bf16=55.1, fp8_linear=51.1, coat=35.6)),
  Case("llama2_7b", 8, 2, peaks=dict(bf16=41.2, fp8_linear=37.2, coat=27.0)),
  Case("llama2_13b", 2, 1, seq=1024, peaks=dict(coat=73.2)),
  Case("llama2_13b", 4, 1, peaks=dict(bf16=76.1, fp8_linear=73.0, coat=49.1)),
  # Not in the paper: 13B with the batch of the 7B model.
  Case("llama2_13b", 4, 2),
  Case("llama2_13b", 8, 1, peaks=dict(bf16=49.4, fp8_linear=46.5, coat=32.5)),
  Case("llama_30b", 8, 1, peaks=dict(coat=70.5)),
)
VARIANTS = (
  "bf16",
  "bf16_dots",
  "fp8_linear",
  "coat",
  "minimal",
  "minimal_attention",
  "lean",
  "leanest",
)


def rows(cases: Iterable[Case], variants: Iterable[str]) -> Iterator[dict]:
  """Compiles a step for each case and variant, and prints a row for each step.

  `peak_bytes` is the peak memory of one GPU, and `activation_bytes` is this
  peak minus `weight_bytes`, `gradient_bytes` and `optimizer_bytes`.
  `ratio_to_bf16` is the peak of variant bf16 divided by the peak of this row.
  It is null if `variants` does not list bf16 before this row's variant.
  `published_ratio` is the same ratio computed from the peaks in the paper.
  """
  for case in cases:
    peak_of_bf16 = None
    for variant in variants:
      say(f"{case.preset}, GPUs: {case.gpus}, {variant}")
      values = measure(case, variant)
      peak = values["peak_bytes"]
      if variant == "bf16":
        peak_of_bf16 = peak
      ratio = peak_of_bf16 / peak if peak_of_bf16 else None
      yield emit(
        "memory.table7",
        describe(case, variant),
        **values,
        ratio_to_bf16=ratio,
        published_ratio=case.published_ratio(variant),
      )


def describe(case: Case, variant: str) -> dict:
  """Returns the row's `case`, which describes the compiled step."""
  options = training_step.VARIANTS[variant]
  return dict(
    preset=case.preset,
    gpus=case.gpus,
    batch=case.batch,
    seq=case.seq,
    recipe=options["recipe"],
    residuals=options.get("residuals", "minimal")
    if options["recipe"] == "coat"
    else "autodiff",
    attention=options.get("attention", "bf16"),
    remat=options.get("remat", "none"),
    params=options.get("params", "float32"),
    optimizer_in_backward=options.get("optimizer_in_backward", False),
    compiled_for="NVIDIA H200",
  )


def measure(case: Case, variant: str) -> dict[str, int]:
  """Compiles a step; returns its bytes on one GPU, in total and by purpose."""
  mesh = f"fsdp={case.gpus}" if case.gpus > 1 else ""
  config = training_step.configure(
    case.preset, variant, batch=case.batch, seq=case.seq, mesh=mesh
  )
  compiled, state = training_step.compile_step(config)
  peak = compiled.memory_analysis().peak_memory_in_bytes
  weights = device_bytes(state.params)
  optimizer = device_bytes(state.optimizer)
  # Gradients have the weights' dtype. With `optimizer_in_backward`, gradients
  # are temporary, so they are part of `activation_bytes`.
  gradients = 0 if config.optimizer_in_backward else weights
  return dict(
    peak_bytes=peak,
    weight_bytes=weights,
    gradient_bytes=gradients,
    optimizer_bytes=optimizer,
    activation_bytes=peak - weights - gradients - optimizer,
  )


@args.command
def main(arguments: list[str] | None = None) -> list[dict]:
  """Runs the command; returns the printed rows."""
  parser = argparse.ArgumentParser(
    prog="python -m studies.table7", description=__doc__.splitlines()[0]
  )
  for option, values in (
    ("presets", list(dict.fromkeys(case.preset for case in CASES))),
    ("gpus", sorted({case.gpus for case in CASES})),
    ("variants", VARIANTS),
  ):
    kind = type(values[0])
    parser.add_argument(
      f"--{option}", nargs="+", type=kind, choices=values, default=values
    )
  options = parser.parse_args(arguments)
  aot.only_compile()
  cases = [
    case
    for case in CASES
    if case.preset in options.presets and case.gpus in options.gpus
  ]
  return list(rows(cases, options.variants))


if __name__ == "__main__":
  main()
