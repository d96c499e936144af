# SPDX-License-Identifier: Apache-2.0
"""Manages the folder of a run, and locks it against other commands.

config.json     the configuration; a folder with this file is a run
metrics.jsonl   see `metrics`
samples.jsonl   see `train.conversations`
checkpoints/    see `checkpoint`
plot.png        see `plot`
profile/        see `profile`
tensorboard/    see `trackers`
wandb/          see `trackers`
hf/             files of the Hugging Face checkpoint that the run started from;
                see `pretrained`
twins/          runs that this run was compared with
lock            locked by the command that trains here; stores its process id
"""

import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import filelock

from train.config import TrainConfig
from train.options import read_path
from train.run import checkpoint, processes
from train.run.description import configuration, is_described
from train.run.exits import say
from train.run.writing import replace_file, save_errors

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
# Names of finished, set-aside and unfinished checkpoints.
_CHECKPOINT = re.compile(r"\d+(\.damaged|\.orbax-checkpoint-tmp.*)?")


class RunDirectory:
  """A run's folder, which need not exist yet."""

  def __init__(self, path: str | Path):
    path = read_path("out", path)
    # Resolve `..`, because for the path `a/../b` mkdir would also create `a`.
    self.path = path.resolve() if ".." in path.parts else path
    self.config = self.path / "config.json"
    self.metrics = self.path / "metrics.jsonl"
    self.samples = self.path / "samples.jsonl"
    self.checkpoints = self.path / "checkpoints"
    self.plot = self.path / "plot.png"
    self.source = self.path / "hf"
    self.lock = self.path / "lock"

  def is_run(self) -> bool:
    """Returns whether config.json or a checkpoint describes a run."""
    saved = self.checkpoints.glob("*/run/metadata")
    return any(map(is_described, (self.config, *saved)))

  def is_started(self) -> bool:
    """Returns whether replacing the run would lose a step or a checkpoint."""
    has_steps = self.metrics.exists() and self.metrics.stat().st_size > 0
    return self.is_run() and (has_steps or self.latest_step() is not None)

  def latest_step(self) -> int | None:
    return checkpoint.latest_step(self.checkpoints)

  def newest_description(self) -> tuple[int, dict]:
    """Reads the newest undamaged checkpoint's step and description.

    Prints any damage in newer checkpoints.
    """
    step, damaged = checkpoint.newest_whole_step(self.checkpoints)
    if damaged:
      say(*damaged)
    return step, checkpoint.read_description(self.checkpoints, step)

  def newest(self) -> tuple[int, TrainConfig]:
    """Reads the newest undamaged checkpoint's step and configuration."""
    step, saved = self.newest_description()
    return step, configuration(saved)

  def twin(self, name: str) -> "RunDirectory":
    return RunDirectory(self.path / "twins" / name)

  def twins(self) -> list["RunDirectory"]:
    """Lists the twins that this run was compared with."""
    found = sorted((self.path / "twins").glob("*"))
    return [run for run in map(RunDirectory, found) if run.is_run()]

  def check(self, config: TrainConfig) -> None:
    """Checks that a run may start or resume in this folder; changes nothing."""
    path, step = self.path, self.latest_step()
    if path.exists() and not path.is_dir():
      raise ValueError(
        f"out: expected a folder, got the file {path}; pass a folder as --out"
      )
    if config.resume and self.config.exists() and not self.is_run():
      raise ValueError(
        f"resume: neither {self.config} nor a checkpoint describes a run; "
        "restore one from a copy, or leave --resume out and pass another "
        "folder as --out"
      )
    if config.resume and not (self.is_run() and step is not None):
      raise ValueError(
        f"resume: expected a run with a checkpoint in {path}, got none; leave "
        "--resume out to start a run, and pass --overwrite if an earlier run "
        "was stopped there before its first checkpoint"
      )
    if config.resume or not path.exists():
      return
    # A command that was killed before it created a run leaves these files.
    if set(path.iterdir()) <= {self.lock, self.path / "config.tmp"}:
      return
    if not self.is_run():
      raise ValueError(
        f"out: {path} is not empty and does not contain a run of this program, "
        "so nothing was changed; pass another folder as --out"
      )
    if self.is_started() and not config.overwrite:
      raise ValueError(
        f"out: {path} already contains a run; pass --resume to continue it, "
        "--overwrite to replace it, or another folder as --out"
      )

  @contextlib.contextmanager
  def claimed(self, config: TrainConfig) -> Iterator[None]:
    """Locks the folder against other commands, and runs `check`."""
    with contextlib.ExitStack() as opened:
      if processes.is_primary():
        # If the folder is not a run, check it before writing a lock file to it.
        # Check again once no other command can change the folder.
        if not self.is_run():
          self.check(config)
        self._lock(opened)
        self.check(config)
      yield

  def _lock(self, opened: contextlib.ExitStack) -> None:
    with save_errors(self.path):
      self.path.mkdir(parents=True, exist_ok=True)
    if self.lock.is_symlink() or (
      self.lock.exists() and not self.lock.is_file()
    ):
      raise ValueError(
        f"out: expected {self.lock} to be a plain file, got a link or another "
        "kind of file; remove it, or pass another folder as --out"
      )
    lock = filelock.FileLock(self.lock, blocking=False, fallback_to_soft=False)
    missing = None
    try:
      opened.enter_context(lock)
    except filelock.Timeout:
      raise ValueError(
        f"out: {self.lock.read_text()} is already writing to {self.path}; "
        "wait until it ends, stop it, or pass another folder as --out"
      ) from None
    except OSError as error:  # Some cluster file systems have no locks.
      missing = error.strerror
    opened.callback(self._unlock)
    with save_errors(self.path):
      self.lock.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    if missing is not None:
      say(
        f"{self.path}: the folder could not be locked ({missing}); do not "
        "run two training commands in it at the same time"
      )

  def _unlock(self) -> None:
    """If there is no run, removes the lock, and the folder if it is empty."""
    if not self.is_run():
      self.lock.unlink(missing_ok=True)
      if self.path.is_dir() and not any(self.path.iterdir()):
        self.path.rmdir()

  def create(self, description: dict) -> None:
    """Removes any old run, then creates a run; call `check` first."""
    with save_errors(self.path):
      self._remove_files()
      self.path.mkdir(parents=True, exist_ok=True)
      self.write_description(description)

  def remove(self) -> None:
    """Removes the run's files, and then the folder if it is empty."""
    self._remove_files()
    self._unlock()

  def _remove_files(self) -> None:
    """Removes the run's files, and parent folders that become empty."""
    # Rename checkpoints first. Otherwise, if the removal is interrupted, a run
    # could resume from a checkpoint with missing files.
    if not self.checkpoints.is_symlink():
      checkpoint.set_all_aside(self.checkpoints)
    for item in self._own_files():
      if item.is_dir() and not item.is_symlink():
        shutil.rmtree(item)
      else:
        item.unlink(missing_ok=True)
      parent = item.parent
      while parent != self.path and not any(parent.iterdir()):
        parent.rmdir()
        parent = parent.parent

  def _own_files(self) -> list[Path]:
    own = [self.path / name for name in _CONTENTS]
    saved = list(self.checkpoints.glob("*"))
    if self.checkpoints.is_symlink() or not saved:
      own.append(self.checkpoints)
    else:
      own += [item for item in saved if _CHECKPOINT.fullmatch(item.name)]
    for twin in self.twins():
      own += twin._own_files()
    # config.json is last, so that the folder counts as a run until all other
    # files are removed.
    own.append(self.config)
    return [item for item in own if os.path.lexists(item)]

  def write_description(self, description: dict) -> None:
    """Writes config.json atomically; raises SaveError if that fails."""
    with save_errors(self.path):
      replace_file(self.config, json.dumps(description, indent=2) + "\n")
