# SPDX-License-Identifier: Apache-2.0
"""Converts text to tokens and back with a `tokenizers` JSON file.

As in transformers, the file's settings for truncation and padding are ignored.
The package `tokenizers` needs up to 240 bytes of memory per character. Hence
long texts are split into pieces, and a limited number of pieces is tokenized at
a time.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers

from train.options import first_line, read_path

# Common names of the end-of-text token.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# Maximum length of a piece, in characters, if the argument `kept` is small.
# Pieces are tokenized in parallel, and larger pieces would use fewer cores.
PIECE = 1 << 18
# Maximum numbers of pieces and characters that `encode_each` tokenizes at once.
_TEXTS, _CHARACTERS = 256, 1 << 20


class Tokenizer:
  """The tokenizer in a `tokenizers` JSON file."""

  def __init__(self, path: str):
    file = read_path("data.tokenizer", path)
    if not file.is_file():
      raise FileNotFoundError(
        f"tokenizer: expected a JSON file, got {path}, which is not a file; "
        "give the model's tokenizer.json"
      )
    self._path = path
    with self._errors("could not be read as a `tokenizers` JSON file"):
      self._whole = tokenizers.Tokenizer.from_file(str(file))
    self._whole.no_truncation()
    self._whole.no_padding()
    added = self._whole.get_added_tokens_decoder().values()
    self.added_tokens = [token.content for token in added if token.content]

  @contextlib.contextmanager
  def _errors(
    self, problem: str = "failed to tokenize a text"
  ) -> Iterator[None]:
    try:
      yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
      raise
    except BaseException as error:  # A Rust panic is not an `Exception`.
      raise ValueError(
        f"tokenizer: {self._path} {problem} ({first_line(error)}); give the "
        "model's tokenizer.json"
      ) from error

  def id_of(self, token: str) -> int | None:
    """Returns the id of a token; None if the vocabulary does not have it."""
    return self._whole.token_to_id(token)

  @property
  def end_of_text(self) -> int | None:
    """The id of the end-of-text token; None if no common name has an id."""
    known = map(self.id_of, _END_OF_TEXT)
    return next((id for id in known if id is not None), None)

  def drop_post_processor(self) -> None:
    """Removes the post-processor, which may exclude spaces from offsets."""
    self._whole.post_processor = None

  def first_tokens(self) -> list[int]:
    """Returns the special tokens that the tokenizer puts before a text."""
    with self._errors():
      found = self._whole.encode("a")
    is_special = found.special_tokens_mask
    return found.ids[: is_special.index(0) if 0 in is_special else 0]

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text, without special tokens around it."""
    with self._errors():
      found = self._whole.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in found]

  def decode(self, ids: list[int]) -> str:
    """Converts ids to text, without special tokens."""
    with self._errors("failed to decode tokens"):
      return self._whole.decode(ids, skip_special_tokens=True)

  def encode_each(
    self, texts: Iterable[str], *, kept: int = 0
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields each text's ids, int32 [n], and character offsets, int32 [n, 2].

    `kept` is how many tokens of each text the caller uses. These tokens should
    not depend on where a text is split. So a text is split inside a line only
    before an added token, or after at least 16 * `kept` characters, which
    usually contain more than `kept` tokens.
    """
    ids, offsets = [], []
    pieces = (piece for text in texts for piece in self.split(text, kept=kept))
    for batch in _batches(pieces):
      with self._errors():
        found = self._whole.encode_batch(
          [piece for piece, _, _ in batch], add_special_tokens=False
        )
      for (_, start, is_last), encoding in zip(batch, found, strict=True):
        with self._errors():  # An id may be too large for int32.
          ids.append(np.asarray(encoding.ids, np.int32))
        places = np.asarray(encoding.offsets, np.int32).reshape(-1, 2)
        offsets.append(places + start)
        if is_last:
          yield np.concatenate(ids), np.concatenate(offsets)
          ids, offsets = [], []

  def split(
    self, text: str, *, kept: int = 0
  ) -> Iterator[tuple[str, int, bool]]:
    """Yields (piece, start of the piece, whether it is the last) for a text.

    Pieces end at line ends if possible, because few tokenizers merge across a
    line end. A piece never ends inside an added token.
    """
    most = max(PIECE, 16 * kept)
    start, is_last = 0, False
    while not is_last:
      end = len(text)
      if end - start > most:
        end = text.rfind("\n", start, start + most) + 1 or start + most
        for token in self.added_tokens:
          reach = len(token) - 1
          place = text.find(token, max(end - reach, start), end + reach)
          if start < place < end:
            end = place
      is_last = end == len(text)
      yield text[start:end], start, is_last
      start = end


def _batches(
  pieces: Iterable[tuple[str, int, bool]],
) -> Iterator[list[tuple[str, int, bool]]]:
  """Groups pieces into batches that are tokenized at once."""
  batch, size = [], 0
  for piece in pieces:
    if batch and (len(batch) == _TEXTS or size + len(piece[0]) > _CHARACTERS):
      yield batch
      batch, size = [], 0
    batch.append(piece)
    size += len(piece[0])
  if batch:
    yield batch
