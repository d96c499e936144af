# SPDX-License-Identifier: Apache-2.0
"""Finds the learning rates at which low-precision training becomes unstable.

  python -m studies.stability run --minutes 9
  python -m studies.stability run --preset llama_60m --steps 1500 --best 2 \\
    --data FILES --tokenizer FILE
  python -m studies.stability plot

`run` trains a Llama once for every variant, learning rate and seed. The default
is a small model with 14.4 M parameters. It is trained on bytes of Python's
standard library in batches of 16 x 256, with AdamW, b2 0.95, weight decay 0.1
and clipping at 1. The learning rate warms up over a tenth of the steps, then
decays to 0 along a cosine. --best 2 uses, for each variant, only the two rates
that were best for the small model.

When a run ends or fails, a row is appended to docs/rows/stability.jsonl. Runs
that already have a row are skipped, so you can interrupt the command and
continue later. With --minutes, the command stops before a run that would
probably exceed this limit. Set JAX_COMPILATION_CACHE_DIR to compile each
program only once for all calls of the command.

The seed determines weights, data and stochastic rounding. So runs of different
variants with the same seed start from the same weights and read the same
batches.

A row contains

  train_loss          mean loss of the last 50 steps
  held_out_loss       mean loss of 16 held-out batches
  failed              "not finite" (the loss was not finite, so the run ended),
                      "diverged" (train_loss is more than half a nat above the
                      lowest mean loss of 50 steps), or null
  failed_at           step of the first loss that was not finite, or null. If
                      the run diverged: first step after the lowest mean at
                      which the mean loss of the last 50 steps was more than
                      half a nat above the lowest mean.
  spikes              number of losses after the warmup that exceed the mean of
                      the previous 50 losses by four standard deviations and by
                      0.1 nats; adjacent spikes count as one
  losses              mean loss of each 25 steps
  grad_norms          median gradient norm of each 25 steps
  largest_grad_norms  largest gradient norm of each 25 steps
  watch               values of `train.watch` at regular intervals, ten times in
                      1,000 steps: amax for each layer, other values only for
                      the worst layer
  seconds             duration of the run; a variant's first run in a call of
                      the command includes compiling

`plot` draws docs/figures/stability.png from the rows so far, and prints how
many of the planned runs have a row.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import arguments as args
from benchmarks.harness import emit, say
from coat_jax.models.config import ModelConfig
from coat_jax.numerics.formats import E4M3
from coat_jax.recipes import Formats
from studies import stability_figure
from studies.rows import read_rows
from studies.stability_run import Data, Programs, Setup, train_one
from train.config import OptimConfig, TrainConfig
from train.data.tokens import DTYPES, DataConfig, TokenSource, load_tokens
from train.plot import check_figure
from train.presets import PRESETS

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 1e-1, 1.0)
SEEDS = (0, 1, 2)
ROWS = Path("docs/rows/stability.jsonl")
FIGURE = Path("docs/figures/stability.png")
_F32 = dict(optim=dict(codec="float32"))


def study() -> TrainConfig:
  """Returns the configuration of the small model with the `coat` recipe."""
  return TrainConfig(
    out="unused",
    model=ModelConfig(
      family="llama",
      num_layers=8,
      d_model=384,
      d_ff=1024,
      num_heads=6,
      num_kv_heads=6,
      vocab_size=256,
    ),
    optim=OptimConfig(lr=1e-3, warmup=0.1),
    steps=1000,
    batch=16,
    seq=256,
  )


# The changes that each variant makes to the configuration.
VARIANTS: dict[str, dict[str, Any]] = {
  "bf16": dict(recipe="bf16", **_F32),
  "fp8_linear": dict(recipe="fp8_linear", **_F32),
  "coat": {},
  "coat, nearest": dict(optim=dict(rounding="nearest")),
  "coat, E4M3 gradients": dict(formats=Formats(gradients=E4M3)),
  "coat, BF16 weights": dict(params="bfloat16"),
  "fp8_block": dict(recipe="fp8_block"),
  "int8": dict(recipe="int8"),
  "coat, INT8 moments": dict(optim=dict(codec="int8")),
}


def setup(base: TrainConfig, variant: str) -> Setup:
  """Builds the setup of a variant."""
  changes = dict(VARIANTS[variant])
  formats = changes.pop("formats", None)
  optim = dataclasses.replace(base.optim, lr=1.0, **changes.pop("optim", {}))
  return Setup(dataclasses.replace(base, optim=optim, **changes), formats)


def cases(
  variants: Iterable[str],
  rates: dict[str, list[float]],
  seeds: Iterable[int],
  done: list[dict],
  case: dict[str, Any],
) -> Iterator[dict[str, Any]]:
  """Yields `case` with the variant, rate and seed of each run without a row."""
  known = {json.dumps(row["case"], sort_keys=True) for row in done}
  for variant in variants:
    for rate in rates[variant]:
      for seed in seeds:
        found = case | dict(variant=variant, rate=rate, seed=seed)
        if json.dumps(found, sort_keys=True) not in known:
          yield found


def progress(done: list[dict]) -> str:
  """Describes how many planned runs of the small model have a row."""
  rates = dict.fromkeys(VARIANTS, list(RATES))
  case = _common("study", study())
  every = len(VARIANTS) * len(RATES) * len(SEEDS)
  count = every - len([*cases(VARIANTS, rates, SEEDS, done, case)])
  others = sum(row["case"]["preset"] == "study" for row in done) - count
  share = f"All {every}" if count == every else f"{count} of {every}"
  return (
    f"{share} runs of the grid are complete. Besides the grid, {others} runs "
    "used other rates."
  )


def _common(preset: str, base: TrainConfig) -> dict[str, Any]:
  """Returns the part of a case that all runs of a model share."""
  return dict(preset=preset, steps=base.steps, batch=base.batch, seq=base.seq)


def run(
  base: TrainConfig,
  todo: Iterable[dict[str, Any]],
  source: TokenSource,
  rows: Path,
  *,
  minutes: float,
) -> int:
  """Trains the cases in `todo`; returns the number of finished runs."""
  started, count = time.monotonic(), 0
  # The longest run so far, in seconds. The key is True for each variant's first
  # run, which includes compiling, and False for all later runs.
  longest = {True: 0.0, False: 0.0}
  data, variant = Data(source, base), None
  found = programs = None
  for case in todo:
    is_first = case["variant"] != variant
    expected = longest[is_first] or max(longest.values())
    left = 60 * minutes - (time.monotonic() - started)
    if left < 1.1 * expected:
      say(f"{minutes:g} minutes are over; run the command again to continue")
      break
    began = time.monotonic()
    if is_first:
      variant = case["variant"]
      found = setup(base, variant)
      programs = Programs(found)
    assert found is not None and programs is not None
    values = train_one(programs, found.config, data, case["rate"], case["seed"])
    row = emit("stability", case, **values)
    with rows.open("a") as file:
      file.write(json.dumps(row, allow_nan=False) + "\n")
    seconds = time.monotonic() - began
    longest[is_first] = max(longest[is_first], seconds)
    count += 1
  return count


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m studies.stability",
    description=str(__doc__).splitlines()[0],
  )
  commands = parser.add_subparsers(dest="command", required=True)
  command = commands.add_parser(
    "run", help="train the runs that have no row yet"
  )
  command.add_argument("--preset", choices=["study", *PRESETS], default="study")
  command.add_argument("--variants", nargs="+", choices=VARIANTS)
  command.add_argument("--rates", nargs="+", type=float, default=RATES)
  command.add_argument(
    "--best", type=args.count, help="use only the small model's N best rates"
  )
  command.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
  command.add_argument("--steps", type=args.count, default=1000)
  command.add_argument("--batch", type=args.count, help="default: the preset's")
  command.add_argument("--seq", type=args.count, help="default: the preset's")
  command.add_argument("--data", help="see --data.path of train.pretrain")
  command.add_argument("--data-dtype", choices=DTYPES, default="text")
  command.add_argument("--tokenizer", help="see train.pretrain --help")
  command.add_argument("--minutes", type=float, default=1e9)
  command.add_argument("--rows", type=Path, default=ROWS)
  command = commands.add_parser("plot", help="draw the figure")
  command.add_argument("--preset", choices=["study", *PRESETS], default="study")
  command.add_argument("--rows", type=Path, default=ROWS)
  command.add_argument("--out", type=Path, default=FIGURE)
  return parser


@args.command
def main(arguments: list[str] | None = None) -> int:
  """Reads the command line and runs; returns the exit status."""
  parser = _parser()
  options = parser.parse_args(arguments)
  with args.checked(parser):
    done = read_rows(options.rows, "stability")
    if options.command == "plot":
      check_figure(options.out)
      print(stability_figure.draw(done, options.preset, options.out))
      if options.preset == "study":
        print(progress(done))
      say(f"drew {options.out}")
      return 0
    base = study() if options.preset == "study" else PRESETS[options.preset]()
    sizes = dict(batch=options.batch, seq=options.seq, steps=options.steps)
    base = dataclasses.replace(
      base,
      report_state=False,
      compare_seeds=1,
      **{name: x for name, x in sizes.items() if x is not None},
    )
    variants = options.variants or list(VARIANTS)
    rates = {name: list(options.rates) for name in variants}
    if options.best:
      rates = {
        name: stability_figure.best_rates(done, name, options.best)
        for name in variants
      }
    config = DataConfig(
      path=options.data, tokenizer=options.tokenizer, dtype=options.data_dtype
    )
    source = load_tokens(config, base.model.vocab_size)
    options.rows.parent.mkdir(parents=True, exist_ok=True)
  case = _common(options.preset, base)
  todo = cases(variants, rates, options.seeds, done, case)
  count = run(base, todo, source, options.rows, minutes=options.minutes)
  say(f"{count} runs, in {options.rows}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
