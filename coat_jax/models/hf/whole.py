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
  """Yields a path at which to create a folder; renames it at the end."""
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
  """Raises ValueError if a folder exists or a process is writing it."""
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
