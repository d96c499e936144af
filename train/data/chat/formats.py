# SPDX-License-Identifier: Apache-2.0
"""From a row to a conversation, whichever way the row was written.

| format | keys |
| --- | --- |
| messages | `messages` of `role` and `content`, `tools`: OpenAI, Hugging Face |
| sharegpt | `conversations` of `from` and `value`, `system`: also ToolBench |
| alpaca | `instruction`, `input`, `output` |
| prompt | `prompt`, `completion`: plain text, which no template changes |

Other keys are left aside. Roles become those that templates know: system, user,
assistant and tool (developer stays itself).
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from train.data.chat.rows import BadRow

_ROLES = {
  **{name: name for name in ("system", "developer", "user", "assistant")},
  **{name: "user" for name in ("human",)},
  **{name: "assistant" for name in ("gpt", "chatgpt", "model", "bot")},
  "function_call": "assistant",
  **{name: "tool" for name in ("tool", "function", "observation", "ipython")},
}
# What these say may be nothing: a tool can find none.
_MAY_BE_EMPTY = {"system", "developer", "tool"}


@dataclasses.dataclass(frozen=True)
class Conversation:
  """What a template makes text of.

  Attributes:
    messages: Each with a role, and content or tool calls.
    tools: JSON schemas of functions, or None.
    trained: Which messages are the assistant's and to be learned.
  """

  messages: list[dict[str, Any]]
  tools: list[Any] | None
  trained: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Completion:
  """Plain text to go on from, and what is to follow it."""

  prompt: str
  completion: str


def parse(row: Any, format: str) -> Conversation | Completion:
  """Makes a conversation of a row.

  Args:
    row: A value of JSON.
    format: Of `FORMATS`.

  Raises:
    BadRow: it is not of that format, or has nothing to learn.
  """
  if not isinstance(row, dict):
    raise BadRow("wrong format", f"a row must be an object, got {_short(row)}")
  keys, read = FORMATS[format]
  if missing := [key for key in keys if key not in row]:
    raise BadRow(
      "wrong format",
      f"a row of format {format} must have {' and '.join(missing)}, got the "
      f"keys {_short(list(row))}",
    )
  return read(row)


def recognize(row: Any) -> str | None:
  """Finds a row's format by its keys; None where it has those of none."""
  for name, (keys, _) in FORMATS.items():
    if isinstance(row, dict) and all(key in row for key in keys):
      return name
  return None


def _read_messages(row: Mapping[str, Any]) -> Conversation:
  return _conversation(row["messages"], row)


def _read_sharegpt(row: Mapping[str, Any]) -> Conversation:
  return _conversation(row["conversations"], row)


def _read_alpaca(row: Mapping[str, Any]) -> Conversation:
  instruction = _text(row, "instruction")
  given = _text(row, "input") if row.get("input") is not None else ""
  content = f"{instruction}\n\n{given}" if given else instruction
  # Alpaca's own template wants the two apart.
  user = {"role": "user", "content": content}
  user |= {"instruction": instruction, "input": given}
  output = {"role": "assistant", "content": _text(row, "output")}
  return _conversation([user, output], row)


def _read_prompt(row: Mapping[str, Any]) -> Completion:
  prompt, completion = _text(row, "prompt"), _text(row, "completion")
  if not completion.strip():
    raise BadRow("empty turn", "completion must not be empty, got no text")
  return Completion(prompt, completion)


FORMATS: dict[
  str,
  tuple[
    tuple[str, ...], Callable[[Mapping[str, Any]], Conversation | Completion]
  ],
] = {
  "messages": (("messages",), _read_messages),
  "sharegpt": (("conversations",), _read_sharegpt),
  "alpaca": (("instruction", "output"), _read_alpaca),
  "prompt": (("prompt", "completion"), _read_prompt),
}


