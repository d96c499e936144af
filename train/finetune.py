# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a checkpoint of transformers on conversations.

  python -m train.finetune DIR --data FILES --out RUN [options]
  python -m train.finetune DIR --data FILES --out RUN --resume

DIR is a folder of transformers: weights, config.json, tokenizer.json and, for
conversations, a chat template. FILES are JSON lines, or JSON arrays, of
messages, ShareGPT's conversations, Alpaca's instructions, or prompts with
completions. What the assistant writes is learned. DIR may be a LLaVA, whose
rows have images (`--images`) and of which `--trained` names the parts to train;
and it may be a run that began with such a folder. All options of
`train.pretrain` are here, and its exit status; docs/finetune.md goes from DIR
to an exported, evaluated model, docs/vision.md through LLaVA's two stages.

A damaged image may show when its batch is read: the status is 2 then too, and
what was saved before stays.

It trains as `train.pretrain` does: `train.loop` is the run,
`train.conversations` its data, and `train.finetune_config` says what its
defaults are and why.
"""

import sys
from collections.abc import Sequence

import tyro

from train.command_line import check_given, times_given, words_of
from train.conversations import load
from train.finetune_config import FinetuneConfig
from train.loop import run_command


def main(arguments: Sequence[str] | None = None) -> int:
  """Reads the command line, trains, and returns the exit status."""
  words = words_of(arguments)

  def read() -> FinetuneConfig:
    if times_given("data", words) > 1:
      # The last one alone would be read.
      raise ValueError(
        "--data must be given once, got it again; name all files after it: "
        "--data a.jsonl b.jsonl"
      )
    config = tyro.cli(
      FinetuneConfig,
      args=words,
      prog="python -m train.finetune",
      description="Fine-tunes a checkpoint of transformers on conversations.",
      config=(tyro.conf.FlagCreatePairsOff,),
    )
    check_given(config, words)
    if config.steps and times_given("epochs", words):
      raise ValueError(
        "epochs and steps exclude each other, got both; leave one out"
      )
    return config

  return run_command(read, load)


if __name__ == "__main__":
  sys.exit(main())
