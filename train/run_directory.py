# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what is in it, whose it is, what may be done to it.

config.json     the configuration; its presence makes a folder a run
metrics.jsonl   see `metrics`
checkpoints/    see `checkpoint`
plot.png        see `plot`
twins/          runs that a run was compared with
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path

from train import checkpoint
from train.config import TrainConfig

_FORMAT = "coat_jax run 1"
_CONTENTS = ("checkpoints", "metrics.jsonl", "metrics.tmp", "plot.png", "twins")

# A checkpoint of a run that differs in one of these is another run's; the other
# options may change at a resume.
_FIXED = ("model", "recipe", "residuals", "attention", "activation_group_size")
_FIXED += ("optim.codec", "optim.rounding", "optim.group_size", "optim.second")
_FIXED += ("seed", "batch", "seq", "data.held_out", "report_state")
# Changes of these are not worth a word.
_SILENT = ("out", "resume", "overwrite", "compare", "compare_seeds", "keep")
_SILENT += ("eval_every", "eval_batches", "save_every", "evaluation", "data")


class RunDirectory:
  """A run's folder, which need not exist yet."""

  def __init__(self, path: str | Path):
    self.path = Path(path).expanduser()
    self.config = self.path / "config.json"
    self.metrics = self.path / "metrics.jsonl"
    self.checkpoints = self.path / "checkpoints"
    self.plot = self.path / "plot.png"

  def is_run(self) -> bool:
    """Whether the folder is a run of ours."""
    try:
      return json.loads(self.config.read_text())["format"] == _FORMAT
    except (OSError, ValueError, KeyError, TypeError):
      return False

  def is_started(self) -> bool:
    """Whether the run has something to lose: a step or a checkpoint."""
    has_steps = self.metrics.exists() and self.metrics.stat().st_size > 0
    return self.is_run() and (has_steps or self.latest_step() is not None)

  def latest_step(self) -> int | None:
    """Step of the newest checkpoint."""
    return checkpoint.latest_step(self.checkpoints)

  def twin(self, name: str) -> "RunDirectory":
    """Where a run goes that this one is compared with."""
    return RunDirectory(self.path / "twins" / name)

  def twins(self) -> list["RunDirectory"]:
    """The runs that this one was compared with."""
    found = sorted((self.path / "twins").glob("*"))
    return [run for run in map(RunDirectory, found) if run.is_run()]

  def check(self, config: TrainConfig) -> None:
    """Checks that the folder is fit for what is asked; changes nothing.

    Raises:
      ValueError: it is not, with what to do.
    """
    path, step = self.path, self.latest_step()
    if path.exists() and not path.is_dir():
      raise ValueError(
        f"out: the run needs a folder, got the file {path}; pass another --out"
      )
    if config.resume and not (self.is_run() and step is not None):
      raise ValueError(
        f"resume: {path} must hold a run with a checkpoint, got none; leave "
        "--resume out to start, with --overwrite if a run was cut short there "
        "before its first checkpoint"
      )
    if config.resume or not path.exists() or not any(path.iterdir()):
      return
    if not self.is_run():
      raise ValueError(
        f"out: {path} is not empty and is no run of ours, so it is left alone; "
        "pass another --out"
      )
    if self.is_started() and not config.overwrite:
      raise ValueError(
        f"out: {path} holds a run; pass --resume to continue it, --overwrite "
        "to replace it, or another --out"
      )

  def create(self, description: dict) -> None:
    """Makes the folder afresh; call `check` first, which guards what is there.

    Of a run that is there only its own files go, nothing else in the folder.
    """
    if self.is_run():
      self.remove()
    self.path.mkdir(parents=True, exist_ok=True)
    self.write_description(description)

  def remove(self) -> None:
    """Removes the run's own files, and the folder if it is empty then."""
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
    self.config.unlink()  # Last: half removed, it is still a run.
    _remove_if_empty(self.path)

  def write_description(self, description: dict) -> None:
    """Writes config.json, whole or not at all."""
    temporary = self.config.with_suffix(".tmp")
    temporary.write_text(json.dumps(description, indent=2) + "\n")
    os.replace(temporary, self.config)


def describe(config: TrainConfig, fingerprint: str) -> dict:
  """Describes a run, for config.json and for checkpoints.

  Args:
    config: The run's.
    fingerprint: Of its data, from `TokenSource.fingerprint`.
  """
  return {
    "format": _FORMAT,
    "config": dataclasses.asdict(config),
    "fingerprint": fingerprint,
  }


def check_same(run: RunDirectory, description: dict) -> list[str]:
  """Checks that a run's newest checkpoint can be continued.

  Args:
    run: With a checkpoint.
    description: Of what is to continue it.

  Returns:
    The options that have changed and may, as `optim.lr: 0.001 -> 0.0005`.

  Raises:
    ValueError: it is another run's, with each difference.
  """
  step = run.latest_step()
  saved = checkpoint.read_description(run.checkpoints, step)
  before, now = _flatten(saved["config"]), _flatten(description["config"])
  changed = {
    name: f"{name}: {before.get(name)} -> {now.get(name)}"
    for name in {**before, **now}
    if before.get(name) != now.get(name)
  }
  fixed = [text for name, text in changed.items() if _is_in(name, _FIXED)]
  if saved["fingerprint"] != description["fingerprint"]:
    fixed.append("data: other tokens")
  if fixed:
    raise ValueError(
      f"resume: {run.checkpoints / str(step)} is of another run, got "
      f"{'; '.join(fixed)}; pass what it was trained with, or another --out to "
      "start a run"
    )
  return [text for name, text in changed.items() if not _is_in(name, _SILENT)]


def _is_in(name: str, names: tuple[str, ...]) -> bool:
  return name in names or name.split(".")[0] in names


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
