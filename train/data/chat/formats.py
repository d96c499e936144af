# SPDX-License-Identifier: Apache-2.0
"""Reads conversations from files in the common formats.

A file contains either JSON lines or one JSON array of rows.

| format | keys of a row |
| --- | --- |
| messages | `messages`: a list of `role` and `content` |
| sharegpt | `conversations`: a list of `from` and `value` |
| alpaca | `instruction`, `output`, and optionally `input` |
| prompt | `prompt`, `completion`: plain text that needs no template |

Rows of the first three formats may also have `system` and `tools`. The module
`images` reads the keys `image` and `images`. Other keys are ignored. Roles get
the names that templates use: system, developer, user, assistant and tool.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.data.sources import BadData, find_files
from train.options import first_line

SUFFIXES = (".json", ".jsonl")
_SPACE = " \t\r\n"


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of a file."""

  file: Path
  line: int  # The line where the row begins; lines are counted from 1.
  value: Any  # A JSON value, or a `BadData` if the row cannot be read.


def find_row_files(paths: Sequence[str]) -> list[Path]:
  """Lists the files that `paths` match, each once, in the order of `paths`."""
  if not paths:
    raise ValueError(
      "chat: expected files of conversations, got none; pass paths of such "
      "files (on a command line: --data)"
    )
  files: dict[Path, None] = {}
  for path in paths:
    try:
      files |= dict.fromkeys(find_files(path, suffixes=SUFFIXES))
    except FileNotFoundError as error:
      raise FileNotFoundError(
        f"chat: found no files of conversations at {path}; pass a file, a "
        "glob, or a folder with .json or .jsonl files"
      ) from error
  return list(files)


def read_rows(file: Path) -> Iterator[Row]:
  with file.open("rb") as opened:
    first = opened.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()
    opened.seek(0)
    if first.startswith(b"["):
      yield from _read_array(file, opened.read())
      return
    # Iterate over bytes, because text would also be split at a lone \r.
    for number, line in enumerate(opened, 1):
      if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
      if line.strip():
        yield Row(file, number, _parse(line))


def _parse(line: bytes) -> Any:
  try:
    # If the newline stayed, json would report errors at a row's end in line 2.
    return json.loads(line.decode("utf-8").rstrip("\r\n"))
  except UnicodeDecodeError as error:
    return BadData("not UTF-8", f"byte {error.start} of the row is not UTF-8")
  except (ValueError, RecursionError) as error:
    return BadData("broken JSON", f"the row is not JSON: {_reason(error)}")


def _reason(error: Exception) -> str:
  if isinstance(error, json.JSONDecodeError):
    return f"{error.msg.lower()} at character {error.colno}"
  return first_line(error)


def _read_array(file: Path, content: bytes) -> Iterator[Row]:
  try:
    text = content.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    line = content.count(b"\n", 0, error.start) + 1
    raise ValueError(
      f"chat: {file} line {line}: expected UTF-8, got other bytes; convert the "
      "file to UTF-8"
    ) from error
  decoder = json.JSONDecoder()
  place, line, counted = _skip(text, text.index("[") + 1), 1, 0
  has_more = not text.startswith("]", place)
  try:
    while has_more:
      line += text.count("\n", counted, place)
      counted = place
      value, place = decoder.raw_decode(text, place)
      place = _skip(text, place)
      has_more = text.startswith(",", place)
      if not has_more and not text.startswith("]", place):
        raise json.JSONDecodeError("Expecting ',' or ']'", text, place)
      place = _skip(text, place + 1)
      yield Row(file, line, value)
    if text[place:].strip(_SPACE + "]"):
      raise json.JSONDecodeError("Expecting nothing after ']'", text, place)
  except (ValueError, RecursionError) as error:
    at = error.lineno if isinstance(error, json.JSONDecodeError) else line
    raise ValueError(
      f"chat: {file} line {at}: the file is not a valid JSON array: "
      f"{_reason(error)}; correct the file, because rows after this error "
      "cannot be read"
    ) from error


def _skip(text: str, place: int) -> int:
  while place < len(text) and text[place] in _SPACE:
    place += 1
  return place


_ASSISTANT = ("assistant", "gpt", "chatgpt", "model", "bot", "function_call")
_TOOL = ("tool", "function", "observation", "ipython")
_ROLES = {
  **{"system": "system", "developer": "developer"},
  **dict.fromkeys(("user", "human"), "user"),
  **dict.fromkeys(_ASSISTANT, "assistant"),
  **dict.fromkeys(_TOOL, "tool"),
}
# Messages of these roles may be empty. For example, a tool can find nothing.
_MAY_BE_EMPTY = {"system", "developer", "tool"}


@dataclasses.dataclass(frozen=True)
class Conversation:
  """A conversation that a template turns into text."""

  # Each message has a role, and content or tool calls.
  messages: list[dict[str, Any]]
  tools: list[Any] | None  # JSON schemas of functions.
  trained: tuple[int, ...]  # Indices of the messages to train on.


@dataclasses.dataclass(frozen=True)
class Completion:
  """A prompt, and the completion to train on."""

  prompt: str
  completion: str


def parse(row: Any, format: str) -> Conversation | Completion:
  """Parses a row in this format; raises BadData if the row is invalid."""
  _check(isinstance(row, dict), "wrong format", "expected a JSON object", row)
  keys, read = FORMATS[format]
  if missing := [key for key in keys if key not in row]:
    raise BadData(
      "wrong format",
      f"a row of format {format} needs the keys {' and '.join(missing)}, got "
      f"the keys {_short(list(row))}",
    )
  return read(row)


