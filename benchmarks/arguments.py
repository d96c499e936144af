# SPDX-License-Identifier: Apache-2.0
"""Parses and checks the command-line arguments of benchmarks.

Arguments are checked before anything is timed, so that a benchmark does not run
for minutes before it reports a wrong argument.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator

import jax

from benchmarks.aot import CompilerMissing
from train.run.exits import describe_shortage

_LARGEST = 2**20


def count(text: str) -> int:
  """Parses a size or a number of repeats, as the `type` of an argument."""
  number = int(text) if len(text) < 10 else _LARGEST + 1
  if not 1 <= number <= _LARGEST:
    raise argparse.ArgumentTypeError(
      f"a whole number from 1 to {_LARGEST} is needed, got {text[:40]}"
    )
  return number


@contextlib.contextmanager
def checked(parser: argparse.ArgumentParser) -> Iterator[None]:
  """Reports errors inside `with` as usage errors, with exit status 2."""
  try:
    yield
  except (OSError, TypeError, ValueError) as error:
    parser.error(str(error))


def command[Result](
  main: Callable[[list[str] | None], Result],
) -> Callable[..., Result]:
  """Wraps `main` to print a message instead of a traceback for two errors.

  If memory runs out, the command exits with status 1. If XLA's compiler for
  CUDA is needed but not installed, it exits with status 2.
  """

  @functools.wraps(main)
  def run(arguments: list[str] | None = None) -> Result:
    try:
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
