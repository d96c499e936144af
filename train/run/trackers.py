# SPDX-License-Identifier: Apache-2.0
"""Metrics where people look: TensorBoard's event files, Weights & Biases.

Both get the numbers of metrics.jsonl, which stays the run's record, under the
same names and steps. A resumed run continues them.

TensorBoard's files are written by tensorboardX, which needs NumPy and protobuf
alone: TensorBoard itself brings a web server and gRPC, `clu` and
`flax.metrics.tensorboard` bring TensorFlow. Of tensorboardX it is the writer
without a thread: the other one's queue waits for good when the disk is full.
"""

import importlib.util
import os
import time
import uuid
from pathlib import Path
from typing import Any, Protocol

from train.config import TrainConfig

# Packages, and how they are installed.
_PACKAGES = {
  "tensorboard": ("tensorboardX", "pip install '.[tensorboard]'"),
  "wandb": ("wandb", "pip install wandb"),
}
_SECONDS_BETWEEN_FLUSHES = 1


class Tracker(Protocol):
  """Something else that a run's numbers are written to."""

  def write(self, step: int, values: dict[str, float]) -> None:
    """Writes the numbers of a step."""
    ...

  def close(self) -> None:
    """Writes what is not written yet."""
    ...


def check_installed(config: TrainConfig) -> None:
  """Checks that the trackers of a run are installed."""
  for option, (package, command) in _PACKAGES.items():
    if getattr(config, option) and importlib.util.find_spec(package) is None:
      raise ValueError(
        f"{option}: needs the package {package}, got none; {command}, or leave "
        f"--{option} out"
      )


def open_trackers(
  config: TrainConfig, path: Path, description: dict, *, resumed_step: int
) -> list[Tracker]:
  """Opens the trackers that a run asks for."""
  opened: list[Tracker] = []
  if config.tensorboard:
    opened.append(TensorBoard(path / "tensorboard", resumed_step=resumed_step))
  if config.wandb:
    opened.append(WeightsAndBiases(path, config.out, description))
  return opened


class TensorBoard:
  """Event files for `tensorboard --logdir`."""

  def __init__(self, folder: Path, *, resumed_step: int):
    """Opens an event file."""
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2

    self._new_event, self._scalar = event_pb2.Event, summary.scalar
    folder.mkdir(parents=True, exist_ok=True)
    self._file = event_file_writer.EventsWriter(str(folder / "events"))
    if resumed_step:
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._add(resumed_step + 1, session_log=start)
    self._flushed = 0.0

  def write(self, step: int, values: dict[str, float]) -> None:
    for name, value in values.items():
      self._add(step, summary=self._scalar(name, value))
    if time.monotonic() - self._flushed > _SECONDS_BETWEEN_FLUSHES:
      self._file.flush()
      self._flushed = time.monotonic()

  def _add(self, step: int, **content: Any) -> None:
    event = self._new_event(wall_time=time.time(), step=step, **content)
    self._file.write_event(event)

  def close(self) -> None:
    self._file.close()


class WeightsAndBiases:
  """A run of `wandb`; its variables, as WANDB_PROJECT, say where."""

  def __init__(self, path: Path, name: str, description: dict):
    """Starts the run, or goes on with it."""
    import wandb

    id_file = path / "wandb" / "id"
    id_file.parent.mkdir(parents=True, exist_ok=True)
    if not id_file.exists():
      temporary = id_file.with_suffix(".tmp")
      temporary.write_text(uuid.uuid4().hex[:12])
      os.replace(temporary, id_file)
    try:
      self._run = wandb.init(
        id=id_file.read_text(),
        resume="allow",
        name=name,
        dir=str(path),
        config=description["config"],
      )
    except Exception as error:  # It has many kinds.
      raise ValueError(
        f"wandb: the run could not be started, got {error}; run `wandb login`, "
        "or set WANDB_MODE=offline"
      ) from error

  def write(self, step: int, values: dict[str, float]) -> None:
    self._run.log(values, step=step)

  def close(self) -> None:
    self._run.finish()
