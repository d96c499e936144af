# SPDX-License-Identifier: Apache-2.0
"""Tiny training programs that the attacks run, each for a few seconds.

pretrain   train.pretrain, on text
finetune   train.finetune of a decoder, on conversations
projector  train.finetune of a LLaVA, first stage
decoder    train.finetune of a LLaVA, second stage, which starts from the first
"""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

from tests.train import chats, llava, runs
from train import finetune, pretrain

_LEAN = ("--params", "bfloat16", "--optim.clip", "share")
_SEQ = 96


@dataclasses.dataclass(frozen=True)
class Program:
  """A program that trains.

  Attributes:
    main: function of the command line that returns the exit status.
    line: function of (folder, out, flags, options) that returns the command
      line of a run on the data in the folder.
    make: function that writes the data of a run into a folder.
    lean: flags that make weights BF16 and let a decoder's optimizer step in the
      backward pass.
  """

  main: Callable[[list[str]], int]
  line: Callable[..., list[str]]
  make: Callable[[Path], object]
  lean: tuple[str, ...] = _LEAN


def _pretrain(folder: Path, out: Path, *flags: str, **options) -> list[str]:
  shape = {"model__num_layers": 1, "data__path": folder / "text"}
  return runs.arguments(out, "--no-report-state", *flags, **shape | options)


def _write_text(folder: Path) -> None:
  words = random.Random(0).randbytes(100_000).hex()
  (folder / "text").write_text(words)


def _finetune(folder: Path, out: Path, *flags: str, **options) -> list[str]:
  options = {"seq": _SEQ} | options
  if "--distributed" not in flags:  # Samples need a single process.
    options |= {"samples": 1, "sample_tokens": 4}
  data = folder / "sums.jsonl"
  return llava.line(folder / "chat", data, out, *flags, **options)


def _write_chat(folder: Path) -> None:
  chats.make_checkpoint(folder / "chat")
  chats.write_conversations(folder / "sums.jsonl")


def _stage(trained: str, start: str) -> Callable[..., list[str]]:
  """Returns `Program.line` for a LLaVA's stage that starts from `start`."""

  def line(folder: Path, out: Path, *flags: str, **options) -> list[str]:
    options = dict(trained=trained, images=folder / "images") | options
    data = folder / "shapes.json"
    return llava.line(folder / start, data, out, *flags, **options)

  return line


_projector = _stage("projector", "llava")


def _write_llava(folder: Path) -> None:
  llava.make(folder)
  llava.add_weights(folder / "llava")


def _train_projector(folder: Path) -> None:
  _write_llava(folder)
  if finetune.main(_projector(folder, folder / "first", steps=2)):
    raise RuntimeError("the first stage failed")


PROGRAMS = {
  "pretrain": Program(
    pretrain.main,
    _pretrain,
    _write_text,
    ("--optimizer-in-backward", *_LEAN),
  ),
  "finetune": Program(
    finetune.main,
    _finetune,
    _write_chat,
    ("--optimizer-in-backward", *_LEAN),
  ),
  "projector": Program(finetune.main, _projector, _write_llava),
  "decoder": Program(
    finetune.main, _stage("decoder", "first"), _train_projector
  ),
}
