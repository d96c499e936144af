# SPDX-License-Identifier: Apache-2.0
"""Replaces a run, but keeps the old run until the new run has a step.

The files of the old run are moved into a folder next to the new run's files.
The name of this folder shows the state of the replacement:

  replaced_run.moving     old files are being moved into or out of this folder;
                          the new run has no files
  replaced_run            this folder contains all old files; files outside it
                          belong to the new run
  replaced_run.removing   the old files are being removed

A single rename leads from each state to the next, so a process may be killed at
any moment. The next command that trains in the run's folder sees the state, and
puts the old run back unless it was being removed (`put_back`).
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

_NAME = "replaced_run"
_README = "README.txt"
_WORDS = """\
These are the files of a run that is being replaced. The new run has no step
yet. If no command is training in the folder above this one, the next command
that trains there moves the files back.
"""


def move_aside(folder: Path, names: Iterable[Path]) -> None:
  """Moves the files of the old run aside."""
  moving = _moving(folder)
  moving.mkdir(exist_ok=True)
  (moving / _README).write_text(_WORDS)
  for name in names:
    (moving / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).rename(moving / name)
    _remove_empty(folder, name.parent)
  moving.rename(folder / _NAME)


def is_aside(folder: Path) -> bool:
  """Returns whether a run was moved aside, completely or in part."""
  return _moving(folder).is_dir() or (folder / _NAME / _README).is_file()


def put_back(folder: Path, new: Iterable[Path]) -> None:
  """Removes the `new` files and moves the old run back, if one is aside."""
  shutil.rmtree(_removing(folder), ignore_errors=True)
  moving, aside = _moving(folder), folder / _NAME
  if (aside / _README).is_file():
    remove(folder, new)
    aside.rename(moving)
  if moving.is_dir():
    (moving / _README).unlink(missing_ok=True)
    _merge(moving, folder)


def remove_old(folder: Path) -> None:
  """Removes the old run, if one is aside."""
  aside = folder / _NAME
  if aside.is_dir():
    aside.rename(_removing(folder))
  shutil.rmtree(_removing(folder), ignore_errors=True)


def remove(folder: Path, names: Iterable[Path]) -> None:
  """Removes a run's files and folders, and parent folders that become empty.

  A link is removed, not the file that it leads to.
  """
  for name in names:
    item = folder / name
    if item.is_dir() and not item.is_symlink():
      shutil.rmtree(item)
    else:
      item.unlink(missing_ok=True)
    _remove_empty(folder, name.parent)


def _remove_empty(folder: Path, name: Path) -> None:
  """Removes `name`, and its parents below `folder`, if they are empty."""
  while name != Path() and not any((folder / name).iterdir()):
    (folder / name).rmdir()
    name = name.parent


def _moving(folder: Path) -> Path:
  return folder / f"{_NAME}.moving"


def _removing(folder: Path) -> Path:
  return folder / f"{_NAME}.removing"


def _merge(source: Path, target: Path) -> None:
  """Moves the contents of `source` into `target`, and removes `source`."""
  for item in source.iterdir():
    there = target / item.name
    if item.is_dir() and there.is_dir() and not item.is_symlink():
      _merge(item, there)
    else:
      os.replace(item, there)
  source.rmdir()
