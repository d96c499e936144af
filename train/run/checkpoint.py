# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: written in the background, whole or not at all.

A checkpoint has the items `params`, `optimizer` (the very FP8 bytes), `data`
(the iterator's place), `run` (step, configuration and data's fingerprint) and,
where a run reports on its moments, `exact`; `data` and `run` are JSON. Nothing
in it depends on devices or processes: arrays are restored as the very bytes to
wherever an abstract state says, and each process's iterator has the same place.
Restoring repeats nothing and skips nothing: a resumed run goes on bit for bit.

A checkpoint gets its name when all of it is there, checksums included. One that
was damaged since then is told by them, and the one before it is used.
"""

import contextlib
import logging
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import args

from train.run import checksums, processes
from train.step import TrainState


class SaveError(OSError):
  """A checkpoint could not be written; those before it are as they were."""


class Checkpoints:
  """The checkpoints in one folder, made with the first one."""

  def __init__(self, path: Path, *, keep: int):
    """Opens the folder, which need not exist.

    Args:
      path: The folder.
      keep: How many of the newest checkpoints stay when one is saved.
    """
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
    self._opened.enter_context(_quietly())

  def latest_step(self) -> int | None:
    """The step of the newest checkpoint."""
    return self._manager.latest_step()

  def save(
    self,
    step: int,
    state: TrainState,
    batches: grain.DatasetIterator,
    description: dict,
  ) -> None:
    """Copies the state off the device and returns; writing goes on behind.

    Raises:
      SaveError: it cannot be written, or the one before it was not.
    """
    self.save_at(step, state, batches.get_state(), description)

  def save_at(
    self, step: int, state: TrainState, place: dict, description: dict
  ) -> None:
    """As `save`, with the iterator's state in place of the iterator."""
    items = {
      name: args.StandardSave(tree) for name, tree in _array_items(state)
    }
    items["data"] = args.JsonSave(place)
    items["run"] = args.JsonSave({"step": step, **description})
    self._write(lambda: self._manager.save(step, args=args.Composite(**items)))

  def restore(
    self, step: int, abstract: TrainState, batches: grain.DatasetIterator
  ) -> TrainState:
    """Restores a state and moves the iterator to where it was.

    Args:
      step: One of the checkpoints' steps.
      abstract: What the state looks like and, by its shardings, where it goes;
        without any, to one device.
      batches: A fresh iterator over the same data, of this process.

    Returns:
      The state after `step` steps.

    Raises:
      ValueError: the checkpoint holds another state.
    """
    state = restore_state(self.path, step, abstract)
    batches.set_state(_read_json(self.path, step, "data"))
    return state

  def set_aside(self, after: int) -> None:
    """Renames checkpoints of later steps, which will be saved again.

    Args:
      after: The step that the run goes on from.
    """
    if processes.is_primary():
      for step in filter(lambda step: step > after, steps(self.path)):
        folder = self.path / f"{step}.damaged"
        shutil.rmtree(folder, ignore_errors=True)
        (self.path / str(step)).rename(folder)
    processes.gather(after)  # The others wait for it.
    self._manager.reload()

  def wait(self) -> None:
    """Waits until all is written.

    Raises:
      SaveError: it was not.
    """
    self._write(self._manager.wait_until_finished)

  def close(self) -> None:
    """Waits and lets go of the folder.

    Raises:
      SaveError: not all was written.
    """
    with self._opened:
      self._write(self._manager.close)

  def _write(self, call: Callable[[], Any]) -> None:
    """Calls; errors of this write or of the one before it are the disk's."""
    try:
      call()
    except Exception as error:  # Orbax and TensorStore raise many kinds.
      _join_writers()
      last = latest_step(self.path)
      then = "and start again, for there is none yet"
      if last is not None:
        then = f"and pass --resume, which goes on from {self.path / str(last)}"
      raise SaveError(
        f"save: a checkpoint in {self.path} must be written, got "
        f"{_first_line(error)}; make room {then}"
      ) from error

  def _write_checksums(self) -> None:
    # One is written at a time, and what others left was removed at the start.
    (folder,) = self.path.glob("*.orbax-checkpoint-tmp")
    checksums.write(folder)


