# SPDX-License-Identifier: Apache-2.0
"""Writes a folder completely or not at all.

FOLDER is written inside FOLDER.unfinished and moved out at the end. If writing
fails, FOLDER.unfinished is removed. A process that is killed leaves
FOLDER.unfinished behind. The next writer then raises an error instead of
removing it, because another process might still be writing there.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(folder: str | Path) -> Iterator[Path]:
  """Yields a temporary path to write to; moves it to `folder` at the end."""
  folder = Path(folder)
  # Resolve ".." first: for "a/../folder", mkdir would create "a" too.
  folder = folder.parent.resolve() / folder.name
  check_free("save", folder)
  folder.parent.mkdir(parents=True, exist_ok=True)
  unfinished = _unfinished(folder)
  try:
    unfinished.mkdir()
  except FileExistsError:
    check_free("save", folder)  # Another process may have started to write.
    raise
  try:
    yield unfinished / folder.name
    (unfinished / folder.name).rename(folder)
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)


def check_free(op: str, folder: Path) -> None:
  """Raises ValueError if a folder or its FOLDER.unfinished exists."""
  if os.path.lexists(folder):
    raise ValueError(
      f"{op}: {folder} must not exist, because nothing is overwritten, got an "
      "existing folder or file; pass another path"
    )
  if os.path.lexists(unfinished := _unfinished(folder)):
    raise ValueError(
      f"{op}: {unfinished} must not exist, because another process may be "
      f"writing {folder}; wait for it or, if it was killed, remove {unfinished}"
    )


def _unfinished(folder: Path) -> Path:
  return folder.with_name(f"{folder.name}.unfinished")
