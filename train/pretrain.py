# SPDX-License-Identifier: Apache-2.0
"""Trains a language model, from random weights or those of a checkpoint.

  python -m train.pretrain PRESET [options]      PRESET --help shows the options
  python -m train.pretrain demo --compare bf16   what `make train` runs

`main` reads the command line; `train.loop` is the run itself, from data to
checkpoints. `train/__init__` says which files a program of your own needs of
all this.

Exit status: 0 when training finished; 1 when a loss or a gradient was not
finite, a file could not be written, or a device has too little memory; 2 when
the input was wrong, and then nothing was changed; 130 and 143 after SIGINT and
SIGTERM, when the state was saved. All processes of a run (`--distributed`) have
the same status, except where one could not write a file or had too little
memory: JAX ends the others then.

JAX may take 93.5 % of a GPU's memory, about the 80 GB that an H100 is sold
with, instead of its usual 75 %, unless XLA_CLIENT_MEM_FRACTION says otherwise.
"""

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence

import tyro

from train.command_line import check_given, words_of
from train.config import TrainConfig
from train.data.batches import split_windows
from train.data.tokens import load_tokens
from train.loop import run_command
from train.optim_config import OPTIMIZERS, OptimConfig
from train.options import defaults
from train.presets import PRESETS
from train.run.data import RunData

_DESCRIPTION = """\
Trains a language model; each preset's --help lists its options.

  python -m train.pretrain PRESET --out RUN [options]"""


def main(arguments: Sequence[str] | None = None) -> int:
  """Reads the command line, trains, and returns the exit status."""

  words = words_of(arguments)

  def read() -> TrainConfig:
    config = tyro.extras.overridable_config_cli(
      _presets(words),
      args=words,
      prog="python -m train.pretrain",
      description=_DESCRIPTION,
      config=(tyro.conf.FlagCreatePairsOff,),
    )
    check_given(config, words)
    return config

  return run_command(read, load)


def _presets(
  arguments: Sequence[str],
) -> dict[str, tuple[str, TrainConfig]]:
  """Makes the presets, for the optimizer that the command line names.

  What a preset sets and this optimizer lacks gets its default: tyro does not
  say what of a configuration was given, and it would be refused as if it were.
  """
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  parser.add_argument("--optim.optimizer", dest="optimizer", nargs="?")
  words = ("--no-report-state", "--no_report_state")
  parser.add_argument(*words, dest="is_off", action="store_true")
  given, _ = parser.parse_known_args(arguments)

  unused, off = {}, {}
  if given.optimizer in OPTIMIZERS:
    unused = defaults(OptimConfig, OPTIMIZERS)
    for name in OPTIMIZERS[given.optimizer]:
      unused.pop(name)
    # tyro knows --no-report-state only of a preset that has it on.
    if given.optimizer != "coat_adamw" and not given.is_off:
      off = dict(report_state=False)

  def made(preset: Callable[[], TrainConfig]) -> TrainConfig:
    config = preset()
    optim = dataclasses.replace(config.optim, **unused)
    return dataclasses.replace(config, optim=optim, **off)

  return {
    name: (inspect.getdoc(preset) or "", made(preset))
    for name, preset in PRESETS.items()
  }


def load(config: TrainConfig) -> tuple[TrainConfig, RunData]:
  """Opens the data of a run; raises what `load_tokens` raises."""
  tokens = load_tokens(config.data, config.model.vocab_size)
  rows, held_out = split_windows(tokens, config.seq)
  return config, RunData(
    rows=rows,
    held_out=held_out,
    fingerprint=tokens.fingerprint,
    change_times=tokens.change_times,
    threads=tokens.threads,
  )


if __name__ == "__main__":
  sys.exit(main())