def _join_writers() -> None:
  """Waits for Orbax's threads: one that fails does not wait for the others."""
  for thread in threading.enumerate():
    if type(thread).__module__.startswith("orbax."):
      threading.Thread.join(thread)  # Its own would raise.


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
  """Keeps Orbax from telling array by array what is raised here as one error.

  What fails is logged with tracebacks, also when it is thrown away at last, and
  TensorStore reports to an event loop that is closed.
  """
  for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  hook = sys.unraisablehook

  def report(unraisable):
    if str(unraisable.exc_value) != "Event loop is closed":
      hook(unraisable)

  sys.unraisablehook = report
  try:
    yield
  finally:
    sys.unraisablehook = hook


def _array_items(state: TrainState):
  """The state's trees that have leaves, each an item of the checkpoint."""
  for name, tree in state._asdict().items():
    if name != "step" and tree != ():
      yield name, tree


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """Orbax would look for the devices that wrote an array that has no place."""
  if leaf.sharding is not None:
    return leaf
  return leaf.update(sharding=SingleDeviceSharding(jax.local_devices()[0]))


def _first_line(error: Exception) -> str:
  line = str(error).strip().partition("\n")[0]
  return f"{type(error).__name__} ({line[:1000]})"


def steps(path: Path) -> list[int]:
  """The steps of the checkpoints in a folder, whole when they were written."""
  if not path.is_dir():
    return []
  return sorted(ocp.utils.checkpoint_steps(path.absolute()))


def latest_step(path: Path) -> int | None:
  """The newest checkpoint's step, without reading it."""
  return max(steps(path), default=None)


def newest_whole_step(path: Path) -> tuple[int, list[str]]:
  """Finds the newest checkpoint that is as it was written, reading all of it.

  One process reads; all get its answer.

  Args:
    path: The folder, with a checkpoint.

  Returns:
    Its step, and what is wrong with each newer one.

  Raises:
    ValueError: none is, with what is wrong with each.
  """
  found, damaged = -1, []
  if processes.is_primary():
    for step in reversed(steps(path)):
      damage = checksums.find_damage(path / str(step))
      if damage is None:
        found = step
        break
      damaged.append(f"{path / str(step)}: {damage}")
  found = processes.gather(found)[0]
  if found < 0:
    raise ValueError(
      f"resume: a checkpoint in {path} must be whole, got damage in all: "
      f"{'; '.join(damaged)}; restore one from a copy, or pass --overwrite to "
      "start again"
    )
  return found, damaged


def restore_state(path: Path, step: int, abstract: TrainState) -> TrainState:
  """As `Checkpoints.restore`, without an iterator, and changes nothing."""
  abstract = jax.tree.map(_placed, abstract)
  items = {
    name: args.StandardRestore(tree) for name, tree in _array_items(abstract)
  }
  folder = path.absolute() / str(step)
  try:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
      restored = checkpointer.restore(folder, args=args.Composite(**items))
  except Exception as error:  # Orbax and TensorStore raise many kinds.
    raise ValueError(
      f"resume: the checkpoint {path / str(step)} must hold the state of this "
      f"run, got {_first_line(error)}; pass the options it was trained with"
    ) from error
  return abstract._replace(
    step=jax.device_put(np.int32(step), abstract.step.sharding),
    **{name: restored[name] for name in items},
  )


def read_description(path: Path, step: int) -> dict:
  """Reads what `Checkpoints.save` was given as the run's description."""
  return _read_json(path, step, "run")


def _read_json(path: Path, step: int, item: str) -> dict:
  folder = path.absolute() / str(step) / item
  return ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(folder)
