# SPDX-License-Identifier: Apache-2.0
"""Copies metrics to TensorBoard's event files and to Weights & Biases.

Both trackers receive the numbers in metrics.jsonl, with the same names and
steps, but no lists or objects. A resumed run continues both logs.

We use tensorboardX because it has few dependencies. We use its writer without a
thread, because its threaded writer blocks forever if the disk is full.
"""

import importlib.util
import time
import uuid
from pathlib import Path
from typing import Any

from train.config import TrainConfig
from train.run import processes
from train.run.writing import replace_file, save_errors

_PACKAGES = {
  "tensorboard": ("tensorboardX", "pip install '.[tensorboard]'"),
  "wandb": ("wandb", "pip install wandb"),
}
_SECONDS_BETWEEN_FLUSHES = 1


def check_installed(config: TrainConfig) -> None:
  """Checks that the trackers of a run are installed."""
  for option, (package, command) in _PACKAGES.items():
    if getattr(config, option) and importlib.util.find_spec(package) is None:
      raise ValueError(
        f"{option}: the package {package} is not installed; run {command}, or "
        f"leave --{option} out"
      )


class TensorBoard:
  """Writes event files for `tensorboard --logdir`."""

  def __init__(self, folder: Path, *, resumed_step: int):
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
  """Logs to a `wandb` run, which environment variables configure."""

  def __init__(self, path: Path, name: str, description: dict):
    import wandb

    id_file = path / "wandb" / "id"
    id_file.parent.mkdir(parents=True, exist_ok=True)
    if not id_file.exists():
      replace_file(id_file, uuid.uuid4().hex[:12])
    try:
      self._run = wandb.init(
        id=id_file.read_text(),
        resume="allow",
        name=name,
        dir=str(path),
        config=description["config"],
      )
    except Exception as error:  # wandb raises many types.
      raise ValueError(
        f"wandb: could not start the run: {error}; run `wandb login`, or set "
        "WANDB_MODE=offline"
      ) from error

  def write(self, step: int, values: dict[str, float]) -> None:
    self._run.log(values, step=step)

  def close(self) -> None:
    self._run.finish()


Tracker = TensorBoard | WeightsAndBiases


def open_trackers(
  config: TrainConfig, path: Path, description: dict, *, resumed_step: int
) -> list[Tracker]:
  """Opens the trackers that the run's options select, in the first process."""
  opened: list[Tracker] = []
  if not processes.is_primary():
    return opened
  with save_errors(path):
    if config.tensorboard:
      folder = path / "tensorboard"
      opened.append(TensorBoard(folder, resumed_step=resumed_step))
    if config.wandb:
      opened.append(WeightsAndBiases(path, config.out, description))
  return opened
