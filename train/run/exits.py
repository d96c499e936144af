# SPDX-License-Identifier: Apache-2.0
"""Ends a command early, with an exit status and a one-line error.

Training commands may run as several processes. On bad input, all processes
raise `Stop`, so that none waits for a process that has ended. After other
failures, the failed process exits immediately (`stop_on_failure`). Commands
that do not train use `exit_status` instead.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax

from train.command_line import error_line, quiet_if_unread
from train.run import processes
from train.run.signals import SIGNALS, Signals
from train.run.writing import SaveError


class Stop(Exception):
  """Ends the command; the process with index `process` prints the text."""

  def __init__(self, status: int, text: str, process: int = 0):
    super().__init__(text)
    self.status, self.process = status, process


@contextlib.contextmanager
def stop_on_bad_input() -> Iterator[None]:
  """Turns errors in the user's input into a `Stop` with exit status 2.

  The status is 1 if a file cannot be written. If one process fails, all
  processes stop, so all of them must enter this context.
  """
  fault = None
  try:
    yield
  except (ValueError, OSError) as error:
    fault = error
  statuses = processes.gather(0 if fault is None else _status(fault))
  for process, status in enumerate(statuses):
    if status:
      raise Stop(status, error_line(fault), process=process) from fault


def read_or_stop[Item](items: Iterable[Item]) -> Iterator[Item]:
  """Yields items; if reading an item fails, all processes stop."""
  items = iter(items)
  while True:
    with stop_on_bad_input():  # Reading may find a damaged image.
      item = next(items, None)
    if item is None:
      return
    yield item


def _status(error: Exception) -> int:
  """Returns exit status 1 if a file could not be written, 2 for bad input."""
  return 1 if isinstance(error, SaveError) else 2


@contextlib.contextmanager
def stop_on_failure() -> Iterator[None]:
  """Turns a failed write or an out-of-memory error into exit status 1.

  If there are several processes, the process that failed exits immediately, and
  JAX then ends the others. A normal exit would wait for them forever.
  """
  try:
    yield
  except (OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
    text = f"error: {error}"
    if not isinstance(error, OSError):
      if (shortage := describe_shortage(error)) is None:
        raise
      text = (
        f"error: {shortage}; give --mesh more devices, raise --accumulate or "
        "lower --batch; python -m train.plan PRESET --gpus N shows which "
        "settings fit"
      )
    stop = Stop(1, text, process=jax.process_index())
    if jax.process_count() == 1:
      raise stop from error
    say(text, process=stop.process)
    os._exit(1)


@contextlib.contextmanager
def stop_on_signal(out: Path) -> Iterator[None]:
  """Lets a command remove unfinished files before the first signal stops it."""
  received = []

  def interrupt(number, frame):
    if received:
      os._exit(128 + number)
    received.append(number)
    raise KeyboardInterrupt

  handlers = {each: signal.signal(each, interrupt) for each in SIGNALS}
  try:
    yield
  except BaseException as error:  # Libraries may replace KeyboardInterrupt.
    if not received:
      raise
    text = f"{signal.Signals(received[0]).name}: stopped"
    if not os.path.lexists(out):
      text += f"; {out} was not written, and unfinished files were removed"
    raise Stop(128 + received[0], text) from error
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)


def exit_status(command: Callable[[], object], *, smaller: str = "") -> int:
  """Runs a command and returns its exit status; prints errors in one line.

  `smaller` tells the user how to use less memory.
  """
  try:
    with quiet_if_unread():
      command()
  except Stop as stop:
    print(stop, file=sys.stderr)
    return stop.status
  except (ValueError, OSError) as error:
    print(error_line(error), file=sys.stderr)
    return _status(error)
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    if (shortage := describe_shortage(error)) is None:
      raise
    text = f"error: {shortage}; {smaller}" if smaller else f"error: {shortage}"
    print(text, file=sys.stderr)
    return 1
  return 0


def describe_shortage(error: BaseException) -> str | None:
  """Describes an out-of-memory error in one line; None for other errors."""
  # JAX raises the same type for all device errors.
  lines = str(error).splitlines()
  if isinstance(error, MemoryError):
    return f"Out of memory. {lines[0] if lines else ''}".strip(" .")
  found = [line for line in lines if "out of memory" in line.lower()]
  return found[0].rstrip(".") if found else None


def is_received(signals: Signals) -> bool:
  """Returns whether any process received a signal; tells all processes."""
  received = max(processes.gather(signals.received or 0))
  if received:  # A signal that arrives after `gather` counts next time.
    signals.received = received
  return bool(received)


def say(*lines: str, process: int = 0) -> None:
  """Prints lines to standard error and flushes it, in one process only."""
  if jax.process_index() == process:
    print(*lines, sep="\n  ", file=sys.stderr, flush=True)
