# SPDX-License-Identifier: Apache-2.0
"""Reads text files into one flat array of token ids in memory.

A tokenizer computes the ids. Without a tokenizer, each byte is an id. Text is
tokenized each time a run starts. If a corpus is larger than a few gigabytes,
tokenize it into flat files once, before training: see `token_files`.
"""

import glob
import itertools
import logging
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from train.data.tokenizer import Tokenizer
from train.options import read_path

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class BadData(ValueError):
  """Raised for an unusable row or image; `reason` names the kind of fault."""

  def __init__(
    self, reason: str, message: str, remedy: str = "correct the row"
  ):
    super().__init__(message)
    self.reason, self.remedy = reason, remedy


def find_files(path: str, *, suffixes: tuple[str, ...] = ()) -> list[Path]:
  """Lists the files of `path`, sorted; raises FileNotFoundError if none.

  `path` is a file, a folder or a pattern. A folder is searched recursively for
  files with these suffixes, or for all files if `suffixes` is empty. Hidden
  files and folders are skipped.
  """
  root = read_path("data.path", path)
  if root.is_file():
    return [root]
  if root.is_dir():
    found = [
      file
      for file in root.rglob("*")
      if not any(name.startswith(".") for name in file.relative_to(root).parts)
      and (not suffixes or file.suffix in suffixes)
    ]
  else:
    found = [Path(name) for name in glob.glob(str(root), recursive=True)]
  found = sorted(file for file in found if file.is_file())
  if not found and not root.exists() and not glob.has_magic(path):
    raise FileNotFoundError(
      f"data: the path must exist, got {path}; pass an existing file or "
      "folder, or a glob"
    )
  if not found:
    kind = ""
    if root.is_dir() and suffixes:
      kind = f" that ends in {' or '.join(suffixes)}"
    raise FileNotFoundError(
      f"data: {path} must match at least one file{kind}, got none; check the "
      "folder or the glob"
    )
  return found


def documents(path: str | None) -> Iterator[tuple[str, bytes]]:
  """Yields (name, content) of each text file, sorted by path.

  If `path` is None, the files are the source code of Python's standard library.
  Files with a zero byte near their start are skipped with a warning.
  """
  root = Path(sysconfig.get_paths()["stdlib"])
  if path is None:
    candidates = [
      file
      for file in sorted(root.rglob("*.py"))
      if not _NOT_STDLIB & set(file.relative_to(root).parts)
    ]
  else:
    candidates = find_files(path)
  skipped = []
  for file in candidates:
    with file.open("rb") as opened:
      content = opened.read(8192)
      if b"\0" in content:
        skipped.append(file)
        continue
      content += opened.read()
    yield str(file), content
  found = len(candidates) - len(skipped)
  if found and skipped:
    logging.getLogger(__name__).warning(
      "data: skipped %d of %d files, which are not text in UTF-8: %s",
      *(len(skipped), len(candidates), ", ".join(map(str, skipped[:3]))),
    )
  if not found and len(candidates) == 1:
    raise ValueError(
      f"load_tokens: {candidates[0]} must be text, got a binary file; pass "
      "dtype uint16 or uint32 if it holds token ids, or convert it to UTF-8"
    )
  if not found:
    raise FileNotFoundError(
      "load_tokens: at least one text file is needed, got none among the "
      f"{len(candidates)} files in {path or root}; pass a path to text files"
    )


def check_ids(ids: np.ndarray, name: str, vocab_size: int) -> None:
  """Checks that ids are below the vocabulary size; errors show `name`."""
  largest = int(ids.max(initial=0))
  if largest >= vocab_size:
    raise ValueError(
      f"data: token ids must be below the vocabulary size {vocab_size}, "
      f"got {largest} in {name}; use this model's tokenizer or a model with "
      "a larger vocabulary; if the file contains token ids, check --data.dtype"
    )


def read_bytes(path: str | None, vocab_size: int) -> np.ndarray:
  """Reads text files; each byte becomes one id."""
  contents = []
  for name, content in documents(path):
    check_ids(np.frombuffer(content, np.uint8), name, vocab_size)
    contents.append(content)
  return np.frombuffer(b"".join(contents), np.uint8)


def read_tokenized(
  path: str | None, tokenizer_path: str, vocab_size: int
) -> np.ndarray:
  """Tokenizes text files, and adds an end-of-text id after each file.

  No id is added if the tokenizer has no end-of-text token. Bytes that are not
  UTF-8 become U+FFFD.
  """
  tokenizer = Tokenizer(tokenizer_path)
  end_of_text = tokenizer.end_of_text
  arrays = [np.empty(0, np.uint32)]
  with tqdm(desc="tokenizing", unit="char", unit_scale=True, delay=2) as bar:
    pieces = (
      (name, piece, is_last)
      for name, content in documents(path)
      for piece, _, is_last in tokenizer.split(
        content.decode("utf-8", errors="replace")
      )
    )
    for batch in itertools.batched(pieces, 64):
      found = tokenizer.encode([piece for _, piece, _ in batch])
      for (name, piece, is_last), ids in zip(batch, found, strict=True):
        if is_last and end_of_text is not None:
          ids.append(end_of_text)
        arrays.append(np.asarray(ids, np.uint32))
        check_ids(arrays[-1], name, vocab_size)
        bar.update(len(piece))
  tokens = np.concatenate(arrays)
  return tokens.astype(np.uint16) if vocab_size <= 1 << 16 else tokens
