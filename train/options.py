# SPDX-License-Identifier: Apache-2.0
"""Helpers for the options of all commands.

`fixed`, `converted` and `silent` create dataclass fields. When a run resumes, a
`fixed` field must stay the same, and a `converted` field may change only if
`convert_state` is set. All other fields may change. The run reports changes,
except those of `silent` fields.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro

from coat_jax.models.ranges import Range

# An option that is off by default, with one flag, --x. Other booleans have two
# flags, --x and --no-x.
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
# The held-out share of the data. A share above a half is probably a mistake,
# such as the share to train on.
Share = Annotated[float, Range(1e-6, 0.5)]


def _field(rule: str, default: Any = dataclasses.MISSING) -> Any:
  return dataclasses.field(default=default, metadata={"resume": rule})


fixed = functools.partial(_field, "fixed")
converted = functools.partial(_field, "converted")
silent = functools.partial(_field, "silent")


def shown(hint: str, **options: Any) -> Any:
  """Shows a hint instead of the default value in an option's `--help`."""
  return tyro.conf.arg(help_behavior_hint=f"({hint})", **options)


def type_of(field: dataclasses.Field) -> Any:
  """Returns the type of a field, without its annotations for tyro."""
  return getattr(field.type, "__origin__", field.type)


def part_of(field: dataclasses.Field, values: Any) -> type | None:
  """Finds a field's dataclass; in a union, one with all keys of `values`."""
  kind = type_of(field)
  kinds = [x for x in get_args(kind) or (kind,) if dataclasses.is_dataclass(x)]
  for kind in kinds:
    names = {field.name for field in dataclasses.fields(kind)}
    if len(kinds) == 1 or values.keys() <= names:
      return kind
  return None


def unused(config: Any, taken: dict, choice: str) -> dict:
  """Maps the names of the options that `choice` ignores to their defaults."""
  others = {name for options in taken.values() for name in options}
  others -= set(taken[choice])
  fields = dataclasses.fields(config)
  return {field.name: field.default for field in fields if field.name in others}


def check_unused(config: Any, chosen: str, taken: dict) -> None:
  """Raises ValueError if an option is set that the choice ignores."""
  choice = getattr(config, chosen)
  for name, default in unused(config, taken, choice).items():
    if getattr(config, name) != default:
      takers = [taker for taker, found in taken.items() if name in found]
      raise ValueError(
        f"{type(config).__name__}: {name} applies to {chosen} "
        f"{' or '.join(takers)}, got {chosen} {choice}; leave {name} out"
      )


def first_line(error: Exception | str, most: int = 200) -> str:
  """Returns a message's first line, or the error's type if there is none."""
  lines = str(error).strip().splitlines()
  return lines[0][:most] if lines else type(error).__name__


def read_path(option: str, path: str | Path) -> Path:
  """Expands a path that may begin with ~ or ~user."""
  if not str(path).strip():
    raise ValueError(
      f"{option}: expected a path, got {str(path)!r}; name a file or a folder"
    )
  try:
    return Path(path).expanduser()
  except RuntimeError as error:
    raise ValueError(
      f"{option}: ~ must be followed by / or by the name of a user, got "
      f"{path}; write the whole path, or ./{path} if it begins with a real ~"
    ) from error


def read_profile(text: str) -> tuple[int, int]:
  """Parses `5` or `5:100` into (steps to trace, steps before the trace)."""
  if not text:
    return 0, 0
  count, colon, wait = text.partition(":")
  numbers = [count, wait if colon else "5"]
  is_number = [x.isascii() and x.isdigit() and len(x) < 10 for x in numbers]
  if not all(is_number) or not int(count):
    raise ValueError(
      "profile: expected a number of steps to trace, such as 5, or 5:100 for "
      f"five steps after the first hundred, got {text[:40]!r}"
    )
  return int(numbers[0]), int(numbers[1])
