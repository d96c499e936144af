# SPDX-License-Identifier: Apache-2.0
"""Writing files: a sentence where it fails, and nothing half written."""

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from coat_jax.models.hf.whole import check_free, written_whole


class SaveError(OSError):
  """A file could not be written; what was saved before is unchanged."""


@contextlib.contextmanager
def save_errors(path: Path) -> Iterator[None]:
  """Raises what the operating system refuses as an error that names a path."""
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


def write_tree(path: Path, tree: Any) -> None:
  """Writes arrays as a checkpoint of Orbax, whole or not at all."""
  check_free("save", path)
  try:
    with quietly(), written_whole(path) as written:
      uninterrupted(functools.partial(_write_tree, written, tree))
  except Exception as error:  # Orbax and TensorStore raise many kinds.
    raise SaveError(
      f"save: {path} must be written, got {first_line(error)}; make room, or "
      "pass a folder on another disk"
    ) from error


def _write_tree(path: Path, tree: Any) -> None:
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, tree)
  finally:
    join_writers()


def uninterrupted(write: Callable[[], None]) -> None:
  """Writes with Orbax, and to the end where Ctrl-C interrupts the wait for it.

  Else threads of Orbax and TensorStore would still write into a folder that is
  removed at that moment.
  """
  with ThreadPoolExecutor(1) as pool:  # Which waits when it is left.
    pool.submit(write).result()


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
