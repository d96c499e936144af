# SPDX-License-Identifier: Apache-2.0
"""Runs whose first checkpoint was made elsewhere."""

import contextlib
from collections.abc import Callable

from train import pretrained
from train import step as steps
from train.config import TrainConfig
from train.data.batches import train_iterator
from train.data.tokens import load_tokens
from train.run.checkpoint import Checkpoints
from train.run.description import describe
from train.run.directory import RunDirectory
from train.run.save_error import save_errors
from train.run.writing import uninterrupted
from train.step import TrainState


def create_run(
  config: TrainConfig, make: Callable[[TrainState], TrainState]
) -> int:
  """Makes a folder a run with one checkpoint, on one device.

  Args:
    config: The run to make; with `overwrite` it replaces an existing one.
    make: Function of the run's abstract state that gives its state. As many
      batches are skipped as it has steps.

  Returns:
    The step that the run resumes from.

  Raises:
    ValueError: the folder holds a run; `config.resume` is set; or `make`'s.
  """
  run = RunDirectory(config.out)
  if config.resume:  # `claimed` would let an existing run pass.
    raise ValueError(
      "import: makes a run, got --resume; leave it out, or replace an existing "
      "run with --overwrite"
    )
  if run.is_started() and not config.overwrite:
    raise ValueError(
      f"import: {config.out} holds a run; pass --overwrite to replace it, or "
      "another --out"
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
    # The iterator's whole state.
    place = {**batches.get_state(), "next_index": step}
    description = describe(config, tokens)
    with contextlib.ExitStack() as failed:
      failed.callback(run.put_back if run.is_run() else run.remove)
      run.create(description)
      with save_errors(run.path):
        pretrained.keep_files(config, run)

      def save():
        with contextlib.closing(
          Checkpoints(run.checkpoints, keep=config.keep)
        ) as checkpoints:
          checkpoints.save_at(step, state, place, description)

      uninterrupted(save)
      failed.pop_all()  # It is saved.
    run.remove_replaced()
  return step
