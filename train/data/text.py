# SPDX-License-Identifier: Apache-2.0
"""Between text and tokens, both ways, as a run's data were tokenized.

`open_text` chooses: bytes are ids where a run has no tokenizer, else a
`tokenizers` JSON file gives them, with what is beside it in a folder of
transformers: special tokens and a chat template.
"""

import abc
import os
from pathlib import Path

from train.data.chat import ChatTemplate
from train.data.sources import find_end_of_text, load_tokenizer
from train.data.tokens import DataConfig


class Text(abc.ABC):
  """Encodes prompts and decodes what was generated.

  Attributes:
    stop_tokens: what ends a text.
    chat: the template of a chat, or None.
  """

  stop_tokens: tuple[int, ...] = ()
  chat: ChatTemplate | None = None

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Returns the tokens of a text, without any that mark its beginning."""

  @abc.abstractmethod
  def decode(self, tokens: list[int]) -> str:
    """Returns the text of tokens; what is no text becomes U+FFFD."""


class ByteText(Text):
  """Bytes are ids, as in `data.sources.read_bytes`."""

  def encode(self, text: str) -> list[int]:
    return list(os.fsencode(text))

  def decode(self, tokens: list[int]) -> str:
    unknown = "\N{REPLACEMENT CHARACTER}".encode()
    # A vocabulary may have more ids than there are bytes.
    parts = (bytes([x]) if x < 256 else unknown for x in tokens)
    return b"".join(parts).decode(errors="replace")


class TokenizerText(Text):
  """Through a `tokenizers` JSON file."""

  def __init__(self, path: str):
    """Reads the file, and special tokens and a chat template beside it.

    Args:
      path: Of tokenizer.json.

    Raises:
      FileNotFoundError, ValueError: one of these files cannot be read.
    """
    self._tokenizer = load_tokenizer(path)
    self.chat = ChatTemplate.load(Path(path).expanduser().parent)
    stops = {find_end_of_text(self._tokenizer)}
    if self.chat is not None:
      end = self.chat.special_tokens.get("eos_token", "")
      stops.add(self._tokenizer.token_to_id(end))
    self.stop_tokens = tuple(sorted(x for x in stops if x is not None))

  def encode(self, text: str) -> list[int]:
    text = os.fsencode(text).decode(errors="replace")
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, tokens: list[int]) -> str:
    return self._tokenizer.decode(tokens, skip_special_tokens=True)


def open_text(data: DataConfig, tokenizer: str | None) -> Text:
  """Opens what a run's data were tokenized with.

  Args:
    data: The run's.
    tokenizer: A `tokenizers` JSON file in place of the run's; None for that.

  Raises:
    FileNotFoundError, ValueError: it cannot be read, or is not known.
  """
  tokenizer = data.tokenizer if tokenizer is None else tokenizer
  if tokenizer is not None:
    return TokenizerText(tokenizer)
  if data.dtype != "text":
    raise ValueError(
      "generate: the run's data are token ids, whose tokenizer is not known, "
      f"got dtype {data.dtype}; pass --tokenizer with its tokenizer.json"
    )
  return ByteText()
