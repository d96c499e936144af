# SPDX-License-Identifier: Apache-2.0
"""Reads and renders chat templates as transformers does.

A template comes from chat_template.jinja, from `chat_template` in
tokenizer_config.json, or by its name from `PUBLISHED`. A template can use what
transformers provides: messages, tools, special tokens by name,
`raise_exception` and `strftime_now`.
"""

import dataclasses
import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from coat_jax.models.hf.files import read_json
from train.data.chat.rendering import BEGIN, END, render
from train.options import first_line

# Published templates of known models, for tokenizers without a template:
#   alpaca  the prompts of Stanford Alpaca's train.py, for one turn
#   chatml  OpenAI's format, as in Qwen 1.5 and many others
#   llama2  meta-llama/Llama-2-7b-chat-hf, tokenizer_config.json
#   llama3  meta-llama/Meta-Llama-3-8B-Instruct, tokenizer_config.json
#   vicuna  `vicuna_v1.1` of FastChat's conversation.py
PUBLISHED = {
  file.stem: file.read_text("utf-8").removesuffix("\n")
  for file in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}

_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_OLD_CONFIG = "special_tokens_map.json"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MARK = re.compile(f"{re.escape(BEGIN)}|{re.escape(END)}")
_TOKEN_NAME = re.compile(r"^'(\w+_token)' is undefined")

Message = dict[str, Any]


class TemplateFault(ValueError):
  """Raised for a template that cannot render any conversation."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
  """Turns a conversation into text."""

  source: str  # A Jinja template.
  special_tokens: dict[str, str]  # Maps names such as bos_token to tokens.
  # The template for conversations with tools; if None, `source` is used.
  tool_use: str | None = None
  # The date that templates insert. If None, this is the current time, as in
  # transformers. Set `now` if rendered texts must not change from day to day.
  now: datetime.datetime | None = None

  @classmethod
  def load(
    cls, folder: str | Path, name: str | None = None
  ) -> "ChatTemplate | None":
    """Loads the published template `name`, or the template in a folder.

    The special tokens always come from the folder. Returns None if `name` is
    None and the folder contains no template.
    """
    folder = Path(folder).expanduser()
    if name is not None:
      if name not in PUBLISHED:
        raise ValueError(
          f"chat: a template is one of {', '.join(PUBLISHED)}, got {name!r}; "
          "choose one of these, or leave the template out to use the "
          "tokenizer's own"
        )
      return cls(PUBLISHED[name], read_special_tokens(folder))
    source = read_if_present(folder / _CONFIG).get("chat_template")
    named = {}
    if isinstance(source, list):  # Several templates, each with a name.
      several = [x for x in source if isinstance(x, dict)]
      named = {x.get("name"): x.get("template") for x in several}
      source = named.get("default")
    if (file := folder / _FILE).is_file():
      source = file.read_text("utf-8")
    if not isinstance(source, str):
      return None
    return cls(source, read_special_tokens(folder), named.get("tool_use"))

  def has_generation(self, tools: list | None) -> bool:
    """Returns whether {% generation %} marks the assistant's text."""
    return bool(_GENERATION.search(self._choose(tools)))

  def generated(
    self, messages: Sequence[Message], tools: list | None
  ) -> list[tuple[int, int]]:
    """Finds the spans of text that {% generation %} blocks write."""
    marked = self.render(messages, tools=tools, is_marked=True)
    spans, begun, removed = [], [], 0
    for mark in _MARK.finditer(marked):
      place = mark.start() - removed
      removed += len(mark[0])
      if mark[0] == BEGIN:
        begun.append(place)
      elif begun:
        spans.append((begun.pop(), place))
    text = self.render(messages, tools=tools)
    if begun or _MARK.search(text) or _MARK.sub("", marked) != text:
      raise ValueError(
        "chat: the template must write the text of each {% generation %} block "
        "unchanged, got changed text, or text with the reserved character "
        "U+FDD0; correct the template, or remove U+FDD0"
      )
    return sorted(span for span in spans if span[0] < span[1])

  def _choose(self, tools: list | None) -> str:
    return self.tool_use if tools and self.tool_use else self.source

  def render(
    self,
    messages: Sequence[Message],
    *,
    tools: list | None = None,
    add_generation_prompt: bool = False,
    is_marked: bool = False,
  ) -> str:
    """Renders messages; `is_marked` puts marks around generation blocks."""
    variables = {
      "messages": [_as_shown(message) for message in messages],
      "add_generation_prompt": add_generation_prompt,
      "tools": tools,
      "documents": None,
      **self.special_tokens,
    }
    now = self.now or datetime.datetime.now()
    source = self._choose(tools)
    try:
      return render(source, variables, is_marked=is_marked, now=now)
    except jinja2.UndefinedError as error:
      if name := _TOKEN_NAME.search(str(error)):
        raise TemplateFault(
          f"chat: the template uses the tokenizer's {name[1]}, got none in "
          f"{_CONFIG}; add {name[1]} to that file, or use another template"
        ) from error
      raise _failed(error) from error
    except jinja2.TemplateSyntaxError as error:
      raise TemplateFault(
        f"chat: the template must be valid Jinja, got {first_line(error)} in "
        f"line {error.lineno}; correct the template"
      ) from error
    except Exception as error:  # A template can raise anything.
      raise _failed(error) from error


def _failed(error: Exception) -> ValueError:
  return ValueError(
    f"chat: the template failed: {first_line(error)}; correct the "
    "conversation, or use another template"
  )


def read_special_tokens(folder: Path) -> dict[str, str]:
  """Reads a tokenizer's special tokens by name, such as bos_token."""
  config = read_if_present(folder / _OLD_CONFIG) | {
    name: token
    for name, token in read_if_present(folder / _CONFIG).items()
    if token is not None
  }
  tokens = {
    name: token.get("content") if isinstance(token, dict) else token
    for name, token in config.items()
    if name.endswith("_token")
  }
  return {name: x for name, x in tokens.items() if isinstance(x, str)}


def _as_shown(message: Message) -> Message:
  """Drops None values; puts reasoning under both names that templates read."""
  message = {key: x for key, x in message.items() if x is not None}
  names = ("reasoning_content", "thinking", "reasoning")
  reasoning = next((message[x] for x in names if x in message), None)
  if reasoning is None:
    return message
  return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def read_if_present(file: Path) -> dict[str, Any]:
  """Reads a JSON object; {} if there is no such file."""
  return read_json(file) if file.is_file() else {}
