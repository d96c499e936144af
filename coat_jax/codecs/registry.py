# SPDX-License-Identifier: Apache-2.0
"""Registry of codecs by name, for command lines, benchmarks and tests.

`register` adds a constructor under the function's name. You need not register
your own codec: pass "package.module:function" instead of a name.
"""

import dataclasses
import difflib
import importlib
import inspect
import itertools
import typing
from collections.abc import Callable
from typing import Any, Literal, cast

from coat_jax.codecs.group import GroupCodec
from coat_jax.numerics.checks import check_function, check_kind, refuse


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentCodec:
  """A pair of codecs for Adam's two moments, for `coat_adamw(codec=...)`.

  Attributes:
    name: a label for reports; `build` does not use it.
    mu: codec of the first moment.
    nu: codec of the second moment.

  Raises:
    TypeError: `name` is not a string, or a codec is not a `GroupCodec`.

  Examples:
    >>> from coat_jax import codecs
    >>> codec = codecs.MomentCodec(
    ...   name="coat_log8", mu=codecs.coat().mu, nu=codecs.log8().nu
    ... )
  """

  name: str
  mu: GroupCodec
  nu: GroupCodec

  def __post_init__(self):
    op = "MomentCodec"
    check_kind(op, "name", self.name, str, "pass a label for reports")
    for name in ("mu", "nu"):
      remedy = f"pass one, as in codecs.coat().{name}"
      check_kind(op, name, getattr(self, name), GroupCodec, remedy)

  @property
  def groups(self) -> tuple[GroupCodec, ...]:
    """The group codecs, in the order of the moments."""
    return self.mu, self.nu


_REGISTRY: dict[str, Callable[..., MomentCodec]] = {}


def register[F: Callable[..., MomentCodec]](constructor: F) -> F:
  """Registers a constructor under its name; use it as a decorator.

  Args:
    constructor: returns a `MomentCodec`; every argument has a default.

  Raises:
    TypeError: `constructor` is not a function.
    ValueError: another constructor has this name.
  """
  op, remedy = "codecs.register", "pass a function that returns a MomentCodec"
  check_function(op, "constructor", constructor, remedy)
  name = getattr(constructor, "__name__", repr(constructor))
  if _REGISTRY.setdefault(name, constructor) is not constructor:
    raise ValueError(
      f"codecs.register: names must be unique, got {name!r} twice; rename the "
      "function"
    )
  return constructor


def names() -> tuple[str, ...]:
  """Returns the names of all registered codecs, the built-in ones first."""
  return tuple(_REGISTRY)


def options(name: str) -> dict[str, Any]:
  """Returns the options of a codec: its constructor's arguments and defaults.

  Args:
    name: as for `build`.

  Raises:
    TypeError: `name` is not a string.
    ValueError: there is no such codec, or one of its arguments has no default.
  """
  parameters = inspect.signature(_constructor(name)).parameters
  missing = [k for k, p in parameters.items() if p.default is p.empty]
  if missing:
    raise ValueError(
      f"codecs: all arguments of {name!r} must have defaults, got none for "
      f"{missing}; give each a default"
    )
  return {key: parameter.default for key, parameter in parameters.items()}


def build(name: str, **arguments: Any) -> MomentCodec:
  """Builds a codec from its name and options, as given on a command line.

  Args:
    name: one of `names()`, or "package.module:function" for your own codec.
    **arguments: values for any of `options(name)`.

  Raises:
    TypeError: an argument has the wrong type, or the function does not return a
      `MomentCodec`.
    ValueError: there is no such codec, it has no such option, or it does not
      accept the option's value.

  Examples:
    >>> from coat_jax import codecs
    >>> codecs.build("coat", group_size=64) == codecs.coat(64)
    True
  """
  taken = options(name)
  for key in arguments:
    if key not in taken:
      raise ValueError(
        f"codecs.build: {name!r} accepts {', '.join(taken) or 'no options'}, "
        f"got {key!r}; leave it out"
      )
  codec = _constructor(name)(**arguments)
  if not isinstance(codec, MomentCodec):
    raise TypeError(
      f"codecs.build: {name!r} must return a MomentCodec, got {codec!r}; "
      "return MomentCodec(name=..., mu=..., nu=...)"
    )
  return codec


def variants(name: str) -> list[dict[str, Any]]:
  """Lists the combinations of `Literal` options that a codec accepts.

  Args:
    name: as for `build`.

  Returns:
    For each combination, arguments for `build`; the defaults come first.

  Examples:
    >>> from coat_jax import codecs
    >>> codecs.variants("fp8")
    [{'rounding': 'stochastic'}, {'rounding': 'nearest'}]
  """
  hints = typing.get_type_hints(inspect.unwrap(_constructor(name)))
  values = {
    key: sorted(typing.get_args(hints[key]), key=lambda x, d=default: x != d)
    for key, default in options(name).items()
    if typing.get_origin(hints.get(key)) is Literal
  }
  found = []
  for chosen in itertools.product(*values.values()):
    arguments = dict(zip(values, chosen, strict=True))
    try:
      build(name, **arguments)
    except ValueError:
      continue
    found.append(arguments)
  return found


def _constructor(name: str) -> Callable[..., MomentCodec]:
  """Returns the constructor for a name."""
  remedy = "pass a codec itself as codec=..."
  check_kind("codecs", "name", name, str, remedy)
  if name in _REGISTRY:
    return _REGISTRY[name]
  module, _, function = name.partition(":")
  if not function:
    near = difflib.get_close_matches(name, _REGISTRY)
    raise ValueError(
      f"codecs: codec must be one of {', '.join(_REGISTRY)}, or "
      f"package.module:function, got {name!r}"
      + (f"; did you mean {near[0]!r}?" if near else "; pass one of these")
    )
  try:
    found = getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError) as error:
    raise ValueError(
      f"codecs: {name!r} must name a function as package.module:function, got "
      f"{type(error).__name__}: {error}; check the spelling, and that the "
      "package can be imported here"
    ) from error
  if not callable(found):
    remedy = "name a function that returns a MomentCodec"
    refuse(ValueError, "codecs", repr(name), "a function", found, remedy)
  return cast(Callable[..., MomentCodec], found)
