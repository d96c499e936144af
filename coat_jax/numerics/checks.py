# SPDX-License-Identifier: Apache-2.0
"""Argument checks with messages "op: name must be rule, got value; remedy".

A wrong type raises a TypeError, a wrong value a ValueError. `op` is the public
function that was called, and `remedy` tells the caller what to do.
"""

import dataclasses
import math
import numbers
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

# The range of f32 without subnormal numbers, which devices flush to 0.
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38


@dataclasses.dataclass(frozen=True)
class Range:
  """The finite numbers from `lowest` to `highest`, including both."""

  lowest: int | float = -math.inf
  highest: int | float = math.inf

  def __contains__(self, value: Any) -> bool:
    return bool(self.lowest <= value <= self.highest) and abs(value) < math.inf

  def __str__(self) -> str:
    """States the rule for a number in error messages."""
    if isinstance(self.highest, int) and self.highest >= COUNT.highest:
      return f"at least {self.lowest}"
    if self.highest < _LARGEST:
      return f"from {self.lowest} to {self.highest}"
    if self.lowest == _SMALLEST:
      return "above 0 and finite"
    return "finite" if self == ANY else f"at least {self.lowest} and finite"


_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
ANY = Range()
NOT_NEGATIVE = Range(0, _LARGEST)
POSITIVE = Range(_SMALLEST, _LARGEST)
COUNT = Range(1, 2**31 - 1)


def is_array(x: Any) -> bool:
  """Returns whether x is an array, a NumPy scalar or a `ShapeDtypeStruct`."""
  return isinstance(x, _ARRAYS)


def described(value: Any) -> str:
  """Describes a value for an error message: an array by its dtype and shape."""
  if isinstance(value, np.ndarray) and not value.ndim:
    value = value.item()
  if is_array(value) and not isinstance(value, np.generic):
    return f"{value.dtype}{list(value.shape)}"
  text = getattr(value, "__name__", None) or repr(value)
  if "\n" in text:
    return a(type(value))
  return text if len(text) < 80 else f"{text[:70]}..."


def a(kind: type) -> str:
  """Returns a class's name with its article."""
  article = "an" if kind.__name__[0] in "AEIOUaeiou" else "a"
  return f"{article} {kind.__name__}"


def refuse(
  error: type[Exception], op: str, name: str, rule: str, value: Any, remedy: str
) -> NoReturn:
  """Raises "op: name must be rule, got value; remedy"."""
  raise error(f"{op}: {name} must be {rule}, got {described(value)}; {remedy}")


def check_kind(
  op: str, name: str, value: Any, kind: type | tuple[type, ...], remedy: str
) -> None:
  """Raises a TypeError unless a value is an instance of one of the classes."""
  if isinstance(value, kind):
    return
  kinds = kind if isinstance(kind, tuple) else (kind,)
  words = {str: "a string", type(None): "None"}
  rule = " or ".join(words.get(x) or a(x) for x in kinds)
  refuse(TypeError, op, name, rule, value, remedy)


def check_flags(op: str, **flags: Any) -> None:
  """Raises a TypeError unless all values are True or False."""
  for name, value in flags.items():
    check_kind(op, name, value, bool, "pass True or False")


def check_function(op: str, name: str, value: Any, remedy: str) -> None:
  """Raises a TypeError unless a value is callable."""
  if not callable(value):
    refuse(TypeError, op, name, "a function", value, remedy)


def check_choice(
  op: str, name: str, value: Any, choices: Sequence[Any], remedy: str = ""
) -> None:
  """Raises a ValueError unless a value is one of the choices."""
  if any(value is x or type(value) is type(x) and value == x for x in choices):
    return
  rule = f"one of {', '.join(map(repr, choices))}"
  refuse(ValueError, op, name, rule, value, remedy or "pass one of these")


