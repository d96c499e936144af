# SPDX-License-Identifier: Apache-2.0
"""Measures speed and memory of whole training steps on this host's GPUs.

  python -m benchmarks.training --preset llama2_7b --mesh fsdp=4 --batch 2
  python -m benchmarks.training --mesh fsdp=4 --batch 6 --variant minimal

The command trains a preset from random weights, with the training step of
`train.pretrain`. A step has `--accumulate` microbatches of `--batch` sequences
per GPU, or per group of GPUs along the mesh axis `tensor`. The data is the
source code of Python's standard library, as bytes.

For each variant, the command prints a JSON row, `training.step`, with
milliseconds per step, tokens per second per GPU, and seconds for compiling and
initializing. `peak_bytes` is the highest peak of allocated memory among the
GPUs, and `compiled_peak_bytes` is the peak that the compiler predicted. Each
variant runs in a separate process, because JAX cannot reset a GPU's peak.

Use --layers to change the number of layers, for example to find the largest
model that fits. Use --hbm to limit the memory of each GPU, for example to find
what fits on a smaller GPU.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks import arguments as args
from benchmarks.harness import emit, say
from benchmarks.training_step import VARIANTS, configure, variants_of
from train import mesh as meshes
from train import step
from train.config import TrainConfig
from train.data.batches import train_iterator
from train.data.tokens import DataConfig, load_tokens
from train.presets import PRESETS
from train.run import processes

_WARM_UP_STEPS = 3


def measure_steps(
  config: TrainConfig,
  mesh: Mesh | None,
  batches: Iterator[dict],
  *,
  steps: int,
) -> dict:
  """Times `steps` training steps after a warm-up; returns a row's values."""
  optimizer = step.build_optimizer(config, mesh)
  abstract = step.abstract_state(config, optimizer, mesh)
  where = meshes.batch_sharding(mesh) if mesh else None
  tokens = jax.ShapeDtypeStruct(
    (config.batch, config.seq + 1), np.int32, sharding=where
  )
  started = time.monotonic()
  graph = step.build_graph(config)
  program = step.train_step(config, graph, optimizer, mesh)
  compiled = step.compile_on(mesh, program, abstract, tokens, updates=True)
  compile_s = time.monotonic() - started
  started = time.monotonic()
  state = jax.block_until_ready(step.initial_state(config, optimizer, mesh))
  initialize_s = time.monotonic() - started

  times, losses = [], []
  for _ in range(_WARM_UP_STEPS + steps):
    batch = jax.device_put(next(batches)["tokens"], where)
    started = time.monotonic()
    state, metrics = compiled(state, batch)
    losses.append(float(metrics.loss))  # This waits until the step ends.
    times.append(1e3 * (time.monotonic() - started))
  p20, median, p80 = np.percentile(times[_WARM_UP_STEPS:], (20, 50, 80))
  devices = mesh.devices.flat if mesh else jax.devices()[:1]
  stats = [device.memory_stats() or {} for device in devices]
  tokens_a_gpu = config.batch * config.seq / len(stats)
  return dict(
    median_ms=median,
    p20_ms=p20,
    p80_ms=p80,
    tokens_per_s_per_gpu=1e3 * tokens_a_gpu / median,
    peak_bytes=max(s.get("peak_bytes_in_use", 0) for s in stats),
    compiled_peak_bytes=compiled.memory_analysis().peak_memory_in_bytes,
    compile_s=compile_s,
    initialize_s=initialize_s,
    first_loss=losses[0],
    last_loss=losses[-1],
  )


