# SPDX-License-Identifier: Apache-2.0
"""Tokenizes files of conversations into documents of limited length.

Only token ids and masks are kept in memory, in five bytes per token. Images are
read from their files when a batch needs them.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from train.data.chat import formats
from train.data.chat.encoder import ChatEncoder, Rendered
from train.data.chat.formats import Row, find_row_files, read_rows
from train.data.sources import BadData, check_ids

if TYPE_CHECKING:  # Needs Pillow.
  from train.data.chat.images import ChatImages, RowImage

_SKIP = ", or skip bad rows with skip_bad=True (on a command line --skip-bad)"


@dataclasses.dataclass
class Counts:
  """Counts rows that were read or left out, and truncated documents."""

  rows: int = 0
  # For each reason: how many rows `skip_bad` left out, and where the first is.
  bad: dict[str, int] = dataclasses.field(default_factory=dict)
  first_bad: dict[str, str] = dataclasses.field(default_factory=dict)
  without_target: int = 0  # Rows left out because no target token fits.
  truncated: int = 0
  # Target tokens that truncation removed, including those of rows left out.
  lost_targets: int = 0
  longest: int = 0  # The shortest sequence length that truncates no document.

  def describe(self) -> str:
    parts = [f"{self.rows} rows"]
    if self.bad:
      kinds = "; ".join(
        f"{n} {reason}, first at {self.first_bad[reason]}"
        for reason, n in sorted(self.bad.items())
      )
      parts.append(f"bad rows left out: {sum(self.bad.values())} ({kinds})")
    if self.truncated or self.without_target:
      parts.append(
        f"{self.truncated} truncated and {self.without_target} left out for "
        f"their length, which removes {self.lost_targets} target tokens; "
        f"every row would fit into sequences of {self.longest} tokens"
      )
    return "; ".join(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentImages:
  """The images of all documents."""

  reader: "ChatImages"
  found: list["RowImage"]  # In the order of the documents.
  starts: np.ndarray  # Document i has found[starts[i] : starts[i + 1]].


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
  """Tokenized conversations, concatenated."""

  tokens: np.ndarray  # int32 [n].
  mask: np.ndarray  # bool [n], True for targets; False for first tokens.
  # int64 [documents + 1]: document i has the tokens starts[i] to
  # starts[i + 1] - 1.
  starts: np.ndarray
  counts: Counts
  images: DocumentImages | None = None  # None if the model accepts no images.

  def __len__(self) -> int:
    return len(self.starts) - 1

  @property
  def lengths(self) -> np.ndarray:
    """The number of tokens in each document, int64 [documents]."""
    return np.diff(self.starts)

  def tokens_of(self, document: int) -> tuple[np.ndarray, np.ndarray]:
    here = slice(*self.starts[document : document + 2])
    return self.tokens[here], self.mask[here]

  def images_of(self, document: int) -> list["RowImage"]:
    if self.images is None:
      return []
    return self.images.found[
      slice(*self.images.starts[document : document + 2])
    ]

  @functools.cached_property
  def fingerprint(self) -> str:
    """A hash of all but pixel data; a resumed run must have the same hash."""
    digest = hashlib.sha256()
    for array in (self.tokens, self.mask, self.starts):
      digest.update(np.ascontiguousarray(array))
    if self.images is not None:
      names = [image.name for image in self.images.found]
      reader = dataclasses.replace(self.images.reader, folder=None)
      digest.update(repr((names, reader)).encode())
      digest.update(self.images.starts)
    return digest.hexdigest()[:32]

  def split(self, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits at random; returns indices of training and held-out documents."""
    if len(self) < 2:
      raise ValueError(
        "chat: at least two conversations are needed, one to train on and one "
        f"to hold out, got {len(self)} from {self.counts.describe()}; give "
        "more data"
      )
    order = np.random.default_rng(seed).permutation(len(self))
    count = min(max(round(len(self) * held_out), 1), len(self) - 1)
    return np.sort(order[count:]), np.sort(order[:count])


