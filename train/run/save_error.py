# SPDX-License-Identifier: Apache-2.0
"""Files that cannot be written, on a full disk say: one sentence, status 1."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class SaveError(OSError):
  """A file could not be written; what was saved before is unchanged."""


@contextlib.contextmanager
def save_errors(path: Path) -> Iterator[None]:
  """Raises what the operating system refuses as an error that names a path.

  Args:
    path: The file or folder that is written while this is entered.

  Raises:
    SaveError: it cannot be written.
  """
  try:
    yield
  except SaveError:
    raise
  except OSError as error:
    raise SaveError(
      f"save: {path} must be written, got {first_line(error)}; make room, or "
      "pass a folder on another disk"
    ) from error


def first_line(error: Exception) -> str:
  line = str(error).strip().partition("\n")[0]
  return f"{type(error).__name__} ({line[:1000]})"
