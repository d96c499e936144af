# SPDX-License-Identifier: Apache-2.0
"""Chat templates, as transformers keeps them beside a tokenizer.

chat_template.jinja, or `chat_template` in tokenizer_config.json. A template is
a program that came with a tokenizer, so it runs in Jinja's sandbox and changes
nothing. It has what transformers gives it: messages, the special tokens by
their names, `raise_exception` and `strftime_now`.
"""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
  """What makes a prompt of what a user says.

  Attributes:
    source: In Jinja.
    special_tokens: By their names, as bos_token.
  """

  source: str
  special_tokens: dict[str, str]

  @classmethod
  def load(cls, folder: Path) -> "ChatTemplate | None":
    """Reads the template in a folder; None where there is none.

    Args:
      folder: That of tokenizer.json.

    Raises:
      ValueError: tokenizer_config.json is not what transformers writes.
    """
    config = _read_config(folder / _CONFIG)
    special = {
      name: token["content"] if isinstance(token, dict) else token
      for name, token in config.items()
      if name.endswith("_token")
      and isinstance(token, str | dict)
      and (isinstance(token, str) or isinstance(token.get("content"), str))
    }
    source = config.get("chat_template")
    if isinstance(source, list):  # Several, by names.
      named = [x for x in source if isinstance(x, dict)]
      found = [x.get("template") for x in named if x.get("name") == "default"]
      source = next(iter(found), None)
    if (file := folder / _FILE).is_file():
      source = file.read_text("utf-8")
    return cls(source, special) if isinstance(source, str) else None

  def render(self, text: str) -> str:
    """Returns the prompt of a user's first message.

    Args:
      text: The message.

    Raises:
      ValueError: the template is wrong, or refuses it.
    """
    messages = [{"role": "user", "content": text}]
    try:
      template = _environment().from_string(self.source)
      return template.render(
        messages=messages,
        add_generation_prompt=True,
        tools=None,
        documents=None,
        **self.special_tokens,
      )
    except Exception as error:  # A template can raise any, as programs do.
      reason = (str(error).splitlines() or [type(error).__name__])[0]
      raise ValueError(
        "chat: the tokenizer's template must make a prompt of one message, got "
        f"{reason[:200]}; leave --chat out, or correct the template"
      ) from error


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
  """{% generation %}, which marks an answer for training: here, its text."""

  tags = {"generation"}

  def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[loopcontrols, _Generation],
  )
  environment.filters["tojson"] = lambda x, indent=None: json.dumps(
    x, ensure_ascii=False, indent=indent
  )
  environment.globals["raise_exception"] = _raise
  environment.globals["strftime_now"] = datetime.datetime.now().strftime
  return environment


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)
