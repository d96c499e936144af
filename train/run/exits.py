# SPDX-License-Identifier: Apache-2.0
"""How a training command ends early, alone or as one of several processes.

`Stop` carries the exit status and the text to print. The context managers turn
errors into it, and see to it that no process waits for one that is gone.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

import jax

from train.command_line import error_line
from train.run import processes
from train.run.signals import Signals


class Stop(Exception):
  """Ends the command with an exit status and a text on standard error.

  Raised in all processes of a run at once; one of them prints.
  """

  def __init__(self, status: int, text: str, process: int = 0):
    """Makes the exception.

    Args:
      status: The exit status.
      text: What to print.
      process: Index of the process that prints it.
    """
    super().__init__(text)
    self.status, self.process = status, process


@contextlib.contextmanager
def stop_on_bad_input() -> Iterator[None]:
  """Turns errors of the user's input into exit status 2 and a sentence.

  All processes stop where one of them does, so all must enter this.

  Raises:
    Stop: a ValueError or an OSError was raised inside, in any process.
  """
  fault = None
  try:
    yield
  except (ValueError, OSError) as error:
    fault = error
  faults = processes.gather(fault is not None)
  if any(faults):
    first = faults.index(True)
    raise Stop(2, error_line(fault), process=first) from fault


@contextlib.contextmanager
def stop_on_failure() -> Iterator[None]:
  """Turns a failed write, or too little memory, into exit status 1.

  One of several processes exits at once: the others do not know and wait for
  this process, and at a usual exit it would wait for them. Once it is gone JAX
  ends them too.

  Raises:
    Stop: the only process of a run failed.
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
        "start with a smaller --batch: python -m train.plan PRESET --gpus N "
        "says which settings fit"
      )
    stop = Stop(1, text, process=jax.process_index())
    if jax.process_count() == 1:
      raise stop from error
    say(text, process=stop.process)
    os._exit(1)


def describe_shortage(error: BaseException) -> str | None:
  """Says in a line what memory was asked for; None where it is another error.

  JAX has one kind of error for all that goes wrong on a device.
  """
  lines = str(error).splitlines()
  if isinstance(error, MemoryError):
    return f"Out of memory. {lines[0] if lines else ''}".strip(" .")
  found = [line for line in lines if "out of memory" in line.lower()]
  return found[0].rstrip(".") if found else None


def is_received(signals: Signals) -> bool:
  """Whether any process was sent a signal; afterwards all know of it."""
  received = max(processes.gather(signals.received or 0))
  if received:  # Else one may have come since: it counts the next time.
    signals.received = received
  return bool(received)


def say(*lines: str, process: int = 0) -> None:
  """Prints lines to standard error, at once, in one process only."""
  if jax.process_index() == process:
    print(*lines, sep="\n  ", file=sys.stderr, flush=True)