def configuration(options: argparse.Namespace, variant: str) -> TrainConfig:
  """Returns the configuration of the run that measures a variant."""
  config = configure(
    options.preset,
    variant,
    batch=options.batch * options.accumulate,
    seq=options.seq,
    mesh=options.mesh,
    accumulate=options.accumulate,
    grad_reduce=options.grad_reduce,
    weight_cache=options.weight_cache,
  )
  if options.layers is None:
    return config
  model = dataclasses.replace(config.model, num_layers=options.layers)
  return dataclasses.replace(config, model=model)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict:
  """Measures one variant in this process; prints its row."""
  processes.reserve_gpu_memory()
  with args.checked(parser):
    config = configuration(options, options.variant)
    mesh = meshes.make_mesh(config.mesh_sizes)
    source = load_tokens(DataConfig(), config.model.vocab_size)
    batches = train_iterator(
      source, seq_len=config.seq, batch_size=config.batch, seed=0
    )
  case = dict(
    preset=options.preset,
    variant=options.variant,
    layers=config.model.num_layers,
    mesh=options.mesh,
    batch_per_gpu=options.batch,
    seq=options.seq,
    accumulate=options.accumulate,
    grad_reduce=options.grad_reduce,
    weight_cache=options.weight_cache,
    hbm=options.hbm,
    xla_flags=os.environ.get("XLA_FLAGS", ""),
  )
  values = measure_steps(config, mesh, batches, steps=options.steps)
  return emit("training.step", case, **values)


def _fraction(hbm: float) -> str:
  """Formats `hbm` GB (10^9 bytes) as a fraction of a GPU's memory."""
  query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader"]
  try:
    found = subprocess.run(query, check=True, capture_output=True, text=True)
    total = float(found.stdout.split()[0]) * 2**20
  except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
    raise ValueError(
      f"--hbm needs nvidia-smi to find a GPU's memory, got the error {error}; "
      "leave --hbm out on a machine without a GPU"
    ) from error
  if not 0 < hbm * 1e9 <= total:
    raise ValueError(
      f"--hbm must be above 0 and at most {total / 1e9:.1f}, the GPU's memory "
      f"in GB, got {hbm}; pass a limit in this range"
    )
  return f"{hbm * 1e9 / total:.4f}"


@args.command
def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns 0 unless a variant failed."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.training",
    description="Measures speed and memory of whole training steps.",
  )
  parser.add_argument("--preset", choices=PRESETS, default="llama2_7b")
  parser.add_argument(
    "--variant", choices=VARIANTS, help="default: all that the options allow"
  )
  parser.add_argument("--layers", type=args.count, help="default: the preset's")
  parser.add_argument("--mesh", default="", help="see train.pretrain --help")
  parser.add_argument(
    "--batch",
    type=args.count,
    default=2,
    help="sequences on each GPU in a microbatch",
  )
  parser.add_argument(
    "--accumulate", type=args.count, default=1, help="microbatches per step"
  )
  parser.add_argument("--seq", type=args.count, default=2048)
  parser.add_argument("--steps", type=args.count, default=12)
  parser.add_argument(
    "--grad-reduce", choices=("float32", "bfloat16"), default="float32"
  )
  parser.add_argument(
    "--weight-cache", choices=("none", "scale", "codes"), default="scale"
  )
  parser.add_argument(
    "--hbm",
    type=float,
    help="limit of a GPU's memory in GB (10^9 bytes); default: none",
  )
  parser.add_argument("--in-process", action="store_true")
  options = parser.parse_args(arguments)
  if options.in_process:
    if options.variant is None:
      parser.error("--in-process measures one variant; pass --variant")
    run(parser, options)
    return 0
  environment = dict(os.environ)
  variants = (
    [options.variant]
    if options.variant
    else variants_of(options.preset, accumulate=options.accumulate)
  )
  with args.checked(parser):
    for variant in variants:
      configuration(options, variant)
    if options.hbm is not None:
      # This is the older name of XLA_CLIENT_MEM_FRACTION; the two conflict.
      environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
      environment["XLA_CLIENT_MEM_FRACTION"] = _fraction(options.hbm)
  failed = 0
  for variant in variants:
    command = [sys.executable, "-m", "benchmarks.training", "--in-process"]
    passed = list(sys.argv[1:] if arguments is None else arguments)
    command += [*passed, "--variant", variant]
    status = subprocess.run(command, env=environment).returncode
    if status == 2:  # Other variants would fail with the same wrong arguments.
      return status
    if status:
      say(f"{variant}: failed; the error is printed above")
      failed = 1
  return failed


if __name__ == "__main__":
  sys.exit(main())
