# SPDX-License-Identifier: Apache-2.0
"""Checks the fields of a configuration against their types.

The type of a number contains its range, as in `steps: Count` or
`b1: Annotated[float, Range(0, 1)]`. So numbers that are not finite, or absurdly
large, are refused before they reach JAX.
"""

import dataclasses
import difflib
import numbers
import types
from collections.abc import Collection
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from coat_jax.numerics.checks import COUNT, NOT_NEGATIVE, POSITIVE, Range

# A number that int32 can hold, such as a step.
Count = Annotated[int, COUNT]
# A width, limited so that the number of a weight's bytes fits in int64.
Width = Annotated[int, Range(1, 2**20)]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]


def range_of(hint: Any) -> tuple[type, Range] | None:
  """Returns (int or float, its range) for a number's type, else None."""
  found = [hint, *get_args(hint)]
  for each in found:
    arguments = get_args(each)
    ranges = [x for x in arguments if isinstance(x, Range)]
    if ranges:
      return arguments[0], ranges[0]
  if any(each in (int, float) for each in found):
    raise TypeError(
      "range_of: the types int and float need a Range, as in Annotated[float, "
      f"Range(0, 1)], got {hint}"
    )
  return None


def check_numbers(config: Any) -> None:
  """Raises ValueError if a numeric field is outside its `Range`."""
  for field in dataclasses.fields(config):
    hint, value = _without_notes(field.type), getattr(config, field.name)
    if (found := range_of(hint)) is None:
      continue
    kind, allowed = found
    is_optional = type(None) in get_args(hint)
    if _is_allowed(value, kind, allowed, is_optional=is_optional):
      continue
    text = repr(value)
    text = text if len(text) < 30 else f"{text[:20]}..."
    whole = "a whole number" if kind is int else "a number"
    raise ValueError(
      f"{type(config).__name__}: {field.name} must be {whole} from "
      f"{allowed.lowest} to {allowed.highest}, got {text}; pass such a "
      "value"
    )


def _without_notes(hint: Any) -> Any:
  """Strips other libraries' annotations, such as tyro's, from a type."""
  while get_origin(hint) is Annotated:
    inner, *notes = get_args(hint)
    if any(isinstance(note, Range) for note in notes):
      return hint
    hint = inner
  return hint


def check_family(config: Any, families: Collection[str]) -> None:
  """Raises ValueError for an unknown family; suggests the nearest name."""
  if config.family in families:
    return
  near = difflib.get_close_matches(config.family, families, n=1)
  raise ValueError(
    f"{type(config).__name__}: family must be one of {tuple(families)}, got "
    f"{config.family!r}; "
    + (f"did you mean {near[0]!r}?" if near else "pass one of these")
  )


def check_kinds(config: Any) -> None:
  """Raises ValueError if a str, bool or Literal field violates its type."""
  for field in dataclasses.fields(config):
    value, hints = getattr(config, field.name), _alternatives(field.type)
    words = [text for hint in hints if (text := _words(hint, value))]
    if len(words) == len(hints):  # No type of the union allows it.
      raise ValueError(
        f"{type(config).__name__}: {field.name} must be {' or '.join(words)}, "
        f"got {repr(value)[:40]}; pass such a value"
      )


def _alternatives(hint: Any) -> tuple[Any, ...]:
  """Returns the members of a union, or a tuple of the type itself."""
  is_union = get_origin(hint) in (types.UnionType, Union)
  return get_args(hint) if is_union else (hint,)


def _words(hint: Any, value: Any) -> str:
  """Describes what a value must be; "" if the value is allowed."""
  if get_origin(hint) is Literal:
    names = get_args(hint)
    return "" if value in names else f"one of {', '.join(names)}"
  if hint is type(None):
    return "" if value is None else "None"
  words = {str: "a string", bool: "True or False"}
  return words.get(hint, "") if type(value) is not hint else ""


def _is_allowed(
  value: Any, kind: type, allowed: Range, *, is_optional: bool
) -> bool:
  if value is None:
    return is_optional
  wanted = numbers.Integral if kind is int else numbers.Real
  if not isinstance(value, wanted) or isinstance(value, bool):
    return False
  return value in allowed
