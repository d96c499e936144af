# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes text with the tokenizer of a model.

`open_text` returns a `ByteText`, whose ids are bytes, or a `TokenizerText`,
which uses a `tokenizers` JSON file. `FolderText` reads a Hugging Face folder:

tokenizer.json          the tokenizer
tokenizer_config.json   the special tokens, and whether texts begin with BOS
generation_config.json  the tokens that end a text; config.json may list more.
                        Default: the tokenizer's end-of-text token and, if there
                        is a chat template, its eos_token
chat_template.jinja     the chat template; see `data.chat`
"""

import abc
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from coat_jax.models.hf.keys import CONFIG
from train.data.chat.documents import Documents
from train.data.chat.template import (
  ChatTemplate,
  read_if_present,
  read_special_tokens,
)
from train.data.tokenizer import Tokenizer
from train.data.tokens import DataConfig

_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
_CONFIGS = (GENERATION, CONFIG)


class Text(abc.ABC):
  """Encodes prompts and decodes generated tokens."""

  first_tokens: tuple[int, ...] = ()  # Every text begins with these tokens.
  stop_tokens: tuple[int, ...] = ()  # Each of these tokens ends a text.
  # The token to put before a text that has no context; None if unknown.
  prefix_token: int | None = None
  chat: ChatTemplate | None = None

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Returns the tokens of a text, without `first_tokens`."""

  @abc.abstractmethod
  def decode(self, tokens: list[int]) -> str:
    """Decodes tokens; bytes that are not UTF-8 become U+FFFD."""

  def encode_from_start(self, text: str) -> list[int]:
    """Encodes a text; prepends `first_tokens` if they are missing."""
    first, tokens = list(self.first_tokens), self.encode(text)
    return tokens if tokens[: len(first)] == first else first + tokens

  def decode_after(self, before: list[int], tokens: list[int]) -> str:
    """Decodes `tokens`, which follow the tokens `before`."""
    # Many tokenizers drop the space before the first word that they decode.
    head, whole = self.decode(before), self.decode(before + tokens)
    if whole.startswith(head):
      return whole[len(head) :]
    return self.decode(tokens)  # The tokens begin inside a character.

  def stops_after(self, lasts: Iterable[int]) -> list[int]:
    """Returns `stop_tokens`, and the tokens in `lasts` that decode to ""."""
    return sorted({*self.stop_tokens, *self.without_text(lasts)})

  def without_text(self, tokens: Iterable[int]) -> set[int]:
    """Selects tokens that decode to "", such as the end-of-turn token."""
    return {token for token in tokens if not self.decode([token])}


class ByteText(Text):
  """Uses bytes as ids, as `data.sources.read_bytes` does."""

  prefix_token = ord("\n")

  def encode(self, text: str) -> list[int]:
    return list(os.fsencode(text))

  def decode(self, tokens: list[int]) -> str:
    unknown = "\N{REPLACEMENT CHARACTER}".encode()
    # The model's vocabulary may have more than 256 ids.
    parts = (bytes([x]) if x < 256 else unknown for x in tokens)
    return b"".join(parts).decode(errors="replace")


class TokenizerText(Text):
  """Encodes and decodes with a `tokenizers` JSON file."""

  def __init__(self, path: str):
    """Reads the file, and the special tokens and chat template next to it."""
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

  `add_bos_token` in tokenizer_config.json sets whether a text begins with the
  BOS token. Without that key, or without a BOS token, a text begins with the
  tokens that the tokenizer's post-processor adds.
  """

  def __init__(self, folder: Path, tokenizer: str | None = None):
    """Reads a folder's files; `tokenizer` replaces its tokenizer.json."""
    path = folder / _TOKENIZER if tokenizer is None else Path(tokenizer)
    if tokenizer is None and not path.is_file():
      raise FileNotFoundError(
        f"{folder} must contain a {_TOKENIZER}, got none; copy it from the "
        f"checkpoint's source, or pass --tokenizer with another {_TOKENIZER}"
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
    adds = read_if_present(own / _TOKENIZER_CONFIG).get("add_bos_token")
    self.first_tokens = tuple(self._tokenizer.first_tokens())
    if isinstance(adds, bool) and begin is not None:
      self.first_tokens = (begin,) if adds else ()
    if (first := begin if begin is not None else end) is not None:
      self.prefix_token = first


def has_tokenizer(folder: Path) -> bool:
  """Returns whether a folder contains the tokenizer that `FolderText` reads."""
  return (folder / _TOKENIZER).is_file()


def read_ids(file: Path, name: str) -> list[int]:
  """Reads the token ids under key `name` of a JSON file; [] if it is unset."""
  value = read_if_present(file).get(name)
  found = value if isinstance(value, list) else [value]
  found = [x for x in found if x is not None]
  if any(type(x) is not int or x < 0 for x in found):
    raise ValueError(
      f"{file}: {name} must be a token id or a list of token ids, got "
      f"{str(value)[:40]}; copy the file from the checkpoint's source again"
    )
  return found


def write_stop_tokens(folder: Path, documents: Documents) -> None:
  """Adds end-of-turn tokens to a folder's generation_config.json.

  transformers stops at the `eos_token_id` of this file or, if the file is
  missing, of config.json. The tokenizer's EOS token is ignored. Nothing is
  written if the tokens are listed already, or if all turns end with visible
  text.
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
  """Lists the distinct last tokens of target spans."""
  mask = documents.mask  # False for the first token of each document.
  is_last = mask & ~np.append(mask[1:], False)
  return np.unique(documents.tokens[is_last]).tolist()


def open_text(data: DataConfig, tokenizer: str | None) -> Text:
  """Opens `tokenizer` or `data.tokenizer`; uses bytes if both are None."""
  tokenizer = data.tokenizer if tokenizer is None else tokenizer
  if tokenizer is not None:
    return TokenizerText(tokenizer)
  if data.dtype != "text":
    raise ValueError(
      "generate: expected a tokenizer, got a run that was trained on token ids "
      f"(dtype {data.dtype}) and has no tokenizer; pass --tokenizer with the "
      "tokenizer.json that produced the ids"
    )
  return ByteText()
