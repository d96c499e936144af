# SPDX-License-Identifier: Apache-2.0
"""Helpers that all options share: rules for resuming, defaults, paths.

A field's metadata says what a resumed run may change (`resume_rule` of
`train.config`): what is FIXED makes another run of it, CONVERTED fields may
change with `convert_state`, changes of SILENT ones are not worth a line, and
all others are reported.
"""

import dataclasses
from pathlib import Path
from typing import Any, get_args

FIXED = {"resume": "fixed"}
CONVERTED = {"resume": "converted"}
SILENT = {"resume": "silent"}


def type_of(field: dataclasses.Field) -> Any:
  """The type of a field, without what tyro is told of it."""
  return getattr(field.type, "__origin__", field.type)


def part_of(field: dataclasses.Field, values: Any) -> type | None:
  """The dataclass that a field's values are of; None of a plain field."""
  kind = type_of(field)
  kinds = [x for x in get_args(kind) or (kind,) if dataclasses.is_dataclass(x)]
  for kind in kinds:
    names = {field.name for field in dataclasses.fields(kind)}
    if len(kinds) == 1 or values.keys() <= names:
      return kind
  return None


def defaults(config: Any, taken: dict) -> dict:
  """Returns the default of each option that any of the choices takes."""
  names = {name for options in taken.values() for name in options}
  fields = dataclasses.fields(config)
  return {field.name: field.default for field in fields if field.name in names}


def check_unused(config: Any, chosen: str, taken: dict) -> None:
  """Checks that no option is set that the choice would ignore."""
  choice = getattr(config, chosen)
  for name, default in defaults(config, taken).items():
    if name not in taken[choice] and getattr(config, name) != default:
      takers = [taker for taker, found in taken.items() if name in found]
      raise ValueError(
        f"{type(config).__name__}: {name} applies to {chosen} "
        f"{' or '.join(takers)}, got {chosen} {choice}; leave {name} out"
      )


def read_path(option: str, path: str | Path) -> Path:
  """Reads a path that may begin with ~ or ~user."""
  if not str(path).strip():
    raise ValueError(
      f"{option}: a path is needed, got {str(path)!r}; name a file or a folder"
    )
  try:
    return Path(path).expanduser()
  except RuntimeError as error:
    raise ValueError(
      f"{option}: ~ must be followed by / or by a user of this machine, got "
      f"{path}; write the folder out, or ./~ for a file of that name"
    ) from error


def read_profile(text: str) -> tuple[int, int]:
  """Reads (steps to trace, steps before them) from `5` or `5:100`."""
  count, colon, wait = text.partition(":")
  wait = wait if colon else "5"
  if not text:
    return 0, 0
  numbers = [x for x in (count, wait) if x.isascii() and x.isdigit()]
  numbers = [int(x) for x in numbers if len(x) < 10]
  if len(numbers) < 2 or not numbers[0]:
    raise ValueError(
      "profile: steps to trace are written as 5, or as 5:100 for five after "
      f"the first hundred, got {text[:40]!r}"
    )
  return numbers[0], numbers[1]
