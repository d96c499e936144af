# SPDX-License-Identifier: Apache-2.0
"""Checks types at run time as jaxtyping's import hook does, but faster.

`--jaxtyping-packages` decorates each function with `jaxtyping.jaxtyped`, which
binds the arguments of each call and checks them twice, so that axes may share
names. Few functions have annotations with named axes. `install` makes the hook
leave functions without annotations alone, and check others with beartype only.
"""

import functools
import inspect
import typing
from collections.abc import Callable

import beartype
import jaxtyping

_jaxtyped = jaxtyping.jaxtyped
_check = beartype.beartype(
  conf=beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError)
)


def install() -> None:
  """Replaces the decorator; call it before the packages are imported."""
  jaxtyping.jaxtyped = jaxtyped


def jaxtyped(*, typechecker: Callable) -> Callable:
  """Returns a decorator for a function or class."""
  slow = _jaxtyped(typechecker=typechecker)

  def decorate(decorated):
    if not inspect.isfunction(decorated):
      return slow(decorated)
    hints = decorated.__annotations__.values()
    if not hints:
      return decorated
    return slow(decorated) if any(map(_has_axes, hints)) else _fast(decorated)

  return decorate


def _fast(function: Callable) -> Callable:
  checked = _check(function)

  @functools.wraps(function)
  def wrapped(*args, **kwargs):
    __tracebackhide__ = True
    if jaxtyping.config.jaxtyping_disable:
      return function(*args, **kwargs)
    return checked(*args, **kwargs)

  return wrapped


def _has_axes(hint: object) -> bool:
  """Tells whether an annotation may contain an array with named axes.

  Names of types may stand for anything; jaxtyping looks them up.
  """
  if isinstance(hint, str | typing.ForwardRef):
    return True
  if type(hint).__module__.partition(".")[0] == "jaxtyping":
    return True
  if isinstance(hint, typing.TypeAliasType):
    return _has_axes(hint.__value__)
  if isinstance(hint, typing.TypeVar):
    return any(map(_has_axes, (hint.__bound__, *hint.__constraints__)))
  if isinstance(hint, list):  # The parameters of a Callable.
    return any(map(_has_axes, hint))
  return any(map(_has_axes, typing.get_args(hint)))
