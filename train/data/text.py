# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes text the way the data of a run was encoded.

`open_text` returns a `ByteText`, whose ids are bytes, or a `TokenizerText`,
which reads a `tokenizers` JSON file. `FolderText` reads a Hugging Face folder:

tokenizer.json          the tokenizer
tokenizer_config.json   the special tokens, and whether texts begin with one
generation_config.json  the tokens that end a text; config.json names them too
chat_template.jinja     see `data.chat`
"""

import abc
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from coat_jax.models.hf.files import read_json
from coat_jax.models.hf.keys import CONFIG
from train.data.chat.documents import Documents
from train.data.chat.template import ChatTemplate, read_special_tokens
from train.data.tokenizer import Tokenizer
from train.data.tokens import DataConfig

_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
_CONFIGS = (GENERATION, CONFIG)


class Text(abc.ABC):
  """Encodes prompts and decodes generated tokens."""

  first_tokens: tuple[int, ...] = ()  # Tokens that texts begin with.
  stop_tokens: tuple[int, ...] = ()  # Tokens that end a text.
  # The token to put before a text that has no context; None if unknown.
  prefix_token: int | None = None
  chat: ChatTemplate | None = None

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Returns the tokens of a text, without `first_tokens`."""

  @abc.abstractmethod
  def decode(self, tokens: list[int]) -> str:
    """Returns the tokens' text; bytes that are not UTF-8 become U+FFFD."""

  def encode_from_start(self, text: str) -> list[int]:
    """Encodes a text and adds `first_tokens` unless it begins with them."""
    first, tokens = list(self.first_tokens), self.encode(text)
    return tokens if tokens[: len(first)] == first else first + tokens

  def decode_after(self, before: list[int], tokens: list[int]) -> str:
    """Decodes tokens that follow others.

    Unlike `decode` it keeps the space before the first word, which many
    tokenizers drop at the start of a text.
    """
    head, whole = self.decode(before), self.decode(before + tokens)
    if whole.startswith(head):
      return whole[len(head) :]
    return self.decode(tokens)  # The tokens begin inside a character.

  def stops_after(self, lasts: Iterable[int]) -> list[int]:
    """Returns `stop_tokens` and those of the last tokens that have no text.

    Turns of the data may end with a token that is not a stop token yet.
    """
    return sorted({*self.stop_tokens, *self.without_text(lasts)})

  def without_text(self, tokens: Iterable[int]) -> set[int]:
    """Selects the tokens that decode to nothing, such as the end of a turn."""
    return {token for token in tokens if not self.decode([token])}


class ByteText(Text):
  """Uses bytes as ids, as `data.sources.read_bytes` does."""

  prefix_token = ord("\n")

  def encode(self, text: str) -> list[int]:
    return list(os.fsencode(text))

  def decode(self, tokens: list[int]) -> str:
    unknown = "\N{REPLACEMENT CHARACTER}".encode()
    # A vocabulary may have more ids than there are bytes.
    parts = (bytes([x]) if x < 256 else unknown for x in tokens)
    return b"".join(parts).decode(errors="replace")


class TokenizerText(Text):
  """Uses a `tokenizers` JSON file."""

  def __init__(self, path: str):
    """Reads the file, and special tokens and a chat template in its folder."""
    self._tokenizer = Tokenizer(path)
    self.chat = ChatTemplate.load(Path(path).expanduser().parent)
    self.prefix_token = self._tokenizer.end_of_text
    stops = {self.prefix_token}
    if self.chat is not None:
      end = self.chat.special_tokens.get("eos_token", "")
      stops.add(self._tokenizer.id_of(end))
    self.stop_tokens = tuple(sorted(x for x in stops if x is not None))

  def encode(self, text: str) -> list[int]:
    text = os.fsencode(text).decode(errors="replace")
    return self._tokenizer.encode([text])[0]

  def decode(self, tokens: list[int]) -> str:
    return self._tokenizer.decode(tokens)


