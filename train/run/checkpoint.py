# SPDX-License-Identifier: Apache-2.0
"""Saves and restores checkpoints of a run, in the background.

A checkpoint is a folder with these items:
  `params`, arrays;
  `optimizer`, arrays, with FP8 moments stored as FP8;
  `exact`, arrays, only if the run reports on its moments;
  `data`, JSON: the position of the data iterator;
  `run`, JSON: step, configuration and fingerprint of the data.

A checkpoint does not depend on the number of devices or processes. The caller
passes an abstract state, and arrays are restored bit for bit with its
shardings. All processes continue with the same batch, and no batch is repeated
or skipped. So a resumed run is bit-identical to one that never stopped, if it
uses the same compiled program.

A folder gets its name, the step, only when all files and their checksums are
written. Checksums detect files that were damaged later, and the step in `run`
detects a folder that was renamed. In both cases the previous checkpoint is
used.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import args

from train.run import checksums, processes
from train.run.writing import SaveError, describe_error, join_writers, quietly
from train.step import TrainState


class Checkpoints:
  """The checkpoints in a folder, which the first save creates."""

  def __init__(self, path: Path, *, keep: int):
    """Opens the folder, which need not exist."""
    self.path = path
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=True,
      cleanup_tmp_directories=True,
      # Called by the first process alone, before the folder gets its name.
      async_options=ocp.AsyncOptions(
        post_finalization_callback=self._write_checksums
      ),
    )
    self._manager = ocp.CheckpointManager(path.absolute(), options=options)
    self._opened = contextlib.ExitStack()
    self._opened.enter_context(quietly())
    # Kept open, to detect that another folder has taken its place.
    self._run = os.open(path.parent, os.O_RDONLY)
    self._opened.callback(os.close, self._run)

  def save(
    self,
    step: int,
    state: TrainState,
    batches: grain.DatasetIterator,
    description: dict,
  ) -> None:
    """Copies the state off the device and returns; threads write it."""
    items = {
      name: args.StandardSave(tree) for name, tree in _array_items(state)
    }
    items["data"] = args.JsonSave(batches.get_state())
    items["run"] = args.JsonSave({"step": step, **description})

    def save():
      # Orbax returns False if there is a later step already.
      if not self._manager.save(step, args=args.Composite(**items)):
        raise ValueError(f"{self.path} has a later step than {step}")

    self._write(save)

  def restore(
    self, step: int, abstract: TrainState, batches: grain.DatasetIterator
  ) -> TrainState:
    """Restores a state and the position of the iterator."""
    state = restore_state(self.path, step, abstract)
    batches.set_state(_read_json(self.path / str(step), "data"))
    return state

  def set_aside(self, after: int) -> None:
    """Renames checkpoints of later steps, which will be saved again."""
    if processes.is_primary():
      for folder in _folders(self.path):
        if int(folder.name) > after or folder.name != str(int(folder.name)):
          aside = folder.with_name(f"{folder.name}.damaged")
          shutil.rmtree(aside, ignore_errors=True)
          folder.rename(aside)
    processes.gather(after)  # The other processes wait for the first one.
    self._manager.reload()

  def wait(self) -> None:
    """Waits until everything is written."""
    self._write(self._manager.wait_until_finished)

  def close(self) -> None:
    """Waits until everything is written and closes the folder."""
    with self._opened:
      self._write(self._manager.close)

  def _write(self, call: Callable[[], Any]) -> None:
    """Calls Orbax; raises SaveError for this write or the one before it."""
    try:
      if self._is_in_place():  # Otherwise Orbax would create it again.
        call()
        return
      error = None
    except Exception as caught:  # Orbax and TensorStore raise many types.
      error = caught
      join_writers()
    if not self._is_in_place():
      raise SaveError(
        f"save: {self.path.parent} was removed or renamed during the run; if "
        "it was renamed, its files are unchanged: give it its old name and "
        "pass --resume; otherwise start again"
      ) from error
    last = latest_step(self.path)
    then = "and start again, because there is none yet"
    if last is not None:
      then = f"and pass --resume, which continues from {self.path / str(last)}"
    raise SaveError(
      f"save: could not write a checkpoint in {self.path}: "
      f"{describe_error(error)}; free some disk space {then}"
    ) from error

  def _is_in_place(self) -> bool:
    """Returns whether the run's folder is still the one that was opened."""
    try:
      return os.path.samestat(os.stat(self.path.parent), os.stat(self._run))
    except FileNotFoundError:
      return False

  def _write_checksums(self) -> None:
    # Exactly one exists: others were removed at the start.
    (folder,) = self.path.glob("*.orbax-checkpoint-tmp")
    checksums.write(folder)


def _array_items(state: TrainState):
  """Yields the parts of a state that are array items of a checkpoint."""
  for name, tree in state._asdict().items():
    if name != "step" and tree != ():
      yield name, tree


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """Adds a sharding if it is missing, or Orbax needs the original devices."""
  if leaf.sharding is not None:
    return leaf
  return leaf.update(sharding=SingleDeviceSharding(jax.local_devices()[0]))


def _folders(path: Path) -> list[Path]:
  """Lists the finished checkpoints in a folder in order of their steps."""
  found = [item for item in path.glob("*") if item.name.isdecimal()]
  return sorted(found, key=lambda item: int(item.name))


def latest_step(path: Path) -> int | None:
  """Returns the newest checkpoint's step, without reading it."""
  folders = _folders(path)
  return int(folders[-1].name) if folders else None


def newest_whole_step(path: Path) -> tuple[int, list[str]]:
  """Finds the newest undamaged checkpoint and the damage of newer ones.

  One process reads the files and tells all others.
  """
  found, damaged = -1, []
  if processes.is_primary():
    for folder in reversed(_folders(path)):
      damage = checksums.find_damage(folder) or _find_other_step(folder)
      if damage is None:
        found = int(folder.name)
        break
      damaged.append(f"{folder}: {damage}")
  found = processes.gather(found)[0]
  if found < 0:
    raise ValueError(
      f"resume: all checkpoints in {path} are damaged: {'; '.join(damaged)}; "
      "restore one from a copy, or pass --overwrite to start again"
    )
  return found, damaged


def _find_other_step(folder: Path) -> str | None:
  """Checks that a checkpoint is named by its step; else describes the error."""
  try:
    step = _read_json(folder, "run")["step"]
  except (OSError, ValueError, LookupError, TypeError, RecursionError):
    return "run/metadata has no step"
  if folder.name == str(step):
    return None
  return f"contains step {step}; rename it to {step} to use it"


def restore_state(path: Path, step: int, abstract: TrainState) -> TrainState:
  """Restores a state without an iterator."""
  abstract = jax.tree.map(_placed, abstract)
  items = {
    name: args.StandardRestore(tree) for name, tree in _array_items(abstract)
  }
  folder = path.absolute() / str(step)
  try:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
      restored = checkpointer.restore(folder, args=args.Composite(**items))
  except Exception as error:  # Orbax and TensorStore raise many types.
    raise ValueError(
      f"resume: could not read this run's state from the checkpoint "
      f"{path / str(step)}: {describe_error(error)}; pass the options that it "
      "was trained with"
    ) from error
  return abstract._replace(
    step=jax.device_put(np.int32(step), abstract.step.sharding),
    **{name: restored[name] for name in items},
  )


def read_description(path: Path, step: int) -> dict:
  """Reads the run's description in a checkpoint."""
  return _read_json(path / str(step), "run")


def _read_json(folder: Path, item: str) -> dict:
  """Reads a JSON item of a checkpoint, where Orbax writes it."""
  return json.loads((folder / item / "metadata").read_bytes())