def _conversation(turns: Any, row: Mapping[str, Any]) -> Conversation:
  """Checks the turns, and adds what the row says about all of them."""
  if not isinstance(turns, list) or not turns:
    raise BadRow(
      "no turns", f"a conversation must be a list of turns, got {_short(turns)}"
    )
  messages = [_message(turn, i) for i, turn in enumerate(turns, 1)]
  trained = [
    message["role"] == "assistant" and message.pop("weight", 1) != 0
    for message in messages
  ]
  if not any(trained):
    raise BadRow(
      "no assistant turn",
      "a conversation must have a turn of the assistant to learn, got the "
      f"roles {_short([x['role'] for x in messages])}",
    )
  system = row.get("system")
  if isinstance(system, str) and system and messages[0]["role"] != "system":
    messages.insert(0, {"role": "system", "content": system})
    trained.insert(0, False)
  return Conversation(
    messages,
    _tools(row.get("tools")),
    tuple(i for i, is_trained in enumerate(trained) if is_trained),
  )


def _message(turn: Any, number: int) -> dict[str, Any]:
  """Checks the turn with this number, from 1."""
  if not isinstance(turn, dict):
    raise BadRow(
      "wrong format", f"turn {number} must be an object, got {_short(turn)}"
    )
  given = turn.get("role", turn.get("from"))
  if given is None:
    raise BadRow(
      "missing role",
      f"turn {number} must have a role, got the keys {_short(list(turn))}",
    )
  role = _ROLES.get(given) if isinstance(given, str) else None
  if role is None:
    raise BadRow(
      "unknown role",
      f"the role of turn {number} must be one of {', '.join(_ROLES)}, got "
      f"{_short(given)}",
    )
  content = turn.get("content", turn.get("value"))
  message = {k: x for k, x in turn.items() if k not in ("from", "value")}
  message |= {"role": role, "content": _content(content, number)}
  if calls := turn.get("tool_calls"):
    message["tool_calls"] = _calls(calls, number)
  has_text = bool((message["content"] or "").strip())
  if not (has_text or calls or role in _MAY_BE_EMPTY):
    said = "must say something"
    if message["content"] is None:
      said = "must have content, which is null beside tool_calls alone"
    raise BadRow(
      "empty turn", f"turn {number} {said}, got an empty turn of {role}"
    )
  return message


def _content(content: Any, number: int) -> str | None:
  """The text of a turn, which OpenAI also writes in parts."""
  if isinstance(content, list) and all(
    isinstance(part, dict) and isinstance(part.get("text"), str)
    for part in content
  ):
    content = "".join(part["text"] for part in content)
  if content is not None and not isinstance(content, str):
    raise BadRow(
      "not text", f"turn {number} must be text, got {_short(content)}"
    )
  return content


def _calls(calls: Any, number: int) -> list[Any]:
  """Tool calls whose arguments are objects, as templates want them.

  OpenAI writes them as text in JSON.
  """
  if not isinstance(calls, list) or not all(isinstance(x, dict) for x in calls):
    raise BadRow(
      "wrong format",
      f"tool_calls of turn {number} must be a list of objects, got "
      f"{_short(calls)}",
    )
  out = []
  for call in calls:
    function = call.get("function")
    inner = dict(function) if isinstance(function, dict) else dict(call)
    if isinstance(inner.get("arguments"), str):
      inner["arguments"] = _json(inner["arguments"], "arguments of tool_calls")
    out.append({**call, "function": inner} if function else inner)
  return out


def _tools(tools: Any) -> list[Any] | None:
  """Schemas of functions, which some write as text in JSON."""
  if isinstance(tools, str) and tools.strip():
    tools = _json(tools, "tools")
  if tools in (None, "", [], {}):
    return None
  if not isinstance(tools, list):
    raise BadRow("wrong format", f"tools must be a list, got {_short(tools)}")
  return tools


def _json(text: str, name: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise BadRow(
      "wrong format", f"{name} must be JSON, got {_short(text)}"
    ) from error


def _text(row: Mapping[str, Any], key: str) -> str:
  if not isinstance(row[key], str):
    raise BadRow("not text", f"{key} must be text, got {_short(row[key])}")
  return row[key]


def _short(value: Any) -> str:
  text = json.dumps(value, ensure_ascii=True)
  return text if len(text) < 80 else text[:76] + " ..."