def check_number(
  op: str,
  name: str,
  value: Any,
  allowed: Range,
  remedy: str,
  *,
  or_else: str = "",
  is_whole: bool = False,
) -> None:
  """Raises unless a value is a number, or a scalar array, in a range.

  `optax.inject_hyperparams` passes hyperparameters as scalar arrays. The values
  of JAX arrays are not checked, because they are unknown under `jit`. `or_else`
  is appended to the rule in the message, for example "or None" if the caller
  also allows None.
  """
  if is_array(value):
    kind: Any = jnp.integer if is_whole else jnp.number
    is_number = jnp.issubdtype(value.dtype, kind)
    is_number &= not jnp.issubdtype(value.dtype, jnp.complexfloating)
    has_axes = value.shape != ()
    is_known = isinstance(value, np.generic | np.ndarray)
  else:
    kind: Any = numbers.Integral if is_whole else numbers.Real
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    has_axes, is_known = False, True
  if not is_number or has_axes:
    error = ValueError if is_number else TypeError
    rule = f"{'a whole number' if is_whole else 'a number'} {or_else}".strip()
    refuse(error, op, name, rule, value, remedy)
  if is_known and value not in allowed:
    rule = f"{allowed} {or_else}".strip()
    if value > allowed.highest and allowed.highest < _LARGEST:
      rule = f"at most {allowed.highest}"
    refuse(ValueError, op, name, rule, value, remedy)


def check_whole(
  op: str, name: str, value: Any, allowed: Range, remedy: str, **options
) -> None:
  """Raises unless a value is a whole number in a range; see `check_number`."""
  check_number(op, name, value, allowed, remedy, is_whole=True, **options)


def check_group_size(op: str, value: Any, remedy: str) -> None:
  """Raises unless a group size is a positive whole number."""
  check_whole(op, "group_size", value, COUNT, remedy)


def flatten_like(
  op: str, name: str, tree: Any, of: str, treedef: Any, remedy: str
) -> list[Any]:
  """Lists the nodes of a tree that correspond to the leaves of `treedef`.

  In the error's message, `of` names the tree with the structure `treedef`.
  """
  try:
    return treedef.flatten_up_to(tree)
  except ValueError as error:
    raise ValueError(
      f"{op}: {name} must have the structure of {of}, {treedef}, got "
      f"{jax.tree.structure(tree)}; {remedy}"
    ) from error


def check_array(
  op: str,
  name: str,
  value: Any,
  rule: str,
  *,
  ndim: int | Collection[int] = (),
  kind: Any = jnp.floating,
  remedy: str,
) -> None:
  """Raises unless a value is an array of kind `kind` with `ndim` axes.

  `rule` describes the array in the message, as in "int [B, T]". `kind` is a
  dtype class for `jnp.issubdtype`, or a tuple of dtype classes. `ndim` may be a
  collection of allowed numbers; () allows any number of axes.
  """
  kinds = kind if isinstance(kind, tuple) else (kind,)
  if not is_array(value) or not any(
    jnp.issubdtype(value.dtype, each) for each in kinds
  ):
    refuse(TypeError, op, name, rule, value, remedy)
  ranks = (ndim,) if isinstance(ndim, int) else ndim
  if ranks and value.ndim not in ranks:
    refuse(ValueError, op, name, rule, value, remedy)


def check_numeric(op: str, name: str, value: Any, remedy: str) -> None:
  """Raises a TypeError unless a value is an array of numbers."""
  rule = "an array of numbers"
  check_array(op, name, value, rule, kind=jnp.number, remedy=remedy)


def dtype_of(dtype: Any) -> Any:
  """Returns the dtype for a name or a class; None if no dtype matches."""
  try:
    # NumPy interprets None as float64.
    return None if dtype is None else jnp.dtype(dtype)
  except TypeError:
    return None


def check_float_dtype(op: str, name: str, dtype: Any) -> None:
  """Raises a TypeError unless a dtype is a float dtype of 16 bits or more."""
  found = dtype_of(dtype)
  if found is not None and jnp.issubdtype(found, jnp.floating):
    if found.itemsize > 1:
      return
  rule = "a floating dtype of 16 bits or more"
  refuse(TypeError, op, name, rule, dtype, "pass jnp.bfloat16 or jnp.float32")
