# SPDX-License-Identifier: Apache-2.0
"""Chat templates, as transformers keeps them beside a tokenizer.

chat_template.jinja, or `chat_template` in tokenizer_config.json, or one of
`published`. A template is a program that came with a tokenizer, so it runs in
Jinja's sandbox and changes nothing. It has what transformers gives it:
messages, tools, the special tokens by their names, `raise_exception` and
`strftime_now`.
"""

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from train.data.chat.published import PUBLISHED

_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_OLD_CONFIG = "special_tokens_map.json"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Around what {% generation %} holds. U+FDD0 and on are no characters, so text
# has no reason to have them.
_BEGIN, _END = "\ufdd0(", "\ufdd0)"
_MARK = re.compile(f"{re.escape(_BEGIN)}|{re.escape(_END)}")

_TOKEN_NAME = re.compile(r"^'(\w+_token)' is undefined")

Message = dict[str, Any]


class MissingToken(ValueError):
  """A template uses a special token that the tokenizer does not have."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
  """What makes text of a conversation.

  Attributes:
    source: In Jinja.
    special_tokens: By their names, as bos_token.
    tool_use: Another source, for conversations with tools; None for the same.
    now: What templates that write a date take it to be; None is the time of
      rendering, as in transformers. Fix it where text must stay the same.
  """

  source: str
  special_tokens: dict[str, str]
  tool_use: str | None = None
  now: datetime.datetime | None = None

  @classmethod
  def load(cls, folder: Path) -> "ChatTemplate | None":
    """Reads the template in a folder; None where there is none.

    Args:
      folder: That of tokenizer.json.

    Raises:
      ValueError: tokenizer_config.json is not what transformers writes.
    """
    source = _read_config(folder / _CONFIG).get("chat_template")
    named = {}
    if isinstance(source, list):  # Several, by names.
      several = [x for x in source if isinstance(x, dict)]
      named = {x.get("name"): x.get("template") for x in several}
      source = named.get("default")
    if (file := folder / _FILE).is_file():
      source = file.read_text("utf-8")
    if not isinstance(source, str):
      return None
    return cls(source, read_special_tokens(folder), named.get("tool_use"))

  @classmethod
  def published(cls, name: str, folder: Path) -> "ChatTemplate":
    """Makes a template of those that came with known models.

    Args:
      name: Of `published.PUBLISHED`.
      folder: That of tokenizer.json, for the special tokens.

    Raises:
      ValueError: no such name, or a damaged tokenizer_config.json.
    """
    if name not in PUBLISHED:
      raise ValueError(
        f"chat: a template is one of {', '.join(PUBLISHED)}, got {name!r}; "
        "choose one, or leave it out for the tokenizer's own"
      )
    return cls(PUBLISHED[name], read_special_tokens(folder))

  def render(
    self,
    messages: Sequence[Message],
    *,
    tools: list | None = None,
    add_generation_prompt: bool = False,
  ) -> str:
    """Returns the text of a conversation.

    Args:
      messages: Each with a role and what it says.
      tools: JSON schemas of functions that the assistant may call.
      add_generation_prompt: Ends the text where the assistant begins to write.

    Raises:
      MissingToken: it uses a special token that there is not.
      ValueError: the template is wrong, or refuses the conversation.
    """
    return self._render(False, messages, tools, add_generation_prompt)

  def has_generation(self, tools: list | None) -> bool:
    """Whether {% generation %} marks what the assistant writes."""
    return bool(_GENERATION.search(self._choose(tools)))

  def generated(
    self, messages: Sequence[Message], tools: list | None
  ) -> list[tuple[int, int]]:
    """Finds what the template's {% generation %} blocks hold.

    Args:
      messages: As for `render`.
      tools: As for `render`.

    Returns:
      (start, end) in the text of `render`, one of each block.

    Raises:
      ValueError: the template is wrong, or refuses the conversation, or the
        blocks are not in the text as they stand in the template.
    """
    marked = self._render(True, messages, tools, False)
    spans, begun, removed = [], [], 0
    for mark in _MARK.finditer(marked):
      place = mark.start() - removed
      removed += len(mark[0])
      if mark[0] == _BEGIN:
        begun.append(place)
      elif begun:
        spans.append((begun.pop(), place))
    text = self.render(messages, tools=tools)
    if begun or _MARK.search(text) or _MARK.sub("", marked) != text:
      raise ValueError(
        "chat: the text of {% generation %} blocks must be part of the whole "
        "text, got a template that changes it; correct the template"
      )
    return sorted(span for span in spans if span[0] < span[1])

  def _choose(self, tools: list | None) -> str:
    return self.tool_use if tools and self.tool_use else self.source

  def _render(
    self,
    is_marked: bool,
    messages: Sequence[Message],
    tools: list | None,
    add_generation_prompt: bool,
  ) -> str:
    try:
      template = _compile(self._choose(tools), is_marked)
      # Over the environment's, which says the time.
      fixed = {} if self.now is None else {"strftime_now": self.now.strftime}
      return template.render(
        messages=[_as_read(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        documents=None,
        **fixed,
        **self.special_tokens,
      )
    except jinja2.UndefinedError as error:
      if name := _TOKEN_NAME.search(str(error)):
        raise MissingToken(
          f"chat: the template uses the tokenizer's {name[1]}, got none in "
          f"{_CONFIG}; put {name[1]} into that file, or take another template"
        ) from error
      raise _failed(error) from error
    except Exception as error:  # A template can raise any, as programs do.
      raise _failed(error) from error


def _failed(error: Exception) -> ValueError:
  reason = (str(error).splitlines() or [type(error).__name__])[0]
  return ValueError(
    "chat: the template must make text of the conversation, got "
    f"{reason[:200]}; correct the conversation, or take another template"
  )


def read_special_tokens(folder: Path) -> dict[str, str]:
  """Reads the special tokens of a tokenizer, by their names, as bos_token.

  Args:
    folder: That of tokenizer.json.

  Raises:
    ValueError: a file with them is not what transformers writes.
  """
  config = _read_config(folder / _OLD_CONFIG) | {
    name: token
    for name, token in _read_config(folder / _CONFIG).items()
    if token is not None
  }
  tokens = {
    name: token.get("content") if isinstance(token, dict) else token
    for name, token in config.items()
    if name.endswith("_token")
  }
  return {name: x for name, x in tokens.items() if isinstance(x, str)}


def _as_read(message: Message) -> Message:
  """A message as transformers shows it: no None, reasoning by all its names."""
  message = {key: x for key, x in message.items() if x is not None}
  names = ("reasoning_content", "thinking", "reasoning")
  reasoning = next((message[x] for x in names if x in message), None)
  if reasoning is None:
    return message
  return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _read_config(file: Path) -> dict[str, Any]:
  if not file.is_file():
    return {}
  try:
    config = json.loads(file.read_bytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f"chat: {file} must be JSON, got {error}; give the tokenizer's own"
    ) from error
  if not isinstance(config, dict):
    raise ValueError(
      f"chat: {file} must be a JSON object, got a {type(config).__name__}; "
      "give the tokenizer's own"
    )
  return config


class _Generation(Extension):
  """{% generation %}, which marks an answer for training."""

  tags = {"generation"}
  is_marked = False

  def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    # What the block sets is not seen after it, as in transformers.
    call = self.call_method("_write")
    return nodes.CallBlock(call, [], [], body).set_lineno(line)

  def _write(self, caller: Any) -> str:
    return f"{_BEGIN}{caller()}{_END}" if self.is_marked else caller()


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
  environment.globals["strftime_now"] = _now
  return environment


def _to_json(
  x: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """Jinja's own would escape what HTML does not allow."""
  return json.dumps(
    x,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _now(format: str) -> str:
  return datetime.datetime.now().strftime(format)


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)
