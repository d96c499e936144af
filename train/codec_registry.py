# SPDX-License-Identifier: Apache-2.0
"""Shim of `coat_jax.codecs.{names, build, options}`: delete at the merge."""

import difflib
import importlib
import inspect

from coat_jax import codecs


def names() -> tuple[str, ...]:
  """Names of the codecs of `coat_jax.codecs`."""
  return "coat", "coat_e8m0", "log8", "fp8", "bfloat16", "float32"


def options(name: str) -> tuple[str, ...]:
  """Names of the options that a codec's constructor takes."""
  return tuple(inspect.signature(_constructor(name)).parameters)


def build(name: str, **options) -> codecs.MomentCodec:
  """Builds a codec by its name, or by package.module:function."""
  return _constructor(name)(**options)


def _constructor(name: str):
  module, _, function = name.partition(":")
  if function:
    try:
      return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
      raise ValueError(
        f"codec: package.module:function must name a function, got {name!r} "
        f"({error}); check that Python finds the module"
      ) from error
  if name not in names():
    near = difflib.get_close_matches(name, names())
    raise ValueError(
      f"codecs: codec must be one of {', '.join(names())}, or "
      f"package.module:function, got {name!r}"
      + (f"; did you mean {near[0]!r}?" if near else "; pass one of these")
    )
  return getattr(codecs, name)
