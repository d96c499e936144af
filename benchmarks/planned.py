# SPDX-License-Identifier: Apache-2.0
"""Compares planned memory (`train.memory`) with the peak that XLA reports.

Each row describes a whole training step of a preset, compiled for H200s.
`peak_bytes` is the peak memory of a GPU according to XLA, and `planned_bytes`
is the planned peak. `error` is planned_bytes / peak_bytes - 1. `moment` is the
point of the step at which the planned peak occurs (see `train.memory.step`).
"""

from collections.abc import Iterable, Iterator

from benchmarks import training_step
from benchmarks.harness import emit, say
from train.config import TrainConfig
from train.memory.step import fullest, plan

# For each preset: the sequences per GPU, and the tokens per sequence.
LOADS = {
  "demo": (64, 256),
  "demo_gpu": (4, 2048),
  "demo_moe": (64, 256),
  "llama_60m": (16, 1024),
  "llama_130m": (16, 1024),
  "olmo_1b": (4, 2048),
  "olmo_7b": (2, 2048),
  "gpt2": (16, 1024),
  "llama2_7b": (2, 2048),
  "llama2_13b": (2, 2048),
  "llama_30b": (1, 2048),
  "llama3_8b": (1, 8192),
  "gemma2_2b": (2, 2048),
  "gemma2_9b": (2, 2048),
  "qwen3_30b_a3b": (1, 4096),
}
GPUS = (1, 2, 4, 8)
VARIANTS = ("bf16", "fp8_linear", "coat", "minimal", "lean", "leanest")


def cases(
  presets: Iterable[str], gpus: Iterable[int], variants: Iterable[str]
) -> list[dict]:
  """Lists the arguments of `configure` and `row` for each combination."""
  return [
    dict(preset=preset, variant=variant, gpus=count, batch=batch, seq=seq)
    for preset in presets
    for batch, seq in [LOADS[preset]]
    for count in gpus
    for variant in variants
  ]


def configure(
  preset: str, variant: str, *, gpus: int, batch: int, seq: int
) -> TrainConfig:
  """Builds the configuration of a step with `batch` sequences per GPU."""
  mesh = f"fsdp={gpus}" if gpus > 1 else ""
  return training_step.configure(
    preset, variant, batch=batch, seq=seq, mesh=mesh
  )


def rows(cases: Iterable[dict]) -> Iterator[dict]:
  """Compiles and plans a step for each case, and prints its row."""
  for case in cases:
    say(f"{case['preset']}, GPUs: {case['gpus']}, {case['variant']}")
    yield row(**case)


def row(preset: str, variant: str, *, gpus: int, batch: int, seq: int) -> dict:
  """Compiles and plans a step, and prints its row."""
  config = configure(preset, variant, gpus=gpus, batch=batch, seq=seq)
  compiled, _ = training_step.compile_step(config)
  peak = compiled.memory_analysis().peak_memory_in_bytes
  moment, memory = fullest(plan(config))
  return emit(
    "memory.plan",
    dict(
      preset=preset,
      variant=variant,
      gpus=gpus,
      batch=batch,
      seq=seq,
      compiled_for="NVIDIA H200",
    ),
    peak_bytes=peak,
    planned_bytes=memory.total,
    error=memory.total / peak - 1,
    moment=moment,
  )
