# SPDX-License-Identifier: Apache-2.0
"""Folders that are there whole or not at all.

What belongs in FOLDER is written in FOLDER.unfinished, which is removed if that
fails. Only a process that is killed leaves it behind; the next one that is to
write FOLDER names it, and does not remove it, for another process may be
writing it at that moment.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(folder: str | Path) -> Iterator[Path]:
  """Gives a path at which to create a folder, and renames it at the end.

  Args:
    folder: What it is called then; folders above it are made.

  Raises:
    ValueError: as `check_free`.
    OSError: a folder cannot be made or renamed.
  """
  folder = Path(folder)
  # Folders that only lead to a ".." are not made.
  folder = folder.parent.resolve() / folder.name
  check_free("save", folder)
  folder.parent.mkdir(parents=True, exist_ok=True)
  unfinished = _unfinished(folder)
  try:
    unfinished.mkdir()
  except FileExistsError:
    check_free("save", folder)  # Another process has begun meanwhile.
    raise
  try:
    yield unfinished / folder.name
    (unfinished / folder.name).rename(folder)
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)


def check_free(op: str, folder: Path) -> None:
  """Checks that a folder may be written.

  Args:
    op: what is to write it, for the message.
    folder: its path.

  Raises:
    ValueError: it exists, or a process is writing it, or one that did was
      killed.
  """
  if os.path.lexists(folder):
    raise ValueError(
      f"{op}: {folder} must not exist, because nothing is replaced, got a "
      "folder or a file; pass another"
    )
  if os.path.lexists(unfinished := _unfinished(folder)):
    raise ValueError(
      f"{op}: {folder} must be written by one process, got {unfinished} of "
      "another; wait for it, or remove that folder if the process was killed"
    )


def _unfinished(folder: Path) -> Path:
  return folder.with_name(f"{folder.name}.unfinished")
