# SPDX-License-Identifier: Apache-2.0
"""Reads texts from files like those of WikiText, C4 and the Pile.

In a file of JSON lines, the `text` of each line is a document. Any other text
file is one document. Both kinds of files may be compressed as .gz, or as .zst
if the module zstandard is installed.
"""

import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from train.data.sources import find_files

_LINES = (".jsonl", ".json", ".ndjson")
_COMPRESSED = (".gz", ".zst")
_COLUMNS = (".parquet", ".arrow", ".feather")


def read_documents(path: str) -> Iterator[str]:
  """Yields the documents in the files that a path matches."""
  for file in find_files(path):
    yield from _documents_of(file)


def _documents_of(file: Path) -> Iterator[str]:
  ends = [end.lower() for end in file.suffixes]
  compressed = ends.pop() if ends and ends[-1] in _COMPRESSED else ""
  end = ends[-1] if ends else ""
  if end in _COLUMNS:
    raise ValueError(
      f"evaluate: --data must be text or JSON lines, got {file}, which is "
      f"{end[1:]}; convert its texts to JSON lines with the key `text`"
    )
  opened, damages = _opened(file, compressed)
  try:
    with opened:
      if end in _LINES:
        yield from _texts(file, opened)
      else:
        yield _decoded(file, opened.read())
  except damages as error:
    raise ValueError(
      f"evaluate: {file} must be a complete compressed file, got the error "
      f"{error}; copy the file again"
    ) from error


def _opened(
  file: Path, compressed: str
) -> tuple[Any, tuple[type[Exception], ...]]:
  """Opens a file; returns it with the errors that a damaged file raises."""
  if compressed == ".gz":
    return gzip.open(file), (EOFError, zlib.error, gzip.BadGzipFile)
  if compressed == ".zst":
    try:
      zstandard: Any = importlib.import_module("zstandard")
    except ModuleNotFoundError as error:
      raise ValueError(
        f"evaluate: {file} needs the module zstandard, which is not installed; "
        "run pip install zstandard, or decompress the file"
      ) from error
    # Parallel compressors write many frames into one file.
    reader = zstandard.ZstdDecompressor().stream_reader(
      file.open("rb"), read_across_frames=True
    )
    return io.BufferedReader(reader), (zstandard.ZstdError,)
  return file.open("rb"), ()


def _decoded(file: Path, content: bytes) -> str:
  try:
    if b"\0" in content[:8192]:
      raise ValueError("a zero byte")
    return content.decode()
  except ValueError as error:
    raise ValueError(
      f"evaluate: {file} must be text in UTF-8, got {error}; convert the file, "
      "or leave it out"
    ) from error


def _texts(file: Path, opened: IO[bytes]) -> Iterator[str]:
  """Yields `text` from each line of a JSON lines file; skips empty lines."""
  for number, line in enumerate(opened, 1):
    if not line.strip():
      continue
    try:
      found = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise _bad_line(file, number, str(error)) from error
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
      got = f"a {type(found).__name__}"
      if isinstance(found, dict):
        got = f"the keys {', '.join(found)[:60]}"
      raise _bad_line(file, number, got)
    # A JSON string can contain half of a surrogate pair, which becomes U+FFFD.
    yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _bad_line(file: Path, number: int, got: str) -> ValueError:
  return ValueError(
    f"evaluate: {file}, line {number} must be a JSON object with a string "
    f"`text`, got {got}; correct the line, or rename a plain-text file to .txt"
  )
