# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates in Jinja's sandbox, as transformers does.

A template is a program that comes with a tokenizer. The sandbox gives it access
to text only. It does not limit time or memory, so use only templates from
tokenizers that you trust.
"""

import datetime
import functools
import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Marks around {% generation %} blocks; U+FDD0 is a noncharacter.
BEGIN, END = "\ufdd0(", "\ufdd0)"


def render(
  source: str,
  variables: dict[str, Any],
  *,
  is_marked: bool,
  now: datetime.datetime,
) -> str:
  """Renders a template; `now` is the time that `strftime_now` formats."""
  template = _compile(source, is_marked)
  return template.render(strftime_now=now.strftime, **variables)


class _Generation(Extension):
  """Implements {% generation %}, which marks an answer for training."""

  tags = {"generation"}
  is_marked = False

  def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    # As in transformers, variables that a block sets exist only in the block.
    call = self.call_method("_write")
    return nodes.CallBlock(call, [], [], body).set_lineno(line)

  def _write(self, caller: Any) -> str:
    return f"{BEGIN}{caller()}{END}" if self.is_marked else caller()


class _MarkedGeneration(_Generation):
  is_marked = True


@functools.lru_cache(maxsize=32)
def _compile(source: str, is_marked: bool) -> jinja2.Template:
  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[
      loopcontrols,
      _MarkedGeneration if is_marked else _Generation,
    ],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise
  return environment.from_string(source)


def _to_json(
  x: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """Writes JSON; Jinja's own `tojson` would escape characters for HTML."""
  return json.dumps(
    x,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)
