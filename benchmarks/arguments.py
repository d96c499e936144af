# SPDX-License-Identifier: Apache-2.0
"""Parses and checks the command-line arguments of benchmarks."""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator

import jax

from benchmarks.aot import CompilerMissing
from train.command_line import quiet_if_unread
from train.run.exits import describe_shortage

_LARGEST = 2**20


def count(text: str) -> int:
  """Parses a count, for use as the `type` of an argparse argument."""
  number = int(text) if len(text) < 10 else _LARGEST + 1
  if not 1 <= number <= _LARGEST:
    raise argparse.ArgumentTypeError(
      f"must be a whole number from 1 to {_LARGEST}, got {text[:40]}"
    )
  return number


@contextlib.contextmanager
def checked(parser: argparse.ArgumentParser) -> Iterator[None]:
  """Turns OSError, TypeError and ValueError into usage errors (status 2)."""
  try:
    yield
  except (OSError, TypeError, ValueError) as error:
    parser.error(str(error))


def command[Result](
  main: Callable[[list[str] | None], Result],
) -> Callable[..., Result]:
  """Wraps `main` to print a message instead of a traceback for two errors.

  The command exits with status 1 if memory runs out, and with status 2 if XLA's
  compiler for CUDA or nvdisasm is needed but not installed. It prints no error
  if the reader of its rows has ended.
  """

  @functools.wraps(main)
  def run(arguments: list[str] | None = None) -> Result:
    try:
      with quiet_if_unread():
        return main(arguments)
    except CompilerMissing as error:
      print(f"error: {error}", file=sys.stderr)
      sys.exit(2)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
      if (shortage := describe_shortage(error)) is None:
        raise
      print(f"error: {shortage}; measure smaller sizes", file=sys.stderr)
      sys.exit(1)

  return run
