# SPDX-License-Identifier: Apache-2.0
"""Finds a run's checkpoint to export; creates a run from imported weights."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from train import pretrained
from train import step as steps
from train.config import TrainConfig
from train.data.batches import train_iterator
from train.data.tokens import load_tokens
from train.run.checkpoint import Checkpoints
from train.run.description import describe
from train.run.directory import RunDirectory
from train.run.writing import check_out, save_errors, uninterrupted
from train.step import TrainState


def create_run(
  op: str, config: TrainConfig, make: Callable[[TrainState], TrainState]
) -> int:
  """Creates a run with one checkpoint on one device; returns its step."""
  run = RunDirectory(config.out)
  if config.resume:  # Otherwise `claimed` would accept an existing run.
    raise ValueError(
      f"{op}: --resume does not apply, because {op} creates a run; leave "
      "--resume out, and pass --overwrite to replace an existing run"
    )
  if run.is_started() and not config.overwrite:
    raise ValueError(
      f"{op}: {config.out} already contains a run; pass --overwrite to "
      "replace it, or another folder as --out"
    )
  with contextlib.ExitStack() as opened:
    opened.enter_context(run.claimed(config))
    tokens = load_tokens(config.data, config.model.vocab_size)
    batches = train_iterator(
      tokens, seq_len=config.seq, batch_size=config.batch, seed=config.seed
    )
    abstract = steps.abstract_state(config, steps.build_optimizer(config))
    state = make(abstract)
    step = int(state.step)
    batches.set_state({**batches.get_state(), "next_index": step})
    description = describe(config, tokens)
    with contextlib.ExitStack() as failed:
      run.create(description)
      failed.callback(run.remove)
      with save_errors(run.path):
        pretrained.keep_files(config, run)

      def save():
        with contextlib.closing(
          Checkpoints(run.checkpoints, keep=config.keep)
        ) as checkpoints:
          checkpoints.save(step, state, batches, description)

      uninterrupted(save)
      failed.pop_all()  # The checkpoint is saved.
  return step


def newest_checkpoint(
  op: str, run: Path, out: Path
) -> tuple[Path, int, TrainConfig]:
  """Checks `out`; returns the checkpoint folder, the step and the options."""
  source = RunDirectory(run)
  if source.latest_step() is None or not source.is_run():
    raise ValueError(
      f"{op}: expected a run with a checkpoint in {run}, got none; pass the "
      "folder that was the --out of a run"
    )
  check_out(op, out)
  step, config = source.newest()
  return source.checkpoints, step, config
