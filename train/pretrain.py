# SPDX-License-Identifier: Apache-2.0
"""Trains a language model, from random weights or from a checkpoint.

  python -m train.pretrain PRESET [options]      PRESET --help shows the options
  python -m train.pretrain demo --compare bf16   `make train` on a CPU

`train/__init__.py` lists the files that your own training program needs.
docs/training.md lists the exit statuses.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

from train.command_line import check_given_once, one_of, read_options
from train.config import TrainConfig
from train.data.batches import split_windows
from train.data.tokens import load_tokens
from train.loop import run_command
from train.optim_config import OPTIMIZERS
from train.presets import PRESETS
from train.run.data import RunData

_DESCRIPTION = """\
Trains a language model; each preset's --help lists its options.

  python -m train.pretrain PRESET --out RUN [options]"""


def read(words: Sequence[str]) -> TrainConfig:
  remedy = "put the files into one folder, or pass a glob"
  check_given_once("data.path", words, remedy)
  presets = one_of(PRESETS, _for_optimizer(words))
  return read_options(presets, "pretrain", words, _DESCRIPTION)


def main(arguments: Sequence[str] | None = None) -> int:
  return run_command(read, load, arguments)


def _for_optimizer(
  words: Sequence[str],
) -> Callable[[TrainConfig], TrainConfig]:
  """Returns a function that adapts presets to the command line's optimizer."""
  # A preset may set options that this optimizer does not accept. Without a
  # reset, users would get errors about options that they did not pass.
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  parser.add_argument("--optim.optimizer", dest="optimizer", nargs="?")
  optimizer = parser.parse_known_args(words)[0].optimizer

  def adapt(config: TrainConfig) -> TrainConfig:
    if optimizer not in OPTIMIZERS:
      return config
    return dataclasses.replace(
      config,
      optim=config.optim.with_optimizer(optimizer),
      report_state=config.report_state and optimizer == "coat_adamw",
    )

  return adapt


def load(config: TrainConfig) -> tuple[TrainConfig, RunData]:
  """Opens the data of a run."""
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
