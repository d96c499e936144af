# SPDX-License-Identifier: Apache-2.0
"""Chat templates as transformers stores them with a tokenizer.

A template comes from chat_template.jinja, from `chat_template` in
tokenizer_config.json, or by its name from `PUBLISHED`. It is a program that
came with a tokenizer, so it runs in Jinja's sandbox, in a process of its own
that is killed if the template does not end (`rendering`). It gets what
transformers provides: messages, tools, the special tokens by name,
`raise_exception` and `strftime_now`.
"""

import dataclasses
import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coat_jax.models.hf.files import read_json
from train.data.chat import rendering
from train.data.chat.sandbox import BEGIN, END
from train.options import first_line

# Templates of known models, as published, for tokenizers that have none:
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


class MissingToken(ValueError):
  """A template uses a special token that the tokenizer does not have."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
  """Turns a conversation into text."""

  source: str  # A Jinja template.
  special_tokens: dict[str, str]  # By name, such as bos_token.
  # The template for conversations with tools; None uses `source`.
  tool_use: str | None = None
  # The date that templates write; None uses the current time, as transformers
  # does. Set it if the text must stay the same.
  now: datetime.datetime | None = None

  @classmethod
  def load(
    cls, folder: str | Path, name: str | None = None
  ) -> "ChatTemplate | None":
    """Reads the template of a tokenizer's folder, or uses a published one.

    Returns None if no name is given and the folder has no template.
    """
    folder = Path(folder).expanduser()
    if name is not None:
      if name not in PUBLISHED:
        raise ValueError(
          f"chat: a template is one of {', '.join(PUBLISHED)}, got {name!r}; "
          "choose one, or leave it out to use the tokenizer's own"
        )
      return cls(PUBLISHED[name], read_special_tokens(folder))
    source = _read_config(folder / _CONFIG).get("chat_template")
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
    """Returns whether {% generation %} marks what the assistant writes."""
    return bool(_GENERATION.search(self._choose(tools)))

  def generated(
    self, messages: Sequence[Message], tools: list | None
  ) -> list[tuple[int, int]]:
    """Finds the characters inside the template's {% generation %} blocks."""
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
        "chat: the template changes the text of its {% generation %} blocks "
        "after they are rendered; correct the template"
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
    """Returns the text; `is_marked` surrounds {% generation %} with marks."""
    variables = {
      "messages": [_as_shown(message) for message in messages],
      "add_generation_prompt": add_generation_prompt,
      "tools": tools,
      "documents": None,
      **self.special_tokens,
    }
    try:
      answer = rendering.ask(
        self._choose(tools),
        is_marked=is_marked,
        now=None if self.now is None else self.now.isoformat(),
        variables=variables,
      )
    except rendering.TemplateLimit:
      raise
    except (TypeError, ValueError, RecursionError) as error:
      raise _failed(str(error)) from error
    if name := _TOKEN_NAME.search(answer.get("undefined", "")):
      raise MissingToken(
        f"chat: the template uses the tokenizer's {name[1]}, got none in "
        f"{_CONFIG}; add {name[1]} to that file, or use another template"
      )
    if "text" not in answer:
      raise _failed(*answer.values())
    return answer["text"]


def _failed(message: str) -> ValueError:
  return ValueError(
    f"chat: the template failed: {first_line(message)}; correct the "
    "conversation, or use another template"
  )


def read_special_tokens(folder: Path) -> dict[str, str]:
  """Reads a tokenizer's special tokens by name, such as bos_token."""
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


def _as_shown(message: Message) -> Message:
  """Drops None; stores reasoning under all its keys, as transformers does."""
  message = {key: x for key, x in message.items() if x is not None}
  names = ("reasoning_content", "thinking", "reasoning")
  reasoning = next((message[x] for x in names if x in message), None)
  if reasoning is None:
    return message
  return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _read_config(file: Path) -> dict[str, Any]:
  return read_json(file) if file.is_file() else {}