def recognize(row: Any) -> str:
  """Recognizes the format of a row by its keys."""
  for name, (keys, _) in FORMATS.items():
    if isinstance(row, dict) and all(key in row for key in keys):
      return name
  known = ", ".join("+".join(keys) for keys, _ in FORMATS.values())
  got = list(row) if isinstance(row, dict) else row
  raise BadData(
    "wrong format",
    f"expected the keys of a known format ({known}), got {str(got)[:80]}",
  )


def _read_alpaca(row: Mapping[str, Any]) -> Conversation:
  instruction = _text(row, "instruction")
  given = _text(row, "input") if row.get("input") is not None else ""
  content = f"{instruction}\n\n{given}" if given else instruction
  # Alpaca's own template reads instruction and input as separate keys.
  user = {"role": "user", "content": content}
  user |= {"instruction": instruction, "input": given}
  output = {"role": "assistant", "content": _text(row, "output")}
  return _read_turns([user, output], row)


def _read_prompt(row: Mapping[str, Any]) -> Completion:
  prompt, completion = _text(row, "prompt"), _text(row, "completion")
  if not completion.strip():
    raise BadData("empty turn", "the completion is empty")
  return Completion(prompt, completion)


_Read = Callable[[Mapping[str, Any]], Conversation | Completion]
# The required keys of each format, and the function that reads a row.
FORMATS: dict[str, tuple[tuple[str, ...], _Read]] = {
  "messages": (("messages",), lambda row: _read_turns(row["messages"], row)),
  "sharegpt": (
    ("conversations",),
    lambda row: _read_turns(row["conversations"], row),
  ),
  "alpaca": (("instruction", "output"), _read_alpaca),
  "prompt": (("prompt", "completion"), _read_prompt),
}


def _read_turns(turns: Any, row: Mapping[str, Any]) -> Conversation:
  """Parses turns into a conversation with the row's system text and tools."""
  is_list = isinstance(turns, list) and len(turns) > 0
  _check(is_list, "no turns", "expected a list of turns", turns)
  messages = [_message(turn, i) for i, turn in enumerate(turns, 1)]
  trained = [
    message["role"] == "assistant" and message.pop("weight", 1) != 0
    for message in messages
  ]
  if not any(trained):
    raise BadData(
      "no assistant turn",
      "expected an assistant turn whose weight is not 0, got turns with the "
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
  """Converts a turn to a message; errors show `number`, counted from 1."""
  is_object = isinstance(turn, dict)
  _check(
    is_object, "wrong format", f"expected an object as turn {number}", turn
  )
  given = turn.get("role", turn.get("from"))
  if given is None:
    raise BadData(
      "missing role",
      f"expected a role in turn {number}, got the keys {_short(list(turn))}",
    )
  role = _ROLES.get(given) if isinstance(given, str) else None
  rule = f"expected one of {', '.join(_ROLES)} as the role of turn {number}"
  _check(role is not None, "unknown role", rule, given)
  content = turn.get("content", turn.get("value"))
  message = {k: x for k, x in turn.items() if k not in ("from", "value")}
  message |= {"role": role, "content": _content(content, number)}
  if calls := turn.get("tool_calls"):
    message["tool_calls"] = _calls(calls, number)
  has_text = bool((message["content"] or "").strip())
  if not (has_text or calls or role in _MAY_BE_EMPTY):
    why = ""
    if message["content"] is None:
      why = " (null content requires tool_calls)"
    raise BadData("empty turn", f"turn {number} ({role}) is empty{why}")
  return message


def _content(content: Any, number: int) -> str | None:
  """Returns a turn's text, which OpenAI's format may split into parts."""
  if isinstance(content, list) and all(
    isinstance(part, dict) and isinstance(part.get("text"), str)
    for part in content
  ):
    content = "".join(part["text"] for part in content)
  is_text = isinstance(content, str | None)
  _check(is_text, "not text", f"expected text in turn {number}", content)
  return content


def _calls(calls: Any, number: int) -> list[Any]:
  """Decodes the arguments of tool calls, which OpenAI writes as JSON text."""
  are_calls = isinstance(calls, list) and all(
    isinstance(call, dict) for call in calls
  )
  rule = f"expected a list of objects as tool_calls of turn {number}"
  _check(are_calls, "wrong format", rule, calls)
  out = []
  for call in calls:
    function = call.get("function")
    inner = dict(function) if isinstance(function, dict) else dict(call)
    if isinstance(inner.get("arguments"), str):
      inner["arguments"] = _json(inner["arguments"], "arguments of tool_calls")
    out.append({**call, "function": inner} if function else inner)
  return out


def _tools(tools: Any) -> list[Any] | None:
  """Returns the JSON schemas of functions; decodes them if they are text."""
  if isinstance(tools, str) and tools.strip():
    tools = _json(tools, "tools")
  if tools in (None, "", [], {}):
    return None
  _check(
    isinstance(tools, list), "wrong format", "expected a list of tools", tools
  )
  return tools


def _json(text: str, name: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise BadData(
      "wrong format", f"expected JSON as {name}, got {_short(text)}"
    ) from error


def _text(row: Mapping[str, Any], key: str) -> str:
  _check(
    isinstance(row[key], str), "not text", f"expected text as {key}", row[key]
  )
  return row[key]


def _check(is_good: bool, reason: str, rule: str, got: Any) -> None:
  if not is_good:
    raise BadData(reason, f"{rule}, got {_short(got)}")


def _short(value: Any) -> str:
  text = json.dumps(value, ensure_ascii=True)
  return text if len(text) < 80 else text[:76] + " ..."
