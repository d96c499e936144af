# SPDX-License-Identifier: Apache-2.0
"""Begins a run: from the newest checkpoint, or in an empty folder.

Only the first process writes files other than checkpoints. At the end of each
`with stop_on_bad_input` all processes wait for each other, and stop if one has
failed.
"""

import contextlib

import grain
from jax.sharding import Mesh

from coat_jax.optimizer import FusedTransformation
from train import pretrained
from train.config import TrainConfig
from train.restore import restore
from train.run import processes
from train.run.checkpoint import Checkpoints, read_description
from train.run.data import RunData
from train.run.description import check_same
from train.run.directory import RunDirectory
from train.run.exits import stop_on_bad_input
from train.run.metrics import MetricsLog
from train.run.trackers import open_trackers
from train.run.writing import save_errors
from train.step import TrainState


@stop_on_bad_input()
def find_checkpoint(
  run: RunDirectory, config: TrainConfig, data: RunData
) -> tuple[int, list[str]]:
  """Returns the step to resume from, and remarks to print about it."""
  done, damaged = run.newest_whole_step()
  saved = read_description(run.checkpoints, done)
  where = run.checkpoints / str(done)
  return done, damaged + check_same(where, saved, config, data)


def resume(
  done: int,
  config: TrainConfig,
  description: dict,
  abstract: TrainState,
  batches: grain.DatasetIterator,
  opened: contextlib.ExitStack,
) -> tuple[Checkpoints, TrainState]:
  """Restores the checkpoint of a step and renames later ones."""
  run = RunDirectory(config.out)
  checkpoints = _open_checkpoints(run, config, opened)
  with stop_on_bad_input():
    state = restore(checkpoints, done, config, abstract, batches)
  checkpoints.set_aside(after=done)
  if processes.is_primary():
    run.write_description(description)
  return checkpoints, state


def start(
  config: TrainConfig,
  data: RunData,
  description: dict,
  optimizer: FusedTransformation,
  mesh: Mesh | None,
  opened: contextlib.ExitStack,
) -> tuple[Checkpoints, TrainState]:
  """Creates the folder of a new run and the state before its first step."""
  run = RunDirectory(config.out)
  with stop_on_bad_input():
    if processes.is_primary():
      opened.callback(run.put_back)  # Does nothing once the new run has a step.
      run.create(description)
      with save_errors(run.path):
        pretrained.keep_files(config, run)
        data.keep_files(run)
  checkpoints = _open_checkpoints(run, config, opened)
  with stop_on_bad_input():
    state = pretrained.initial_state(config, optimizer, mesh)
  return checkpoints, state


def _open_checkpoints(
  run: RunDirectory, config: TrainConfig, opened: contextlib.ExitStack
) -> Checkpoints:
  checkpoints = Checkpoints(run.checkpoints, keep=config.keep)
  return opened.enter_context(contextlib.closing(checkpoints))


@stop_on_bad_input()
def open_log(
  config: TrainConfig,
  description: dict,
  resumed_step: int,
  opened: contextlib.ExitStack,
) -> MetricsLog:
  """Opens metrics.jsonl and the trackers; only the first process writes."""
  run, trackers = RunDirectory(config.out), []
  if processes.is_primary():
    with save_errors(run.path):
      trackers = open_trackers(
        config, run.path, description, resumed_step=resumed_step
      )
  log = MetricsLog(run.metrics, resumed_step=resumed_step, trackers=trackers)
  return opened.enter_context(contextlib.closing(log))
