# SPDX-License-Identifier: Apache-2.0
"""Checksums of the files of a checkpoint.

Orbax and TensorStore check their indices, not the arrays: a flipped bit in an
array is restored as it is, and the model trains on from it. So a checkpoint has
the SHA-256 of its files, written before it gets its name, and is restored only
if they still match.

Why not TensorStore's own crc32c: Orbax writes Zarr version 2, which has no such
codec, and puts crc32c of Zarr version 3 on the index of shards, not on the
arrays, without an option for them. Nor would it cover the JSON items or a file
that is missing, and old checkpoints would need a second check beside it.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "checksums.json"
# Orbax writes these two at the very end; they hold nothing of the run, and
# restoring does not need them.
_WRITTEN_LATER = ("_CHECKPOINT_METADATA", "commit_success.txt")


def write(folder: Path) -> None:
  """Writes the checksums of all files in a folder into it."""
  files = sorted(file for file in folder.rglob("*") if file.is_file())
  names = [file.relative_to(folder).as_posix() for file in files]
  names = [name for name in names if name not in (NAME, *_WRITTEN_LATER)]
  with ThreadPoolExecutor() as pool:
    digests = pool.map(lambda name: _digest(folder / name), names)
    checksums = dict(zip(names, digests, strict=True))
  (folder / NAME).write_text(json.dumps(checksums, indent=1) + "\n")


def find_damage(folder: Path) -> str | None:
  """Reads all files of a checkpoint and reports the first damaged one.

  Args:
    folder: The checkpoint's.

  Returns:
    Such as `params/d/1234 is not what was written`; None if all are whole.
  """
  try:
    checksums = json.loads((folder / NAME).read_bytes())
  except (OSError, ValueError, RecursionError) as error:
    return f"{NAME} cannot be read ({error})"
  if not (isinstance(checksums, dict) and checksums):
    return f"{NAME} names no files"

  root = os.path.realpath(folder)

  def damage(name: str) -> str | None:
    path = os.path.join(root, name)
    try:
      # A link, `..` or a device would be read, whatever and how long it is.
      is_own = path.startswith(root) and os.path.realpath(path) == path
      if not is_own or (os.path.exists(path) and not os.path.isfile(path)):
        return f"{name} is no file of the checkpoint"
      is_whole = _digest(Path(path)) == checksums[name]
    except OSError as error:
      return f"{name} cannot be read ({error.strerror})"
    except ValueError as error:  # A name that no file can have.
      return f"{name} cannot be read ({error})"
    return None if is_whole else f"{name} is not what was written"

  with ThreadPoolExecutor() as pool:
    return next(filter(None, pool.map(damage, sorted(checksums))), None)


def _digest(path: Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
