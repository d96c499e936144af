# SPDX-License-Identifier: Apache-2.0
"""Writes files completely or not at all; reports failures in one line."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from coat_jax.models.hf.whole import check_free, written_whole
from train.options import first_line


def check_out(op: str, path: Path) -> None:
  """Raises ValueError if `path` exists already or cannot be created."""
  check_free(op, path)
  above = next(x for x in path.resolve().parents if x.exists())
  if not above.is_dir():
    raise ValueError(
      f"{op}: {path} must be in a folder, got the file {above}; pass another "
      "path"
    )
  if not os.access(above, os.W_OK):
    raise ValueError(
      f"{op}: {path} must be in a folder that can be written, got {above}, "
      "which is read-only; pass another path"
    )


class SaveError(OSError):
  """Raised if a file could not be written; older files are unchanged."""


@contextlib.contextmanager
def save_errors(path: Path) -> Iterator[None]:
  """Turns an OSError into a SaveError that names the path."""
  try:
    yield
  except SaveError:
    raise
  except OSError as error:
    raise _failure(path, error) from error


def _failure(path: Path, error: Exception) -> SaveError:
  return SaveError(
    f"save: could not write {path}: {describe_error(error)}; fix the cause (if "
    "the disk is full, free some space), or pass another folder"
  )


def describe_error(error: Exception) -> str:
  """Describes an error by its type and the first line of its message."""
  return f"{type(error).__name__} ({first_line(error, most=1000)})"


def replace_file(file: Path, text: str) -> None:
  """Writes a file atomically: writes a .tmp file and renames it."""
  temporary = file.with_suffix(".tmp")
  temporary.unlink(missing_ok=True)  # Writing would follow an existing link.
  try:
    with temporary.open("x") as opened:
      opened.write(text)
      opened.flush()
      os.fsync(opened.fileno())  # Otherwise a crash might leave an empty file.
    os.replace(temporary, file)
  except OSError:  # For example, the disk is full.
    temporary.unlink(missing_ok=True)
    raise


def write_tree(path: Path, tree: Any) -> None:
  """Writes arrays as an Orbax checkpoint, completely or not at all."""
  check_free("save", path)

  def write():
    try:
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(written, tree)
    finally:
      join_writers()

  try:
    with quietly(), written_whole(path) as written:
      uninterrupted(write)
  except Exception as error:  # Orbax and TensorStore raise many types.
    raise _failure(path, error) from error


def uninterrupted(write: Callable[[], None]) -> None:
  """Calls `write` and waits until it ends, even after Ctrl-C."""
  # Otherwise Orbax's threads may write into the folder while it is removed.
  with ThreadPoolExecutor(1) as pool:  # Leaving the pool waits for the write.
    pool.submit(write).result()


def join_writers() -> None:
  """Waits for Orbax's threads after one of them has failed.

  Orbax raises the first error while other threads still write into the folder.
  The threads' classes are private, so we recognize them by their module.
  """
  for thread in threading.enumerate():
    if type(thread).__module__.startswith("orbax."):
      threading.Thread.join(thread)  # Orbax's own join would raise.
  # asyncio logs other failed tasks when they are garbage-collected. This may
  # happen after `quietly` has ended, so the filter is never removed.
  logging.getLogger("asyncio").addFilter(_is_of_no_dropped_task)


def _is_of_no_dropped_task(record: logging.LogRecord) -> bool:
  return "exception was never retrieved" not in record.getMessage()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
  """Silences Orbax's logs, because `SaveError` reports failed writes."""
  loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
  levels = [logger.level for logger in loggers]
  for logger in loggers:
    logger.setLevel(logging.CRITICAL)
  hook = sys.unraisablehook

  def report(unraisable):
    # TensorStore reports failures to an event loop that is already closed.
    if str(unraisable.exc_value) != "Event loop is closed":
      hook(unraisable)

  sys.unraisablehook = report
  try:
    yield
  finally:
    sys.unraisablehook = hook
    for logger, level in zip(loggers, levels, strict=True):
      logger.setLevel(level)
