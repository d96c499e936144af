# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates; `rendering` runs this program in a new process.

A template is a program that comes with a tokenizer. Jinja's sandbox gives the
template access to text only. The operating system kills the process if the
template needs too much time or memory. Python could not do that, because it
cannot interrupt a single expression such as 10 ** 10 ** 10.

Each request is a line of JSON on standard input, and each answer is a line of
JSON on standard output. The keys of a request are `source`, `is_marked`
(whether to mark {% generation %} blocks), `now` (an ISO date or null),
`variables`, `seconds` and `memory`. An answer has one key: `text`, `undefined`,
`error` or `limit`. This file imports nothing from this project, so that the
process starts fast.
"""

import contextlib
import datetime
import functools
import json
import math
import os
import resource
import signal
import sys
import time
from typing import IO, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Marks around {% generation %} blocks. Text does not contain the noncharacter
# U+FDD0.
BEGIN, END = "\ufdd0(", "\ufdd0)"
# The maximum number of characters of an error message to send.
_MESSAGE = 1000


def send(file: IO[bytes], value: Any) -> int:
  """Writes a value as a line of JSON; returns its size in bytes."""
  line = json.dumps(value).encode() + b"\n"
  file.write(line)
  file.flush()
  return len(line)


def receive(file: IO[bytes]) -> tuple[Any, int]:
  """Reads a line of JSON; returns its value and its size in bytes."""
  line = file.readline()
  if not line.endswith(b"\n"):  # The other process has ended.
    raise EOFError
  return json.loads(line), len(line)


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
  return _environment(is_marked).from_string(source)


@functools.cache
def _environment(is_marked: bool) -> ImmutableSandboxedEnvironment:
  generation = _MarkedGeneration if is_marked else _Generation
  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[loopcontrols, generation],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise
  return environment


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


def _render(request: dict[str, Any]) -> str:
  now = request["now"]
  now = datetime.datetime.fromisoformat(now) if now else datetime.datetime.now()
  template = _compile(request["source"], request["is_marked"])
  return template.render(strftime_now=now.strftime, **request["variables"])


def _limit(request: dict[str, Any], size: int) -> None:
  """Sets the limits that the operating system enforces for a request."""
  seconds = math.ceil(time.process_time() + request["seconds"] + size / 1e6)
  memory = request["memory"] + 32 * size
  for kind, soft in (
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_AS, memory),
  ):
    hard = resource.getrlimit(kind)[1]
    soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    # macOS does not support all limits.
    with contextlib.suppress(ValueError, OSError):
      resource.setrlimit(kind, (soft, hard))


def _answer(request: dict[str, Any], size: int) -> dict[str, str]:
  """Renders a request's template; returns the answer to send."""
  try:
    text = _render(request)
  except jinja2.UndefinedError as error:
    return {"undefined": str(error)[:_MESSAGE]}
  except MemoryError:
    return {"limit": f"it needs more than {request['memory']} bytes"}
  except BaseException as error:  # A template can raise anything.
    return {"error": (str(error) or type(error).__name__)[:_MESSAGE]}
  if len(text) > (most := 1_000_000 + 10 * size):
    return {"limit": f"it writes {len(text)} characters, more than {most}"}
  return {"text": text}


def main() -> None:
  """Answers requests until standard input ends."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
  while True:
    try:
      request, size = receive(sys.stdin.buffer)
    except EOFError:
      return
    _limit(request, size)
    send(out, _answer(request, size))


if __name__ == "__main__":
  main()
