# SPDX-License-Identifier: Apache-2.0
"""From JSON files to rows, each with its file and line.

A file is JSON lines, one row a line, of which one line is held at a time; or a
JSON array of rows, which is held whole.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from train.data.sources import find_files

SUFFIXES = (".json", ".jsonl")
_SPACE = " \t\r\n"


class BadRow(ValueError):
  """A row that cannot be trained on.

  Attributes:
    reason: In a few words, the same for all rows of a kind, to count them.
    remedy: What to do, where it is not the row that must change.
  """

  def __init__(
    self, reason: str, message: str, remedy: str = "correct the row"
  ):
    super().__init__(message)
    self.reason, self.remedy = reason, remedy


@dataclasses.dataclass(frozen=True)
class Row:
  """What a file has at a line.

  Attributes:
    file: Its path.
    line: At which the row begins, from 1.
    value: Of JSON, or what was wrong with it.
  """

  file: Path
  line: int
  value: Any


def find_row_files(paths: Sequence[str]) -> list[Path]:
  """Lists the files that paths, folders or globs name, in their order.

  Args:
    paths: As for `sources.find_files`; of folders, files in .json and .jsonl.

  Raises:
    FileNotFoundError: one of them names none.
    ValueError: there is none, or one is empty.
  """
  if not paths:
    raise ValueError(
      "chat: files of conversations are needed, got none; pass their paths "
      "(of a command: --data)"
    )
  files: dict[Path, None] = {}
  for path in paths:
    try:
      files |= dict.fromkeys(find_files(path, suffixes=SUFFIXES))
    except FileNotFoundError as error:
      raise FileNotFoundError(
        f"chat: {path} must name files of conversations, got none there; give "
        "a file, a glob, or a folder with .json or .jsonl files"
      ) from error
  return list(files)


def read_rows(file: Path) -> Iterator[Row]:
  """Yields the rows of a file; a value that cannot be read is a BadRow.

  Args:
    file: Of JSON lines, or of one JSON array.

  Raises:
    ValueError: an array is damaged, of which nothing more can be read.
  """
  with file.open("rb") as opened:
    first = opened.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()
    opened.seek(0)
    if first.startswith(b"["):
      yield from _read_array(file, opened.read())
      return
    # Lines end where JSON lines say, and not at what Unicode calls a line.
    for number, line in enumerate(opened, 1):
      if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
      if line.strip():
        yield Row(file, number, _parse(line))


def _parse(line: bytes) -> Any:
  try:
    # Without its end, or where it is cut would be the next line's beginning.
    return json.loads(line.decode("utf-8").rstrip("\r\n"))
  except UnicodeDecodeError as error:
    return BadRow(
      "not UTF-8", f"a row must be UTF-8, got byte {error.start} that is not"
    )
  except (ValueError, RecursionError) as error:
    return BadRow("broken JSON", f"a row must be JSON, got {_reason(error)}")


def _reason(error: Exception) -> str:
  if isinstance(error, json.JSONDecodeError):
    return f"{error.msg.lower()} at character {error.colno}"
  return str(error).splitlines()[0][:100]


def _read_array(file: Path, content: bytes) -> Iterator[Row]:
  try:
    text = content.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    line = content.count(b"\n", 0, error.start) + 1
    raise ValueError(
      f"chat: {file} line {line}: the file must be UTF-8, got a byte that is "
      "not; convert the file"
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
      f"chat: {file} line {at}: the file must be a JSON array of rows, got "
      f"{_reason(error)}; correct it, for what follows cannot be read"
    ) from error


def _skip(text: str, place: int) -> int:
  while place < len(text) and text[place] in _SPACE:
    place += 1
  return place
