# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, by a `tokenizers` JSON file.

The library raises bare Exception, and panics of its Rust code, which Python
does not even count as Exceptions. Here both are a ValueError that names the
file. Texts are tokenized whole whatever truncation the file asks for, as in
transformers.

A text takes up to 240 bytes a character while the library tokenizes it, so
that long ones go through it in pieces, and few at once.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers

from train.options import read_path

# Names that tokenizers in use give their end-of-text token.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# Characters that the library gets at once. A longer text is split at line
# ends, where few tokenizers merge across; larger pieces run on fewer cores.
PIECE = 1 << 18
# Texts, and characters in all, that its threads get at once.
_TEXTS, _CHARACTERS = 256, 1 << 20


class Tokenizer:
  """A `tokenizers` JSON file that was read."""

  def __init__(self, path: str):
    """Reads the file."""
    file = read_path("data.tokenizer", path)
    if not file.is_file():
      raise FileNotFoundError(
        f"load_tokens: the tokenizer must be a JSON file, got {path}, which is "
        "not a file; give the tokenizer.json that belongs to the model"
      )
    self._path = path
    with self._errors("be a `tokenizers` JSON file", "one that cannot be read"):
      self._whole = tokenizers.Tokenizer.from_file(str(file))
    self._whole.no_truncation()
    self._whole.no_padding()
    added = self._whole.get_added_tokens_decoder().values()
    self.added_tokens = [token.content for token in added if token.content]

  @contextlib.contextmanager
  def _errors(
    self, needs: str = "tokenize all text", got: str = "one that does not"
  ) -> Iterator[None]:
    try:
      yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
      raise
    except BaseException as error:  # See above.
      reason = (str(error).splitlines() or [type(error).__name__])[0]
      raise ValueError(
        f"load_tokens: {self._path} must {needs}, got {got} ({reason[:200]}); "
        "give the tokenizer.json of the model"
      ) from error

  def id_of(self, token: str) -> int | None:
    """Finds the id of a token; None where there is none."""
    return self._whole.token_to_id(token)

  @property
  def end_of_text(self) -> int | None:
    """The id of the end-of-text token; None where there is none."""
    known = map(self.id_of, _END_OF_TEXT)
    return next((id for id in known if id is not None), None)

  def drop_post_processor(self) -> None:
    """Leaves tokens all their characters, of which it may take spaces."""
    self._whole.post_processor = None

  def encode_with_special(self, text: str) -> tuple[list[int], list[int]]:
    """Returns ids with the special tokens around a text, and a mask of them."""
    with self._errors():
      encoding = self._whole.encode(text)
    return encoding.ids, encoding.special_tokens_mask

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text, without what is put around it."""
    with self._errors():
      found = self._whole.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in found]

  def decode(self, ids: list[int]) -> str:
    """Returns the text of ids, without special tokens."""
    with self._errors():
      return self._whole.decode(ids, skip_special_tokens=True)

  def encode_each(
    self, texts: Iterable[str], *, kept: int = 0
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields ids int32 [n] and character offsets int32 [n, 2] of each text.

    The first `kept` tokens are those of the whole text, wherever it is split,
    if they have at most 16 characters each.
    """
    ids, offsets = [], []
    pieces = (piece for text in texts for piece in self.split(text, kept=kept))
    for batch in _batches(pieces):
      with self._errors():
        found = self._whole.encode_batch(
          [piece for piece, _, _ in batch], add_special_tokens=False
        )
      for (_, start, is_last), encoding in zip(batch, found, strict=True):
        with self._errors():  # An id may be beyond int32.
          ids.append(np.asarray(encoding.ids, np.int32))
        places = np.asarray(encoding.offsets, np.int32).reshape(-1, 2)
        offsets.append(places + start)
        if is_last:
          yield np.concatenate(ids), np.concatenate(offsets)
          ids, offsets = [], []

  def split(
    self, text: str, *, kept: int = 0
  ) -> Iterator[tuple[str, int, bool]]:
    """Yields pieces of a text, where each begins, and whether it is the last.

    Pieces end at line ends and never inside an added token.
    """
    most = max(PIECE, 16 * kept)
    start, is_last = 0, False
    while not is_last:
      end = len(text)
      if end - start > most:
        end = text.rfind("\n", start, start + most) + 1 or start + most
        for token in self.added_tokens:
          reach = len(token) - 1
          place = text.find(token, end - reach, end + reach)
          if start < place < end:
            end = place
      is_last = end == len(text)
      yield text[start:end], start, is_last
      start = end


def _batches(
  pieces: Iterable[tuple[str, int, bool]],
) -> Iterator[list[tuple[str, int, bool]]]:
  """Groups pieces that the library gets at once."""
  batch, size = [], 0
  for piece in pieces:
    if batch and (len(batch) == _TEXTS or size + len(piece[0]) > _CHARACTERS):
      yield batch
      batch, size = [], 0
    batch.append(piece)
    size += len(piece[0])
  if batch:
    yield batch
