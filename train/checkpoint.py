# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: written in the background, whole or not at all.

A checkpoint has the items `params`, `optimizer` (the very FP8 bytes), `data`
(the iterator's place), `run` (step, configuration and data's fingerprint, as
JSON) and, where a run reports on its moments, `exact`. Arrays are always
restored into an abstract state, so that types, shapes and the optimizer's
tuples come back as they were. Restoring repeats nothing and skips nothing: a
resumed run goes on bit for bit.
"""

from pathlib import Path

import grain
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import args

from train.step import TrainState


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
      max_to_keep=keep, create=True, cleanup_tmp_directories=True
    )
    self._manager = ocp.CheckpointManager(path.absolute(), options=options)

  def latest_step(self) -> int | None:
    """The step of the newest whole checkpoint."""
    return self._manager.latest_step()

  def save(
    self,
    step: int,
    state: TrainState,
    batches: grain.DatasetIterator,
    description: dict,
  ) -> None:
    """Copies the state off the device and returns; writing goes on behind."""
    items = {
      name: args.StandardSave(tree) for name, tree in _array_items(state)
    }
    self._manager.save(
      step,
      args=args.Composite(
        data=grain.checkpoint.CheckpointSave(batches),
        run=args.JsonSave({"step": step, **description}),
        **items,
      ),
    )

  def restore(
    self, step: int, abstract: TrainState, batches: grain.DatasetIterator
  ) -> TrainState:
    """Restores a state and moves the iterator to where it was.

    Args:
      step: One of the checkpoints' steps.
      abstract: From `jax.eval_shape`: what the state looks like.
      batches: A fresh iterator over the same data.

    Returns:
      The state after `step` steps.

    Raises:
      ValueError: the checkpoint is damaged.
    """
    items = {
      name: args.StandardRestore(tree) for name, tree in _array_items(abstract)
    }
    try:
      restored = self._manager.restore(
        step,
        args=args.Composite(
          data=grain.checkpoint.CheckpointRestore(batches), **items
        ),
      )
    except Exception as error:  # Orbax and TensorStore raise many kinds.
      raise ValueError(
        f"resume: the checkpoint {self.path / str(step)} must be whole, got "
        f"{type(error).__name__} ({str(error).splitlines()[0][:200]}); delete "
        "that folder to resume from the one before it"
      ) from error
    return abstract._replace(
      step=jnp.int32(step), **{name: restored[name] for name in items}
    )

  def wait(self) -> None:
    """Waits until all is written."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits and lets go of the folder."""
    self.wait()
    self._manager.close()


def _array_items(state: TrainState):
  """The state's trees that have leaves, each an item of the checkpoint."""
  for name, tree in state._asdict().items():
    if name != "step" and tree != ():
      yield name, tree


def latest_step(path: Path) -> int | None:
  """The newest whole checkpoint's step, without changing the folder."""
  if not path.is_dir():
    return None
  steps = ocp.utils.checkpoint_steps(path.absolute())
  return max(steps, default=None)


def read_description(path: Path, step: int) -> dict:
  """Reads what `Checkpoints.save` was given as the run's description."""
  folder = path.absolute() / str(step) / "run"
  return ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(folder)
