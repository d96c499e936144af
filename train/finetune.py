# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a Hugging Face checkpoint on conversations.

  python -m train.finetune DIR --data FILES --out RUN [options]
  python -m train.finetune DIR --data FILES --out RUN --resume

DIR is a Hugging Face folder with weights, config.json, tokenizer.json and, for
conversations, a chat template. DIR may also be a run that started from such a
folder. FILES contain JSON lines or JSON arrays. Each row is a list of messages,
a ShareGPT conversation, an Alpaca instruction, or a prompt with its completion.
The loss covers only what the assistant writes. If DIR contains a LLaVA model,
rows may have images (`--images`), and `--trained` selects the parts to train.

See docs/finetune.md, and docs/vision.md for the two stages of LLaVA.
"""

import sys
from collections.abc import Sequence

from train.command_line import check_given_once, read_options
from train.conversations import load
from train.finetune_config import FinetuneConfig
from train.loop import run_command

_DESCRIPTION = """\
Fine-tunes a Hugging Face checkpoint on conversations.

  python -m train.finetune DIR --data FILES --out RUN [options]"""


def read(words: Sequence[str]) -> FinetuneConfig:
  remedy = "list all files after a single --data: --data a.jsonl b.jsonl"
  check_given_once("data", words, remedy)
  return read_options(FinetuneConfig, "finetune", words, _DESCRIPTION)


def main(arguments: Sequence[str] | None = None) -> int:
  return run_command(read, load, arguments)


if __name__ == "__main__":
  sys.exit(main())