class FolderText(TokenizerText):
  """Tokenizes as transformers does with a Hugging Face folder.

  A text begins with the token that the tokenizer's post-processor adds, or that
  `add_bos_token` in tokenizer_config.json asks for. It ends with any
  `eos_token_id` of generation_config.json and config.json. If neither file
  names one, it ends with the tokenizer's own end token.
  """

  def __init__(self, folder: Path, tokenizer: str | None = None):
    """Reads a folder's files; `tokenizer` replaces its tokenizer.json."""
    path = folder / _TOKENIZER if tokenizer is None else Path(tokenizer)
    if tokenizer is None and not path.is_file():
      raise FileNotFoundError(
        f"{folder} must have a {_TOKENIZER}, got none; copy it from the "
        "checkpoint's source, or pass --tokenizer with one"
      )
    super().__init__(str(path))
    own = path.expanduser().parent  # The tokenizer's folder.
    ends = {x for f in _CONFIGS for x in read_ids(folder / f, "eos_token_id")}
    self.stop_tokens = tuple(sorted(ends)) or self.stop_tokens
    special = read_special_tokens(own)
    begin, end = (
      self._tokenizer.id_of(special.get(name, ""))
      for name in ("bos_token", "eos_token")
    )
    known = read_ids(folder / CONFIG, "bos_token_id")
    if begin is None and tokenizer is None:
      begin = known[0] if known else None
    adds = _read(own / _TOKENIZER_CONFIG).get("add_bos_token")
    self.first_tokens = tuple(self._tokenizer.first_tokens())
    if isinstance(adds, bool) and begin is not None:
      self.first_tokens = (begin,) if adds else ()
    if (first := begin if begin is not None else end) is not None:
      self.prefix_token = first


def has_tokenizer(folder: Path) -> bool:
  """Returns whether a folder contains the tokenizer that `FolderText` reads."""
  return (folder / _TOKENIZER).is_file()


def _read(file: Path) -> dict[str, Any]:
  return read_json(file) if file.is_file() else {}


def read_ids(file: Path, name: str) -> list[int]:
  """Reads the token ids under a key of a JSON file; [] if there are none."""
  value = _read(file).get(name)
  found = value if isinstance(value, list) else [value]
  found = [x for x in found if x is not None]
  if any(type(x) is not int or x < 0 for x in found):
    raise ValueError(
      f"{file}: {name} must be a token id or a list of them, got "
      f"{str(value)[:40]}; copy the file again"
    )
  return found


def write_stop_tokens(folder: Path, documents: Documents) -> None:
  """Adds the tokens that end turns to a folder's generation_config.json.

  transformers stops at the tokens that this file names. Without this file it
  reads config.json. If that names none either, it uses the default of the
  model's class (token 2 for Llama), never the tokenizer's token. Nothing is
  written if the file already names the tokens, or if turns end with text.
  """
  text = FolderText(folder)
  ends = text.without_text(last_tokens(documents))
  file = folder / GENERATION
  named = file if file.is_file() else folder / CONFIG
  if ends <= {*read_ids(named, "eos_token_id")}:
    return
  found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
  found["eos_token_id"] = sorted({*text.stop_tokens, *ends})
  file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def last_tokens(documents: Documents) -> list[int]:
  """Lists the distinct tokens that end target spans."""
  mask = documents.mask  # False for the first token of each document.
  is_last = mask & ~np.append(mask[1:], False)
  return np.unique(documents.tokens[is_last]).tolist()


def open_text(data: DataConfig, tokenizer: str | None) -> Text:
  """Opens the tokenizer of a run's data, or another one."""
  tokenizer = data.tokenizer if tokenizer is None else tokenizer
  if tokenizer is not None:
    return TokenizerText(tokenizer)
  if data.dtype != "text":
    raise ValueError(
      "generate: the run was trained on token ids, and does not know their "
      f"tokenizer (dtype {data.dtype}); pass --tokenizer with a tokenizer.json"
    )
  return ByteText()
