# SPDX-License-Identifier: Apache-2.0
"""Saves a run's checkpoints in the background, and restores them.

A checkpoint is a folder with these items:
  `params`     arrays
  `optimizer`  arrays; FP8 moments are stored as FP8
  `exact`      arrays, only if the run reports on its moments
  `clip`       arrays, only with clip share or adaptive
  `data`       JSON: the position of the data iterator
  `run`        JSON: the step, the configuration, a fingerprint of the data

Arrays are restored bit for bit, on any number of devices and processes, and no
batch is repeated or skipped. So a resumed run is bit-identical to a run that
never stopped, if both use the same compiled program.

The folder gets its final name, the step, only after all files and checksums are
written. A checkpoint is not used if a checksum does not match, or if the step
in `run` is not the folder's name.
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
  """The checkpoints in a folder."""

  def __init__(self, path: Path, *, keep: int):
    """Opens or creates a folder; keeps the newest `keep` checkpoints."""
    self.path = path
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=True,
      cleanup_tmp_directories=True,
      # Only the first process calls this, before it renames the folder.
      async_options=ocp.AsyncOptions(
        post_finalization_callback=self._write_checksums
      ),
    )
    self._manager = ocp.CheckpointManager(path.absolute(), options=options)
    self._opened = contextlib.ExitStack()
    self._opened.enter_context(quietly())
    # Keep the run's folder open, to notice if its path later leads elsewhere.
    self._run = os.open(path.parent, os.O_RDONLY)
    self._opened.callback(os.close, self._run)

  def save(
    self,
    step: int,
    state: TrainState,
    batches: grain.DatasetIterator,
    description: dict,
  ) -> None:
    """Copies the state to the host and returns; threads write the files."""
    items = {
      name: args.StandardSave(tree) for name, tree in _array_items(state)
    }
    items["data"] = args.JsonSave(batches.get_state())
    items["run"] = args.JsonSave({"step": step, **description})

    def save():
      # Orbax returns False if a checkpoint of this or a later step exists.
      if not self._manager.save(step, args=args.Composite(**items)):
        raise ValueError(f"a checkpoint of step {step} or later exists")

    self._write(save)

  def set_aside(self, after: int) -> None:
    """Renames checkpoints later than step `after`; they will be saved again."""
    if processes.is_primary():
      for folder in _folders(self.path):
        if int(folder.name) > after or folder.name != str(int(folder.name)):
          _rename_aside(folder)
    processes.gather(after)  # The other processes wait for the primary one.
    self._manager.reload()

  def wait(self) -> None:
    self._write(self._manager.wait_until_finished)

  def close(self) -> None:
    """Waits until all files are written, and closes the folder."""
    with self._opened:
      self._write(self._manager.close)

  def _write(self, call: Callable[[], Any]) -> None:
    """Calls Orbax; raises SaveError if this or the previous write failed."""
    try:
      # If the folder was removed, Orbax would create it again.
      if self._is_in_place():
        call()
        return
      error = None
    except Exception as caught:  # Orbax and TensorStore raise many types.
      error = caught
      join_writers()
    if not self._is_in_place():
      raise SaveError(
        f"save: {self.path.parent} was removed or renamed during the run; if "
        "it was renamed, rename it back and pass --resume; if it was removed, "
        "start again"
      ) from error
    last = latest_step(self.path)
    then = "and start again, because no checkpoint exists yet"
    if last is not None:
      then = f"and pass --resume, which continues from {self.path / str(last)}"
    raise SaveError(
      f"save: could not write a checkpoint in {self.path}: "
      f"{describe_error(error)}; fix the cause (if the disk is full, free some "
      f"space) {then}"
    ) from error

  def _is_in_place(self) -> bool:
    """Returns whether the run's folder is still the one that was opened."""
    try:
      return os.path.samestat(os.stat(self.path.parent), os.stat(self._run))
    except FileNotFoundError:
      return False

  def _write_checksums(self) -> None:
    # Exactly one temporary folder exists, because older ones were removed when
    # `Checkpoints` was opened.
    (folder,) = self.path.glob("*.orbax-checkpoint-tmp")
    checksums.write(folder)


def _array_items(state: TrainState):
  """Yields (name, tree) for each item of a checkpoint that stores arrays."""
  for name, tree in state._asdict().items():
    if name != "step" and tree != ():
      yield name, tree


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """Adds a sharding if there is none.

  Without a sharding, Orbax would need the devices that saved the checkpoint.
  """
  if leaf.sharding is not None:
    return leaf
  return leaf.update(sharding=SingleDeviceSharding(jax.local_devices()[0]))


def _folders(path: Path) -> list[Path]:
  """Lists the finished checkpoints in a folder, sorted by step."""
  found = [item for item in path.glob("*") if item.name.isdecimal()]
  return sorted(found, key=lambda item: int(item.name))


def _rename_aside(folder: Path) -> None:
  """Renames a checkpoint, so that it cannot be resumed."""
  aside = folder.with_name(f"{folder.name}.damaged")
  if aside.exists():
    shutil.rmtree(aside, ignore_errors=True)
  folder.rename(aside)


def set_all_aside(path: Path) -> None:
  """Renames all checkpoints, the newest first, before they are removed."""
  for folder in reversed(_folders(path)):
    _rename_aside(folder)


def latest_step(path: Path) -> int | None:
  """Returns the newest checkpoint's step without checking its files."""
  folders = _folders(path)
  return int(folders[-1].name) if folders else None


def newest_whole_step(path: Path) -> tuple[int, list[str]]:
  """Returns the newest undamaged step, and the damage in newer checkpoints."""
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
      f"checkpoints: all in {path} are damaged: {'; '.join(damaged)}; restore "
      "one from a copy, or train again (train.pretrain --overwrite)"
    )
  return found, damaged


def _find_other_step(folder: Path) -> str | None:
  """Returns what is wrong with the step in a checkpoint's files, or None."""
  try:
    step = _read_json(folder, "run")["step"]
  except (OSError, ValueError, LookupError, TypeError, RecursionError):
    return "run/metadata contains no step"
  if folder.name == str(step):
    return None
  return f"contains step {step}; rename it to {step} to use it"


def restore(
  path: Path, step: int, abstract: TrainState, batches: grain.DatasetIterator
) -> TrainState:
  """Returns a checkpoint's state, and restores the position of `batches`."""
  state = restore_state(path, step, abstract)
  batches.set_state(_read_json(path / str(step), "data"))
  return state


def restore_state(path: Path, step: int, abstract: TrainState) -> TrainState:
  """Restores a state, but not the position of the data iterator."""
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
      f"checkpoint: could not read the state in {path / str(step)}: "
      f"{describe_error(error)}; read it with the version of the code that "
      "saved it"
    ) from error
  return abstract._replace(
    step=jax.device_put(np.int32(step), abstract.step.sharding),
    **{name: restored[name] for name in items},
  )


def read_description(path: Path, step: int) -> dict:
  """Reads the run's description from a checkpoint."""
  return _read_json(path / str(step), "run")


def _read_json(folder: Path, item: str) -> dict:
  """Reads a JSON item from the file in which Orbax stores it."""
  return json.loads((folder / item / "metadata").read_bytes())
