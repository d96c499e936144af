# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its files, who may write to it, what may be replaced.

config.json     the configuration; its presence makes a folder a run
metrics.jsonl   see `metrics`
samples.jsonl   see `train.conversations`
checkpoints/    see `checkpoint`
plot.png        see `plot`
profile/        see `profile`
tensorboard/    and wandb/, see `trackers`
hf/             what is kept of the checkpoint it began with, see `pretrained`
twins/          runs that a run was compared with
replaced_run/   see `replacing`
lock            held by the command that trains here; holds its name
"""

import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock

from train.config import TrainConfig
from train.options import read_path
from train.run import checkpoint, processes, replacing
from train.run.description import is_described
from train.run.writing import save_errors

_CONTENTS = (
  "config.tmp",
  "hf",
  "metrics.jsonl",
  "metrics.tmp",
  "plot.png",
  "profile",
  "samples.jsonl",
  "samples.tmp",
  "tensorboard",
  "wandb",
)
# In `checkpoints`: finished ones, those set aside, unfinished ones of Orbax.
_CHECKPOINT = re.compile(r"\d+(\.damaged|\.orbax-checkpoint-tmp.*)?")


class RunDirectory:
  """A run's folder, which need not exist yet."""

  def __init__(self, path: str | Path):
    path = read_path("out", path)
    # Folders that only lead to a ".." are not made.
    self.path = path.resolve() if ".." in path.parts else path
    self.config = self.path / "config.json"
    self.config_temporary = self.path / "config.tmp"
    self.metrics = self.path / "metrics.jsonl"
    self.samples = self.path / "samples.jsonl"
    self.checkpoints = self.path / "checkpoints"
    self.plot = self.path / "plot.png"
    self.source = self.path / "hf"
    self.lock = self.path / "lock"

  def is_run(self) -> bool:
    """Whether the folder is a run of this program.

    Where config.json is damaged or lost, the checkpoints decide: they hold the
    same description.
    """
    saved = self.checkpoints.glob("*/run/metadata")
    return any(map(is_described, (self.config, *saved)))

  def is_started(self) -> bool:
    """Whether the run has a step or a checkpoint that could be lost."""
    has_steps = self.metrics.exists() and self.metrics.stat().st_size > 0
    return self.is_run() and (has_steps or self.latest_step() is not None)

  def latest_step(self) -> int | None:
    """Returns the step of the newest checkpoint."""
    return checkpoint.latest_step(self.checkpoints)

  def newest_whole_step(self) -> tuple[int, list[str]]:
    """Finds the newest undamaged checkpoint, and the damage of newer ones."""
    return checkpoint.newest_whole_step(self.checkpoints)

  def twin(self, name: str) -> "RunDirectory":
    """Returns the folder of a run that this one is compared with."""
    return RunDirectory(self.path / "twins" / name)

  def twins(self) -> list["RunDirectory"]:
    """Returns the runs that this one was compared with."""
    found = sorted((self.path / "twins").glob("*"))
    return [run for run in map(RunDirectory, found) if run.is_run()]

  def check(self, config: TrainConfig) -> None:
    """Checks that the folder fits the configuration; changes nothing."""
    path, step = self.path, self.latest_step()
    if path.exists() and not path.is_dir():
      raise ValueError(
        f"out: the run needs a folder, got the file {path}; pass another --out"
      )
    if config.resume and self.config.exists() and not self.is_run():
      raise ValueError(
        f"resume: {path} must hold a run with a checkpoint, got {self.config} "
        "that is of no run and no checkpoint that is; restore them from a "
        "copy, or pass another --out to start a run"
      )
    if config.resume and not (self.is_run() and step is not None):
      raise ValueError(
        f"resume: {path} must hold a run with a checkpoint, got none; leave "
        "--resume out to start, with --overwrite if a run was cut short there "
        "before its first checkpoint"
      )
    if config.resume or not path.exists():
      return
    # Left by a command that was killed before it had made a run.
    if set(path.iterdir()) <= {self.lock, self.config_temporary}:
      return
    if not self.is_run():
      raise ValueError(
        f"out: {path} is not empty and is no run of this program, so it is "
        "left alone; pass another --out"
      )
    if self.is_started() and not config.overwrite:
      raise ValueError(
        f"out: {path} holds a run; pass --resume to continue it, --overwrite "
        "to replace it, or another --out"
      )

  @contextlib.contextmanager
  def claimed(self, config: TrainConfig) -> Iterator[None]:
    """While entered, `check` holds and no other command may enter.

    The primary process does this for all processes of a run, which wait for it
    before they look into the folder. The operating system holds the lock and
    releases it when the process ends, however it does. A run that a command was
    replacing when it was killed is put back first.
    """
    with contextlib.ExitStack() as opened:
      if processes.is_primary():
        if not replacing.is_aside(self.path):
          self.check(config)  # Before anything is written.
        self._lock(opened)
        self.put_back()
        self.check(config)  # Another command may have been here meanwhile.
      yield

  def _lock(self, opened: contextlib.ExitStack) -> None:
    with save_errors(self.path):
      self.path.mkdir(parents=True, exist_ok=True)
    if self.lock.is_symlink() or (
      self.lock.exists() and not self.lock.is_file()
    ):
      raise ValueError(
        f"out: {self.lock} must be a file of its own, which is written to, got "
        "a link or no file; remove it, or pass another --out"
      )
    lock = filelock.FileLock(self.lock, blocking=False, fallback_to_soft=False)
    missing = None
    try:
      opened.enter_context(lock)
    except filelock.Timeout:
      raise ValueError(
        f"out: one command at a time can train in {self.path}, got "
        f"{self.lock.read_text()} that does; wait for it, stop it, or pass "
        "another --out"
      ) from None
    except OSError as error:  # Some file systems of clusters have no locks.
      missing = error.strerror
    opened.callback(self._remove_if_no_run)
    with save_errors(self.path):
      self.lock.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    if missing is not None:
      print(
        f"{self.path}: without a lock ({missing}); train here with one command "
        "at a time",
        file=sys.stderr,
        flush=True,
      )

  def _remove_if_no_run(self) -> None:
    if not (self.is_run() or replacing.is_aside(self.path)):
      self.lock.unlink(missing_ok=True)
      _remove_if_empty(self.path)

  def create(self, description: dict) -> None:
    """Creates the folder, or replaces the run in it; call `check` first.

    Files of the replaced run are moved aside, nothing else in the folder, until
    `remove_replaced` or `put_back`.
    """
    with save_errors(self.path):
      self.put_back()  # Twins are not claimed.
      if self.is_run():
        replacing.move_aside(self.path, self._own_files())
      self.path.mkdir(parents=True, exist_ok=True)
      self.write_description(description)

  def put_back(self) -> None:
    """Puts the run that was to be replaced back, unless it was removed."""
    was_aside = replacing.is_aside(self.path)
    replacing.put_back(self.path, self._own_files())
    if was_aside:
      print(
        f"{self.path}: the run that was to be replaced is back",
        file=sys.stderr,
        flush=True,
      )

  def remove_replaced(self) -> None:
    """Removes the run that was replaced; what is there is now the new one."""
    replacing.remove_old(self.path)

  def remove(self) -> None:
    """Removes the run's files, and the folder if nothing else is in it."""
    replacing.remove(self.path, self._own_files())
    self.lock.unlink(missing_ok=True)
    _remove_if_empty(self.path)

  def _own_files(self) -> list[Path]:
    """Lists what runs write, relative to the folder: nothing of the user's.

    config.json is the last, so that the folder is a run until all others went.
    """
    own = [self.path / name for name in _CONTENTS]
    saved = list(self.checkpoints.glob("*"))
    if self.checkpoints.is_symlink() or not saved:
      own.append(self.checkpoints)
    else:
      own += [item for item in saved if _CHECKPOINT.fullmatch(item.name)]
    for twin in self.twins():
      own += [twin.path / name for name in twin._own_files()]
    own.append(self.config)
    return [
      item.relative_to(self.path) for item in own if os.path.lexists(item)
    ]

  def write_description(self, description: dict) -> None:
    """Writes config.json atomically; raises SaveError where it cannot."""
    with save_errors(self.path):
      # A link by this name would be followed.
      self.config_temporary.unlink(missing_ok=True)
      try:
        with self.config_temporary.open("x") as file:
          file.write(json.dumps(description, indent=2) + "\n")
          file.flush()
          os.fsync(file.fileno())  # Else a crash may leave the name without it.
        os.replace(self.config_temporary, self.config)
      except OSError:  # The disk is full, say.
        self.config_temporary.unlink(missing_ok=True)
        raise


def _remove_if_empty(path: Path) -> None:
  if path.is_dir() and not any(path.iterdir()):
    path.rmdir()
