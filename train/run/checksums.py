# SPDX-License-Identifier: Apache-2.0
"""Writes and checks checksums of a checkpoint's files.

Orbax and TensorStore do not check the contents of arrays. Without checksums, a
run could resume from an array with a flipped bit. TensorStore's own checksums
(crc32c) require Zarr version 3, but Orbax writes version 2.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "checksums.json"
# Orbax writes these two files after we have written the checksums. A checkpoint
# can be restored without them.
_WRITTEN_LATER = ("_CHECKPOINT_METADATA", "commit_success.txt")


def write(folder: Path) -> None:
  """Writes the checksums of a folder's files into the same folder."""
  names = sorted({*_plain_files(folder)} - {NAME, *_WRITTEN_LATER})
  with ThreadPoolExecutor() as pool:
    digests = pool.map(lambda name: _digest(folder / name), names)
    checksums = dict(zip(names, digests, strict=True))
  (folder / NAME).write_text(json.dumps(checksums, indent=1) + "\n")


def find_damage(folder: Path) -> str | None:
  """Reads a checkpoint's files; describes the first damage, or returns None."""
  # Read only plain files. A link or `..` could lead to an endless device such
  # as /dev/zero, or to a file outside the folder.
  own = set(_plain_files(folder))
  others = [name for name in _WRITTEN_LATER if os.path.lexists(folder / name)]
  for name in (NAME, *others):
    if name not in own:
      return _not_own(name)
  try:
    checksums = json.loads((folder / NAME).read_bytes())
  except (OSError, ValueError, RecursionError) as error:
    return f"{NAME} cannot be read ({error})"
  if not (isinstance(checksums, dict) and checksums):
    return f"{NAME} lists no files"

  def damage(name: str) -> str | None:
    if name not in own:
      return _not_own(name)
    try:
      is_whole = _digest(folder / name) == checksums[name]
    except OSError as error:
      return f"{name} cannot be read ({error.strerror})"
    return None if is_whole else f"{name} does not match its checksum"

  with ThreadPoolExecutor() as pool:
    return next(filter(None, pool.map(damage, sorted(checksums))), None)


def _not_own(name: str) -> str:
  return f"{name} is missing or is not a plain file in the checkpoint's folder"


def _plain_files(folder: Path) -> Iterator[str]:
  """Yields the names of plain files; links are not followed."""
  for path, _, names in os.walk(folder):
    for name in names:
      file = Path(path, name)
      if stat.S_ISREG(file.lstat().st_mode):
        yield file.relative_to(folder).as_posix()


def _digest(path: Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
