# SPDX-License-Identifier: Apache-2.0
"""Reads command lines and prints their errors in terms of options.

Dataclasses check their values when they are made, for programs too, and begin
their messages with their own name. A command line knows only options, and tyro
would put a name of its own in front, in a box. Nor do they know which options
were given: a preset may set one that another option makes void.
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

_OF_CLASS = re.compile(r"[A-Z]\w*(?:Config|Data): ")
# Functions of coat_jax that commands call.
_OF_FUNCTION = re.compile(r"^(?:load|save)_hf: ")


# Options that are read only where another one is set.
_NEEDS = {"compare_seeds": "compare"}


def words_of(arguments: Sequence[str] | None) -> list[str]:
  """Lists the words of a command line; None for those of this process."""
  return sys.argv[1:] if arguments is None else list(arguments)


def times_given(option: str, words: Sequence[str]) -> int:
  """Counts how often a command line gives an option."""
  given = (word.partition("=")[0].replace("_", "-") for word in words)
  return list(given).count(f"--{option.replace('_', '-')}")


def check_given(config: Any, words: Sequence[str]) -> None:
  """Checks that a command line gives no option that another makes void."""
  for option, needed in _NEEDS.items():
    if times_given(option, words) and not getattr(config, needed):
      name = option.replace("_", "-")
      raise ValueError(
        f"{name} applies to --{needed}, got none; pass it too, or leave "
        f"--{name} out"
      )


def error_line(error: BaseException | None, part: str = "") -> str:
  """Writes an error as a line to print, without names of Python."""
  text = _OF_FUNCTION.sub("", _OF_CLASS.sub("", str(error), count=1))
  if part:
    text = f"{part}: {text}"
  return f"error: {text}"


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
  """Prints an error about the command line as one sentence.

  It may be one that a dataclass raises inside `tyro.cli`. All else that tyro
  prints stays: what is missing, unknown, or no number.
  """
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
  """The sentence of what was shown, if a dataclass raised it.

  tyro exits while it handles that error, which it may have wrapped in one whose
  `arg` is the part of the configuration, or the option whose value is no
  number, say.
  """
  error, part = stop.__context__, ""
  while error is not None and (arg := getattr(error, "arg", None)) is not None:
    if not isinstance(arg, str):
      return None
    words = arg.split(".")
    # Without the whole's name, which is its class's or one of tyro's own.
    part = ".".join(word for word in words if word[:1].islower())
    error = error.__context__
  if isinstance(error, ValueError) and _letters(str(error)) in _letters(shown):
    return error_line(error, part)
  return None


def _letters(text: str) -> str:
  """Letters and digits alone, which wrapping and frames do not change."""
  return "".join(filter(str.isalnum, text))
