# SPDX-License-Identifier: Apache-2.0
"""Checks the fields of a configuration against their types.

The type of a number includes its range, as in `steps: Count` or
`b1: Annotated[float, Range(0, 1)]`.
"""

import dataclasses
import difflib
import numbers
import types
from collections.abc import Collection
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from coat_jax.numerics.checks import COUNT, NOT_NEGATIVE, POSITIVE, Range

# A positive whole number that int32 can hold, such as a number of steps.
Count = Annotated[int, COUNT]
# Limited so that a product of three widths fits in int64.
Width = Annotated[int, Range(1, 2**20)]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]


def range_of(hint: Any) -> tuple[type, Range] | None:
  """Returns int or float and its range; None if the type is not a number."""
  found = [hint, *get_args(hint)]
  for each in found:
    if allowed := _range_in(each):
      return get_args(each)[0], allowed
  if any(each in (int, float) for each in found):
    raise TypeError(
      "range_of: the types int and float need a Range, as in Annotated[float, "
      f"Range(0, 1)], got {hint}"
    )
  return None


def check_fields(config: Any) -> None:
  """Raises ValueError if a field's type does not allow its value."""
  for field in dataclasses.fields(config):
    value, hints = getattr(config, field.name), _alternatives(field.type)
    rules = [rule for hint in hints if (rule := _broken_rule(hint, value))]
    if len(rules) == len(hints):  # No member of the union allows the value.
      text = repr(value)
      text = text if len(text) < 40 else f"{text[:30]}..."
      raise ValueError(
        f"{type(config).__name__}: {field.name} must be {' or '.join(rules)}, "
        f"got {text}; pass an allowed value"
      )


def check_family(config: Any, families: Collection[str]) -> None:
  """Raises ValueError for an unknown family; suggests the most similar name."""
  if config.family in families:
    return
  near = difflib.get_close_matches(config.family, families, n=1)
  raise ValueError(
    f"{type(config).__name__}: family must be one of {tuple(families)}, got "
    f"{config.family!r}; "
    + (f"did you mean {near[0]!r}?" if near else "pass one of these")
  )


def _alternatives(hint: Any) -> tuple[Any, ...]:
  """Returns the members of a union; other types become a tuple of one."""
  if get_origin(hint) is Annotated and not _range_in(hint):
    hint = get_args(hint)[0]  # Drop other libraries' annotations (tyro's).
  is_union = get_origin(hint) in (types.UnionType, Union)
  return get_args(hint) if is_union else (hint,)


def _range_in(hint: Any) -> Range | None:
  """Returns the range that an annotated type contains."""
  return next((x for x in get_args(hint) if isinstance(x, Range)), None)


def _broken_rule(hint: Any, value: Any) -> str:
  """Describes what a value must be; "" if the value is allowed."""
  if hint is type(None):
    return "" if value is None else "None"
  if get_origin(hint) is Literal:
    names = get_args(hint)
    return "" if value in names else f"one of {', '.join(names)}"
  if hint in (str, bool):
    words = {str: "a string", bool: "True or False"}
    return "" if type(value) is hint else words[hint]
  if (found := range_of(hint)) is None:
    return ""
  kind, allowed = found
  wanted = numbers.Integral if kind is int else numbers.Real
  is_number = isinstance(value, wanted) and not isinstance(value, bool)
  if is_number and value in allowed:
    return ""
  words = "a whole number" if kind is int else "a number"
  return f"{words} {allowed}"
