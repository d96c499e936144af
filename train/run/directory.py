# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its files, who may write to it, what may be replaced.

config.json     the configuration; its presence makes a folder a run
metrics.jsonl   see `metrics`
checkpoints/    see `checkpoint`
plot.png        see `plot`
profile/        see `profile`
tensorboard/    and wandb/, see `trackers`
twins/          runs that a run was compared with
lock            held by the command that trains here; holds its name
"""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from train.config import ModelConfig, OptimConfig, TrainConfig, resume_rule
from train.data.tokens import DataConfig
from train.options import read_path
from train.run import checkpoint, processes

_FORMAT = "coat_jax run 1"
_CONTENTS = (
  "checkpoints",
  "config.tmp",
  "metrics.jsonl",
  "metrics.tmp",
  "plot.png",
  "profile",
  "tensorboard",
  "twins",
  "wandb",
)


class RunDirectory:
  """A run's folder, which need not exist yet."""

  def __init__(self, path: str | Path):
    self.path = read_path("out", path)
    self.config = self.path / "config.json"
    self.config_temporary = self.path / "config.tmp"
    self.metrics = self.path / "metrics.jsonl"
    self.checkpoints = self.path / "checkpoints"
    self.plot = self.path / "plot.png"
    self.lock = self.path / "lock"

  def is_run(self) -> bool:
    """Whether the folder is a run of this program.

    Where config.json is damaged or lost, the checkpoints decide: they hold the
    same description.
    """
    if (description := _read_json(self.config)) is not None:
      return _is_ours(description)
    saved = self.checkpoints.glob("*/run/metadata")
    return any(_is_ours(_read_json(file)) for file in saved)

  def is_started(self) -> bool:
    """Whether the run has a step or a checkpoint that could be lost."""
    has_steps = self.metrics.exists() and self.metrics.stat().st_size > 0
    return self.is_run() and (has_steps or self.latest_step() is not None)

  def latest_step(self) -> int | None:
    """Returns the step of the newest checkpoint."""
    return checkpoint.latest_step(self.checkpoints)

  def newest_whole_step(self) -> tuple[int, list[str]]:
    """As `checkpoint.newest_whole_step`, of a run with a checkpoint."""
    return checkpoint.newest_whole_step(self.checkpoints)

  def twin(self, name: str) -> "RunDirectory":
    """Returns the folder of a run that this one is compared with."""
    return RunDirectory(self.path / "twins" / name)

  def twins(self) -> list["RunDirectory"]:
    """Returns the runs that this one was compared with."""
    found = sorted((self.path / "twins").glob("*"))
    return [run for run in map(RunDirectory, found) if run.is_run()]

  def check(self, config: TrainConfig) -> None:
    """Checks that the folder fits the configuration; changes nothing.

    Raises:
      ValueError: it does not, with what to do.
    """
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

    The operating system holds the lock and releases it when the process ends,
    however it does. The primary process holds it for all processes of a run.

    Raises:
      ValueError: `check` fails, or another command is in the folder.
    """
    self.check(config)
    with contextlib.ExitStack() as opened:
      if processes.is_primary():
        self._lock(opened)
      self.check(config)  # Another command may have been here meanwhile.
      yield

  def _lock(self, opened: contextlib.ExitStack) -> None:
    self.path.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(self.lock, blocking=False, fallback_to_soft=False)
    try:
      opened.enter_context(lock)
    except filelock.Timeout:
      raise ValueError(
        f"out: one command at a time can train in {self.path}, got "
        f"{self.lock.read_text()} that does; wait for it, stop it, or pass "
        "another --out"
      ) from None
    except OSError as error:  # Some file systems of clusters have no locks.
      print(
        f"{self.path}: without a lock ({error.strerror}); train here with one "
        "command at a time",
        file=sys.stderr,
        flush=True,
      )
    opened.callback(self._remove_if_no_run)
    self.lock.write_text(f"process {os.getpid()} on {socket.gethostname()}")

  def _remove_if_no_run(self) -> None:
    if not self.is_run():
      self.lock.unlink(missing_ok=True)
      _remove_if_empty(self.path)

  def create(self, description: dict) -> None:
    """Creates the folder, or replaces the run in it; call `check` first.

    Only files of the replaced run are removed, nothing else in the folder.
    """
    if self.is_run():
      self._clear()
    self.path.mkdir(parents=True, exist_ok=True)
    self.write_description(description)

  def remove(self) -> None:
    """Removes the run's files, and the folder if nothing else is in it."""
    self._clear()
    self.lock.unlink(missing_ok=True)
    _remove_if_empty(self.path)

  def _clear(self) -> None:
    for twin in self.twins():
      twin.remove()
    for name in _CONTENTS:
      item = self.path / name
      if name == "twins":
        _remove_if_empty(item)
      elif item.is_dir() and not item.is_symlink():
        shutil.rmtree(item)
      else:
        item.unlink(missing_ok=True)
    # Last, so that it stays a run until then. It may be lost already.
    self.config.unlink(missing_ok=True)

  def write_description(self, description: dict) -> None:
    """Writes config.json atomically."""
    try:
      with self.config_temporary.open("w") as file:
        file.write(json.dumps(description, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())  # Else a crash may leave the name without it.
      os.replace(self.config_temporary, self.config)
    except OSError:  # The disk is full, say.
      self.config_temporary.unlink(missing_ok=True)
      raise


def describe(config: TrainConfig, fingerprint: str) -> dict:
  """Describes a run, for config.json and for checkpoints.

  Args:
    config: The run's.
    fingerprint: Its data's, from `TokenSource.fingerprint`.
  """
  return {
    "format": _FORMAT,
    "config": dataclasses.asdict(config),
    "fingerprint": fingerprint,
  }


def configuration(description: dict) -> TrainConfig:
  """Returns the configuration in a description that was read back."""
  values = description["config"]
  parts = dict(model=ModelConfig, optim=OptimConfig, data=DataConfig)
  parts = {name: part(**values[name]) for name, part in parts.items()}
  return TrainConfig(**{**values, **parts})


def check_same(
  run: RunDirectory, step: int, description: dict, *, convert_state: bool
) -> list[str]:
  """Checks that a checkpoint of a run can be continued.

  Args:
    run: The run with the checkpoint.
    step: The checkpoint's step.
    description: That of the run that is to continue it.
    convert_state: Whether the moments may be converted to another codec.

  Returns:
    The allowed changes of options, as `optim.lr: 0.001 -> 0.0005`.

  Raises:
    ValueError: the checkpoint is of another run, with each difference.
  """
  saved = checkpoint.read_description(run.checkpoints, step)
  before = _flatten(_with_new_options(saved["config"], TrainConfig))
  now = _flatten(description["config"])
  changed = {
    name: f"{name}: {before.get(name)} -> {now.get(name)}"
    for name in {**before, **now}
    if before.get(name) != now.get(name)
  }

  def changes(*rules: str) -> list[str]:
    return [
      text for name, text in changed.items() if resume_rule(name) in rules
    ]

  fixed, codec = changes("fixed"), changes("converted")
  if saved["fingerprint"] != description["fingerprint"]:
    fixed.append("data: other tokens")
  if fixed or (codec and not convert_state):
    convert = "" if fixed else "--convert-state to encode its moments anew, "
    raise ValueError(
      f"resume: {run.checkpoints / str(step)} is of another run, got "
      f"{'; '.join(fixed + codec)}; pass {convert}what it was trained with, or "
      "another --out to start a run"
    )
  return changes("converted", "reported")


def _read_json(path: Path) -> Any:
  """Reads a file; None if it cannot be read."""
  try:
    return json.loads(path.read_bytes())
  except (OSError, ValueError):
    return None


def _is_ours(description: Any) -> bool:
  return isinstance(description, dict) and description.get("format") == _FORMAT


def _with_new_options(values: dict, part: type) -> dict:
  """Stored values of a dataclass; newer options have their defaults."""
  values = dict(values)
  for field in dataclasses.fields(part):
    name = field.name
    if name in values and dataclasses.is_dataclass(field.type):
      values[name] = _with_new_options(values[name], field.type)  # pyright: ignore[reportArgumentType]
    elif name not in values and field.default is not dataclasses.MISSING:
      values[name] = field.default
  return values


def _flatten(tree: dict, prefix: str = "") -> dict:
  flat = {}
  for name, value in tree.items():
    if isinstance(value, dict):
      flat |= _flatten(value, f"{prefix}{name}.")
    else:
      flat[prefix + name] = value
  return flat


def _remove_if_empty(path: Path) -> None:
  if path.is_dir() and not any(path.iterdir()):
    path.rmdir()
