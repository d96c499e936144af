# SPDX-License-Identifier: Apache-2.0
"""Measures the errors of 8-bit formats on tensors of a trained model.

  python -m studies.quantization run
  python -m studies.quantization run --preset llama_60m --steps 1500 \\
    --batch 32 --data FILES --tokenizer FILE
  python -m studies.quantization plot

`run` trains a Llama on text (by default Python's standard library as bytes)
with the `bf16` recipe and f32 moments. Activations are BF16 on a GPU, and f32
on a CPU, where BF16 is slow. Then `run` measures the errors of 8-bit moments,
activations, gradients and weights, as relative RMS errors computed in float64.
It writes rows to docs/rows/quantization.jsonl, where they replace earlier rows
of the preset.

quantization.moments   Errors of the first moment m, the second moment v and
  m / (sqrt(v) + eps), as in Table 1 of arXiv:2410.19313. Formats are E4M3 and
  E5M2, with and without dynamic range expansion, and INT8. Values are rounded
  to nearest, in groups of 32 to 512 values.
quantization.codecs    These errors for every registered codec and rounding.
quantization.tensors   Errors of activations and gradients of all layers on a
  held-out batch, and of weights, in E4M3, E5M2 and INT8, with one scale per
  tensor, per group of 16 to 128 values, or per tile of a weight.
quantization.spread    amax / RMS and kurtosis of these activations, gradients
  and weights.
quantization.layer     Errors of layers' outputs and gradients, for each recipe.

`plot` draws docs/figures/quantization_moments.png and quantization_tensors.png
and prints the tables of docs/stability.md.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import arguments as args
from benchmarks.harness import emit, say
from coat_jax.models.config import ModelConfig
from studies import (
  accuracy,
  quantization_figure,
  quantization_tables,
  trained_moments,
)
from studies import quantization_error as errors
from studies.layer_tensors import LayerTensors, capture
from studies.rows import read_rows
from studies.trained_moments import GROUP_SIZE, Moments, Trained
from train.config import TrainConfig
from train.data.batches import held_out_batches, split_windows
from train.data.tokens import DataConfig, TokenSource, load_tokens
from train.plot import check_figure
from train.presets import PRESETS

BENCH = "quantization."
ROWS = Path("docs/rows/quantization.jsonl")
FIGURES = Path("docs/figures")
# Group sizes of moments. The tables use 128.
GROUP_SIZES = (32, 64, 128, 256, 512)
# Number of sequences on which the layers' tensors are captured.
_SEQUENCES = 4


class Study(NamedTuple):
  """The tensors to measure."""

  case: dict[str, Any]  # The values of `case` that all rows share.
  model: ModelConfig
  trained: Trained
  moments: Moments
  # For each part of the model: its groups in `moments`.
  parts: dict[str, slice]
  found: LayerTensors


def prepare(preset: str, config: TrainConfig, tokens: TokenSource) -> Study:
  """Trains the model, and captures its tensors on held-out text."""
  on_gpu = jax.default_backend() == "gpu"
  trained = trained_moments.train_model(
    config.model,
    tokens,
    steps=config.steps,
    batch=config.batch,
    seq=config.seq,
    rate=config.optim.lr,
    dtype=jnp.bfloat16 if on_gpu else jnp.float32,
  )
  _, held_out = split_windows(tokens, config.seq)
  (rows,) = held_out_batches(held_out, batch_size=_SEQUENCES, max_batches=1)
  found = capture(config.model, trained.params, jnp.asarray(rows["tokens"]))
  say(f"loss of the held-out batch: {float(found.loss):.3f}")
  sizes = dict(steps=config.steps, batch=config.batch, seq=config.seq)
  return Study(
    dict(preset=preset) | sizes,
    config.model,
    trained,
    *trained_moments.in_groups(trained.mu, trained.nu),
    found,
  )


def moment_rows(study: Study) -> Iterator[dict]:
  """Prints and yields a row per group size and measured pair of formats."""
  for group_size in GROUP_SIZES:
    shape = (-1, group_size)
    exact = Moments(*(x.reshape(shape) for x in study.moments))
    codecs = errors.orders(group_size)
    firsts = {
      name: errors.through(x, exact.mu) for name, (x, _) in codecs.items()
    }
    seconds = {
      name: errors.through(x, exact.nu) for name, (_, x) in codecs.items()
    }
    for first, second in itertools.product(firsts, seconds):
      if first != second and group_size != GROUP_SIZE:
        continue
      stored = Moments(firsts[first], seconds[second])
      case = dict(first=first, second=second, group_size=group_size)
      values = errors.moment_errors(exact, stored)
      yield emit("quantization.moments", study.case | case, **values)


def codec_rows(study: Study) -> Iterator[dict]:
  """Prints and yields a row for each codec and rounding."""
  for case in accuracy.cases():
    row = accuracy.codec_row(case, study.moments, study.parts)
    _, stored = accuracy.store(case.codec, study.moments)
    values = errors.moment_errors(study.moments, stored)
    values |= {
      name: row[name]
      for name in ("bytes_per_param", "update_rms_error", "max_update")
    }
    yield emit("quantization.codecs", study.case | case.row, **values)


def tensor_rows(study: Study) -> Iterator[dict]:
  """Prints and yields the rows of activations, gradients and weights."""
  for kind, name, layers in errors.tensors(study.found, study.trained.params):
    case = study.case | dict(kind=kind, tensor=name)
    yield emit("quantization.spread", case, **errors.spread(layers))
    groups = (*errors.GROUPS, "tile") if kind == "weight" else errors.GROUPS
    for shared, number in itertools.product(groups, errors.FORMATS):
      values = errors.tensor_errors(layers, number, shared)
      how = dict(shared=shared, format=number)
      yield emit("quantization.tensors", case | how, **values)


def layer_rows(study: Study) -> Iterator[dict]:
  """Prints and yields a row for each recipe."""
  for name, chosen in errors.RECIPES.items():
    values = errors.layer_errors(
      study.model, study.trained.params, study.found, chosen
    )
    yield emit("quantization.layer", study.case | dict(recipe=name), **values)


def measure(study: Study) -> list[dict]:
  """Prints and returns all rows."""
  parts = moment_rows(study), codec_rows(study), tensor_rows(study)
  return [*itertools.chain(*parts, layer_rows(study))]


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m studies.quantization",
    description=str(__doc__).splitlines()[0],
  )
  commands = parser.add_subparsers(dest="command", required=True)
  command = commands.add_parser("run", help="train and measure")
  command.add_argument("--preset", choices=PRESETS, default="demo")
  command.add_argument("--steps", type=args.count, default=1000)
  command.add_argument("--batch", type=args.count, help="default: the preset's")
  command.add_argument("--seq", type=args.count, help="default: the preset's")
  command.add_argument("--data", help="see --data.path of train.pretrain")
  command.add_argument("--tokenizer", help="see train.pretrain --help")
  command.add_argument("--rows", type=Path, default=ROWS)
  command = commands.add_parser(
    "plot", help="draw the figures and print the tables"
  )
  command.add_argument("--preset", choices=PRESETS, default="demo")
  command.add_argument("--rows", type=Path, default=ROWS)
  command.add_argument("--out", type=Path, default=FIGURES, help="a folder")
  return parser


@args.command
def main(arguments: list[str] | None = None) -> int:
  """Reads the command line and runs; returns the exit status."""
  parser = _parser()
  options = parser.parse_args(arguments)
  if options.command == "plot":
    with args.checked(parser):
      names = ("quantization_moments.png", "quantization_tensors.png")
      files = [options.out / name for name in names]
      for file in files:
        check_figure(file)
      rows = [
        row
        for row in read_rows(options.rows, BENCH)
        if row["case"]["preset"] == options.preset
      ]
      if not rows:
        raise ValueError(
          f"quantization: {options.rows} must contain rows of "
          f"{options.preset}, got none; use the command `run` first"
        )
    quantization_figure.draw_moments(rows, files[0])
    quantization_figure.draw_tensors(rows, files[1])
    for title, table in quantization_tables.tables(rows).items():
      print(f"{title}\n\n{table}\n")
    say(f"drew {files[0]} and {files[1]}")
    return 0
  with args.checked(parser):
    config = PRESETS[options.preset]()
    if config.model.family != "llama":
      raise ValueError(
        f"quantization: --preset must be a Llama, got {options.preset}; pass "
        "a preset of the family llama"
      )
    sizes = dict(batch=options.batch, seq=options.seq, steps=options.steps)
    sizes = {name: x for name, x in sizes.items() if x is not None}
    config = dataclasses.replace(config, **sizes)
    data = DataConfig(path=options.data, tokenizer=options.tokenizer)
    tokens = load_tokens(data, config.model.vocab_size)
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    others = [
      row
      for row in read_rows(options.rows, BENCH)
      if row["case"]["preset"] != options.preset
    ]
  study = prepare(options.preset, config, tokens)
  lines = [json.dumps(x, allow_nan=False) for x in [*others, *measure(study)]]
  options.rows.write_text("\n".join(lines) + "\n")
  return 0


if __name__ == "__main__":
  sys.exit(main())
