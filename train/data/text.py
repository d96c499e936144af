# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes text the way the data of a run was encoded.

`open_text` returns a `ByteText`, whose ids are bytes, or a `TokenizerText`,
which reads a `tokenizers` JSON file, and the special tokens and the chat
template in the same folder.
"""

import abc
import os
from collections.abc import Iterable
from pathlib import Path

from train.data.chat.template import ChatTemplate
from train.data.tokenizer import Tokenizer
from train.data.tokens import DataConfig


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
    """Returns `stop_tokens`, and the last tokens of turns without any text.

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
