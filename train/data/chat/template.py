# SPDX-License-Identifier: Apache-2.0
"""Chat templates, as transformers keeps them beside a tokenizer.

chat_template.jinja, or `chat_template` in tokenizer_config.json, or one of
`PUBLISHED`. A template is a program that came with a tokenizer, so it runs in
Jinja's sandbox and changes nothing, in a process of its own, which ends it
where it does not end by itself (`rendering`). It has what transformers gives
it: messages, tools, the special tokens by their names, `raise_exception` and
`strftime_now`.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.data.chat import rendering
from train.data.chat.sandbox import BEGIN, END

# Templates of known models, for tokenizers without one, with the text and the
# spaces that the models were trained with:
#   llama3  meta-llama/Meta-Llama-3-8B-Instruct, tokenizer_config.json
#   chatml  OpenAI's format as Qwen 1.5 and many others have it
#   llama2  meta-llama/Llama-2-7b-chat-hf, tokenizer_config.json
#   alpaca  the prompts of Stanford Alpaca's train.py, for one turn
#   vicuna  `vicuna_v1.1` of FastChat's conversation.py
_LLAMA3 = (
  "{% set loop_messages = messages %}{% for message in loop_messages %}"
  "{% set content = '<|start_header_id|>' + message['role'] + "
  "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
  "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
  "{{ content }}{% endfor %}{% if add_generation_prompt %}"
  "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

_CHATML = (
  "{% for message in messages %}"
  "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
  "'<|im_end|>' + '\n'}}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_LLAMA2 = (
  "{% if messages[0]['role'] == 'system' %}"
  "{% set loop_messages = messages[1:] %}"
  "{% set system_message = messages[0]['content'] %}"
  "{% else %}{% set loop_messages = messages %}"
  "{% set system_message = false %}{% endif %}"
  "{% for message in loop_messages %}"
  "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
  "{{ raise_exception('Conversation roles must alternate "
  "user/assistant/user/assistant/...') }}{% endif %}"
  "{% if loop.index0 == 0 and system_message != false %}"
  "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + "
  "message['content'] %}"
  "{% else %}{% set content = message['content'] %}{% endif %}"
  "{% if message['role'] == 'user' %}"
  "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
  "{% elif message['role'] == 'assistant' %}"
  "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# `input` is what a row in Alpaca's format has beside its instruction.
_ALPACA = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 == 0) or loop.index0 > 1 %}
{{- raise_exception('Alpaca has one instruction and one response') }}
{%- elif message.role == 'user' and message.input %}
{{- bos_token + 'Below is an instruction that describes a task, paired with an '
'input that provides further context. Write a response that appropriately '
'completes the request.\\n\\n### Instruction:\\n' + message.instruction +
'\\n\\n### Input:\\n' + message.input + '\\n\\n### Response:' }}
{%- elif message.role == 'user' %}
{{- bos_token + 'Below is an instruction that describes a task. Write a '
'response that appropriately completes the request.\\n\\n### Instruction:\\n' +
message.content + '\\n\\n### Response:' }}
{%- else %}
{{- message.content + eos_token }}
{%- endif %}
{%- endfor %}"""

_VICUNA = """\
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}
{%- set turns = messages[1:] %}
{%- else %}
{%- set system = "A chat between a curious user and an artificial intelligence \
assistant. The assistant gives helpful, detailed, and polite answers to the \
user's questions." %}
{%- set turns = messages %}
{%- endif %}
{{- bos_token + system + ' ' }}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Turns of user and assistant must alternate') }}
{%- elif message.role == 'user' %}
{{- 'USER: ' + message.content + ' ' }}
{%- else %}
{{- 'ASSISTANT: ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'ASSISTANT:' }}
{%- endif %}"""

PUBLISHED = {
  "llama3": _LLAMA3,
  "chatml": _CHATML,
  "llama2": _LLAMA2,
  "alpaca": _ALPACA,
  "vicuna": _VICUNA,
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
  # The template for conversations with tools; None for the same one.
  tool_use: str | None = None
  # The date that templates write; None for the time of rendering, as in
  # transformers. Fix it where text must stay the same.
  now: datetime.datetime | None = None

  @classmethod
  def load(cls, folder: Path) -> "ChatTemplate | None":
    """Reads the template in a folder; None where there is none."""
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
    """Makes a template of those that came with known models."""
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
    """Returns the text of a conversation."""
    return self._render(False, messages, tools, add_generation_prompt)

  def has_generation(self, tools: list | None) -> bool:
    """Whether {% generation %} marks what the assistant writes."""
    return bool(_GENERATION.search(self._choose(tools)))

  def generated(
    self, messages: Sequence[Message], tools: list | None
  ) -> list[tuple[int, int]]:
    """Finds what the template's {% generation %} blocks hold."""
    marked = self._render(True, messages, tools, False)
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
    variables = {
      "messages": [_as_read(message) for message in messages],
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
        f"{_CONFIG}; put {name[1]} into that file, or take another template"
      )
    if "text" not in answer:
      raise _failed(*answer.values())
    return answer["text"]


def _failed(message: str) -> ValueError:
  reason = (message.splitlines() or [message])[0]
  return ValueError(
    "chat: the template must make text of the conversation, got "
    f"{reason[:200]}; correct the conversation, or take another template"
  )


def read_special_tokens(folder: Path) -> dict[str, str]:
  """Reads the special tokens of a tokenizer, by their names, as bos_token."""
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
