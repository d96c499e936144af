# SPDX-License-Identifier: Apache-2.0
"""Reads command lines, and prints their errors as plain sentences.

Options are dataclasses, which check their values when they are created. The
functions here print an error as one line, without the dataclass's name and
without the box that tyro draws around errors.
"""

import contextlib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tyro

_OF_CLASS = re.compile(r"[A-Z]\w*(?:Config|Data): ")
_OF_FUNCTION = re.compile(r"^(?:load|save)_hf: ")


def times_given(option: str, words: Sequence[str]) -> int:
  """Counts how often an option occurs in a command line."""
  given = (word.partition("=")[0].replace("_", "-") for word in words)
  return list(given).count(f"--{option.replace('_', '-')}")


def check_given_once(option: str, words: Sequence[str], remedy: str) -> None:
  """Refuses an option that is given several times; tyro would use the last."""
  if times_given(option, words) > 1:
    raise ValueError(f"--{option} was given several times; {remedy}")


def read_options(
  kind: Any,
  command: str,
  words: Sequence[str] | None,
  description: str | None = None,
) -> Any:
  """Reads the options of `python -m train.COMMAND` into a dataclass."""
  with quiet_if_unread(), plain_errors():
    return tyro.cli(
      kind,
      args=words,
      prog=f"python -m train.{command}",
      description=description,
      config=(tyro.conf.AvoidSubcommands,),
    )


def check_compare(config: Any, words: Sequence[str]) -> None:
  """Checks that --compare-seeds is given only with --compare."""
  if times_given("compare_seeds", words) and not config.compare:
    raise ValueError(
      "--compare-seeds needs --compare; pass --compare bf16 too, or leave "
      "--compare-seeds out"
    )


def one_of(
  presets: Mapping[str, Callable[[], Any]],
  adapt: Callable[[Any], Any] = lambda config: config,
) -> Any:
  """Builds a type for `read_options` whose first word selects a preset."""
  return tyro.extras.subcommand_type_from_defaults(
    {name: adapt(preset()) for name, preset in presets.items()},
    {name: inspect.getdoc(preset) or "" for name, preset in presets.items()},
  )


def error_line(error: BaseException | None, part: str = "") -> str:
  """Formats an error as one line, without the Python name at its start."""
  text = _OF_FUNCTION.sub("", _OF_CLASS.sub("", str(error), count=1))
  if part:
    text = f"{part}: {text}"
  return f"error: {text}"


@contextlib.contextmanager
def quiet_if_unread() -> Iterator[None]:
  """Exits with status 1 and no message if standard output's reader has ended.

  For example, `head` ends after it has read a few lines.
  """
  try:
    try:
      yield
    finally:
      sys.stdout.flush()
  except BrokenPipeError:
    # Python flushes standard output when it exits, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
  """Prints a ValueError, even one that tyro caught, and exits with status 2."""
  held = io.StringIO()
  try:
    with contextlib.redirect_stderr(held):
      yield
  except SystemExit as stop:
    line = _line_of_cause(stop, held.getvalue())
    if line is not None:
      held = io.StringIO(line + "\n")
    raise
  except ValueError as error:
    held = io.StringIO(error_line(error) + "\n")
    raise SystemExit(2) from error
  finally:
    sys.stderr.write(held.getvalue())
    sys.stderr.flush()


def _line_of_cause(stop: SystemExit, shown: str) -> str | None:
  """Formats the error that tyro printed; None if no dataclass raised it."""
  # tyro may have wrapped the dataclass's error in other errors. Each wrapper's
  # `arg` is the name of a part of the configuration, or an object if an
  # option's value could not be parsed.
  error, part = stop.__context__, ""
  while error is not None and (arg := getattr(error, "arg", None)) is not None:
    if not isinstance(arg, str):
      return None
    words = arg.split(".")
    # Drop the name of the whole configuration: a class's name, or one that
    # tyro made up. Neither begins with a lowercase letter.
    part = ".".join(word for word in words if word[:1].islower())
    error = error.__context__
  if isinstance(error, ValueError) and _letters(str(error)) in _letters(shown):
    return error_line(error, part)
  return None


def _letters(text: str) -> str:
  """Keeps only letters and digits, to ignore tyro's boxes and line breaks."""
  return "".join(filter(str.isalnum, text))