def load_documents(
  paths: list[str],
  encoder: ChatEncoder,
  *,
  seq: int,
  vocab_size: int,
  format: str | None = None,
  skip_bad: bool = False,
  images: "ChatImages | None" = None,
) -> Documents:
  """Reads, tokenizes and truncates the conversations in files.

  A target span is a text that the loss covers. A conversation of more than
  `seq + 1` tokens is cut after the last target span that fits, or after
  `seq + 1` tokens if no target span fits. Documents without a target are left
  out. If `format` is None, a file's format is that of its first row in a known
  format. If `skip_bad` is true, bad rows are skipped and counted. Otherwise
  they raise a ValueError.
  """
  counts = Counts()
  reader = _Reader(encoder, format, skip_bad, images, counts)
  kept: list[_Document] = []
  shortest: list[int] = []
  with tqdm(desc="tokenizing", unit="row", unit_scale=True, delay=2) as bar:
    for whole in reader.read(paths, seq, vocab_size):
      bar.update()
      counts.longest = max(counts.longest, len(whole.tokens) - 1)
      document = whole.cut(seq + 1)
      counts.lost_targets += int(whole.mask.sum() - document.mask.sum())
      if not document.mask.any():
        counts.without_target += 1
        if whole.mask.any():  # Note the smallest `seq` that keeps a target.
          shortest.append(int(np.argmax(whole.mask)))
        continue
      counts.truncated += len(document.tokens) < len(whole.tokens)
      if images is not None:
        # At least one target token is kept, so the cut is at the end of a
        # target span or inside one. Such spans contain no images, so no image
        # is cut.
        count = images.count(document.tokens)
        document = document._replace(images=document.images[:count])
      kept.append(document)
  if not kept:
    remedy = "check the files"
    if shortest:
      remedy = (
        f"pass --seq {min(shortest)} or more (in train.evaluate: --length)"
      )
    raise ValueError(
      f"chat: found no target tokens in {', '.join(map(str, paths))}: "
      f"{counts.describe()}; {remedy}"
    )
  found = None
  if images is not None:
    found = DocumentImages(
      images,
      [image for document in kept for image in document.images],
      _starts([document.images for document in kept]),
    )
  return Documents(
    np.concatenate([document.tokens for document in kept]),
    np.concatenate([document.mask for document in kept]),
    _starts([document.tokens for document in kept]),
    counts,
    found,
  )


def _starts(parts: Sequence[Any]) -> np.ndarray:
  return np.cumsum([0, *map(len, parts)], dtype=np.int64)


class _Document(NamedTuple):
  """A tokenized conversation."""

  tokens: np.ndarray
  mask: np.ndarray
  ends: list[int]  # The index after the last token of each target span.
  images: "Sequence[RowImage]"

  def cut(self, size: int) -> "_Document":
    """Cuts after the last target span that fits into `size`, or at `size`."""
    if len(self.tokens) <= size:
      return self
    fitting = bisect.bisect_right(self.ends, size)
    end = self.ends[fitting - 1] if fitting else size
    # Copy, because a view would keep the whole document in memory.
    return self._replace(
      tokens=self.tokens[:end].copy(), mask=self.mask[:end].copy()
    )


class _ReadRow(NamedTuple):
  """A valid row, its text, and its images."""

  row: Row
  rendered: Rendered
  images: "Sequence[RowImage]"


@dataclasses.dataclass
class _Reader:
  """Reads rows from files, and refuses or counts bad rows."""

  encoder: ChatEncoder
  format: str | None
  skip_bad: bool
  images: "ChatImages | None"
  counts: Counts

  def read(
    self, paths: list[str], seq: int, vocab_size: int
  ) -> Iterator[_Document]:
    rows, again = itertools.tee(self._rows(paths))
    encoded = self.encoder.encode(
      (each.rendered for each in rows), kept=seq + 1
    )
    for each, (tokens, mask, ends) in zip(again, encoded, strict=True):
      check_ids(tokens, str(each.row.file), vocab_size)
      if self.images is not None:
        try:
          tokens, mask, ends = self.images.expand(
            tokens, mask, ends, images=len(each.images)
          )
        except BadData as error:
          self._refuse(each.row, error)
          continue
      yield _Document(tokens, mask, ends, each.images)

  def _rows(self, paths: list[str]) -> Iterator[_ReadRow]:
    for file in find_row_files(paths):
      format = self.format
      for row in read_rows(file):
        self.counts.rows += 1
        try:
          if isinstance(row.value, BadData):
            raise row.value
          format = format or formats.recognize(row.value)
          parsed = formats.parse(row.value, format)
          found = self._find_images(row, parsed)
          yield _ReadRow(row, self.encoder.render(parsed), found)
        except BadData as error:
          self._refuse(row, error)

  def _find_images(self, row: Row, parsed) -> "Sequence[RowImage]":
    if self.images is not None:
      return self.images.of_row(row, parsed)
    for key in ("image", "images"):
      if row.value.get(key):
        raise BadData(
          "unexpected images",
          f'the row has the key "{key}", but the model accepts only text',
        )
    return ()

  def _refuse(self, row: Row, error: BadData) -> None:
    """Counts a bad row, or raises ValueError if bad rows are not skipped."""
    if not self.skip_bad:
      raise ValueError(
        f"chat: {row.file} line {row.line}: {error}; {error.remedy}{_SKIP}"
      ) from error
    bad = self.counts.bad
    bad[error.reason] = bad.get(error.reason, 0) + 1
    place = f"{row.file} line {row.line}"
    self.counts.first_bad.setdefault(error.reason, place)
