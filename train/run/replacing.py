# SPDX-License-Identifier: Apache-2.0
"""Replaces a run so that the old one stays until the new one has a step.

What the old run wrote is moved into a folder beside the new run's files:

  replaced_run.moving     some files are in it, others still where they were, or
                          again: nothing of the new run is there
  replaced_run            all files are in it; those outside are the new run's
  replaced_run.removing   it is no longer needed

From one to the next is a single rename. So a process may be killed at any
moment: the next command that trains in the folder finds out how far it was, and
puts the old run back (`put_back`).
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

_NAME = "replaced_run"
_README = "README.txt"
_WORDS = """\
These are the files of a run that was to be replaced. The new run has no step
yet. If no command is training in the folder above, the next one that does moves
them back.
"""


def move_aside(folder: Path, names: Iterable[Path]) -> None:
  """Moves an old run's files aside."""
  moving = _moving(folder)
  moving.mkdir(exist_ok=True)
  (moving / _README).write_text(_WORDS)
  for name in names:
    (moving / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).rename(moving / name)
    _remove_empty(folder, name.parent)
  moving.rename(folder / _NAME)


def is_aside(folder: Path) -> bool:
  """Whether a run was moved aside, wholly or in part."""
  return _moving(folder).is_dir() or (folder / _NAME / _README).is_file()


def put_back(folder: Path, new: Iterable[Path]) -> None:
  """Puts the old run back where it was, if one is aside."""
  _finish_removing(folder)
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
  _finish_removing(folder)


def remove(folder: Path, names: Iterable[Path]) -> None:
  """Removes files and folders of a run, by names relative to it.

  Links are not followed. Folders in which nothing else is go with them.
  """
  for name in names:
    item = folder / name
    if item.is_dir() and not item.is_symlink():
      shutil.rmtree(item)
    else:
      item.unlink(missing_ok=True)
    _remove_empty(folder, name.parent)


def _remove_empty(folder: Path, name: Path) -> None:
  """Removes a folder and those above it, up to `folder`, that are empty."""
  while name != Path() and not any((folder / name).iterdir()):
    (folder / name).rmdir()
    name = name.parent


def _moving(folder: Path) -> Path:
  return folder / f"{_NAME}.moving"


def _removing(folder: Path) -> Path:
  return folder / f"{_NAME}.removing"


def _finish_removing(folder: Path) -> None:
  shutil.rmtree(_removing(folder), ignore_errors=True)


def _merge(source: Path, target: Path) -> None:
  """Moves all that is in a folder into another, and removes the first."""
  for item in source.iterdir():
    there = target / item.name
    if item.is_dir() and there.is_dir() and not item.is_symlink():
      _merge(item, there)
    else:
      os.replace(item, there)
  source.rmdir()
