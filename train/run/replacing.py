# SPDX-License-Identifier: Apache-2.0
"""Replaces a run so that the old one stays until the new one has a step.

The files of the old run are moved into a folder next to the new run's files:

  replaced_run.moving     files are being moved in or back; there are no files
                          of the new run yet
  replaced_run            all old files are in it; files outside are the new
                          run's
  replaced_run.removing   it is being removed

Each state becomes the next by a single rename, so a process may be killed at
any moment: the next command that trains in the folder sees how far the process
got, and puts the old run back (`put_back`).
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

_NAME = "replaced_run"
_README = "README.txt"
_WORDS = """\
These are the files of a run that was to be replaced. The new run has no step
yet. If no command is training in the folder above, the next command that trains
there moves them back.
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
  """Moves the old run back, if one is aside; removes the `new` files."""
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
  """Removes files and folders of a run, and folders that become empty.

  Links are not followed.
  """
  for name in names:
    item = folder / name
    if item.is_dir() and not item.is_symlink():
      shutil.rmtree(item)
    else:
      item.unlink(missing_ok=True)
    _remove_empty(folder, name.parent)


def _remove_empty(folder: Path, name: Path) -> None:
  """Removes a folder, and those above it up to `folder`, if empty."""
  while name != Path() and not any((folder / name).iterdir()):
    (folder / name).rmdir()
    name = name.parent


def _moving(folder: Path) -> Path:
  return folder / f"{_NAME}.moving"


def _removing(folder: Path) -> Path:
  return folder / f"{_NAME}.removing"


def _merge(source: Path, target: Path) -> None:
  """Moves everything in a folder into another, and removes the first."""
  for item in source.iterdir():
    there = target / item.name
    if item.is_dir() and there.is_dir() and not item.is_symlink():
      _merge(item, there)
    else:
      os.replace(item, there)
  source.rmdir()
