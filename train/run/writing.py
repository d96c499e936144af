# SPDX-License-Identifier: Apache-2.0
"""Writing with Orbax: one sentence where it fails, and nothing half written."""

import contextlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


class SaveError(OSError):
  """A checkpoint could not be written; earlier ones are unchanged."""


def write_tree(path: Path, tree: Any) -> None:
  """Writes arrays as a checkpoint of Orbax, whole or not at all.

  Args:
    path: Folder to create.
    tree: What `ocp.StandardCheckpointer` takes.

  Raises:
    SaveError: it cannot be written.
  """
  path = path.absolute()
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
      quietly(),
      tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as f,
    ):
      written = Path(f) / path.name
      try:
        with ocp.StandardCheckpointer() as checkpointer:
          checkpointer.save(written, tree)
      finally:
        join_writers()
      os.rename(written, path)
  except Exception as error:  # Orbax and TensorStore raise many kinds.
    raise SaveError(
      f"save: {path} must be written, got {first_line(error)}; make room, or "
      "pass a folder on another disk"
    ) from error


def join_writers() -> None:
  """Waits for Orbax's threads after one has failed.

  Orbax does not: it raises the first error while other threads still write into
  the folder, and it has no call that waits for them. Their classes are private,
  so they are found by the module that defines them.
  """
  for thread in threading.enumerate():
    if type(thread).__module__.startswith("orbax."):
      threading.Thread.join(thread)  # Its own would raise.
  # What else failed with it is logged when it is dropped, which can be as late
  # as the end of the process.
  logging.getLogger("asyncio").addFilter(_is_of_no_dropped_task)


def _is_of_no_dropped_task(record: logging.LogRecord) -> bool:
  return "exception was never retrieved" not in record.getMessage()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
  """Silences what Orbax logs, array by array, of a write that fails.

  `SaveError` says it once. Orbax logs each failure with its traceback, and
  again when it is dropped; TensorStore reports to an event loop that is closed.
  Levels and hook are restored.
  """
  loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
  levels = [logger.level for logger in loggers]
  for logger in loggers:
    logger.setLevel(logging.CRITICAL)
  hook = sys.unraisablehook

  def report(unraisable):
    if str(unraisable.exc_value) != "Event loop is closed":
      hook(unraisable)

  sys.unraisablehook = report
  try:
    yield
  finally:
    sys.unraisablehook = hook
    for logger, level in zip(loggers, levels, strict=True):
      logger.setLevel(level)


def first_line(error: Exception) -> str:
  line = str(error).strip().partition("\n")[0]
  return f"{type(error).__name__} ({line[:1000]})"
