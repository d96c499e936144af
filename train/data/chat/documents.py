# SPDX-License-Identifier: Apache-2.0
"""From files of conversations to documents of tokens, cut to a length.

Only token ids and masks are kept, in memory: five bytes a token; of images
their names, until a batch needs them.
"""

import bisect
import collections
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from train.data.chat import formats
from train.data.chat.encoder import ChatEncoder, Rendered
from train.data.chat.formats import BadRow, Row, find_row_files, read_rows
from train.data.sources import check_ids

if TYPE_CHECKING:  # Which needs Pillow.
  from train.data.chat.images import ChatImages, RowImage

_SKIP = ", or leave bad rows out with skip_bad=True (of a command: --skip-bad)"


@dataclasses.dataclass(frozen=True)
class Counts:
  """Counts of the rows that were read."""

  rows: int = 0  # How many were read.
  # Rows that `skip_bad` left out, by what was wrong.
  bad: dict[str, int] = dataclasses.field(default_factory=dict)
  without_target: int = 0  # Nothing was left to learn.
  truncated: int = 0  # Documents that were too long.
  # Tokens to be learned that truncation removed, in `without_target` too.
  lost_targets: int = 0
  # The sequence length at which no row is truncated.
  longest: int = 0

  def describe(self) -> str:
    """Says it in a line."""
    parts = [f"{self.rows} rows"]
    if self.bad:
      kinds = ", ".join(f"{n} {x}" for x, n in sorted(self.bad.items()))
      parts.append(f"{sum(self.bad.values())} bad ones left out ({kinds})")
    if self.truncated or self.without_target:
      parts.append(
        f"{self.truncated} truncated and {self.without_target} left out for "
        f"their length, with {self.lost_targets} tokens to be learned; "
        f"sequences of {self.longest} tokens would hold all"
      )
    return "; ".join(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentImages:
  """Images of documents."""

  reader: "ChatImages"
  found: list["RowImage"]  # One document after another.
  # int64 [documents + 1], where each document's images begin.
  starts: np.ndarray

  def of(self, document: int) -> list["RowImage"]:
    """The images of a document."""
    start, end = self.starts[document : document + 2]
    return self.found[start:end]


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
  """Tokenized conversations, one after the other."""

  tokens: np.ndarray  # int32 [n].
  # bool [n], which tokens to learn; never the first of a document.
  mask: np.ndarray
  starts: np.ndarray  # int64 [documents + 1], where each begins, and the end.
  counts: Counts
  # None if all documents are text.
  images: DocumentImages | None = None

  def __len__(self) -> int:
    return len(self.starts) - 1

  @property
  def lengths(self) -> np.ndarray:
    """Tokens of each document, int64."""
    return np.diff(self.starts)

  @functools.cached_property
  def fingerprint(self) -> str:
    """A hash of all; a resumed run must have the same. Of images, the names."""
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
    """Holds documents out for evaluation, drawn from a seed."""
    if not 0 < held_out < 1:
      raise ValueError(
        "chat: held_out must be a share between 0 and 1, got "
        f"{held_out}; 0.05 keeps 5 % for evaluation"
      )
    if len(self) < 2:
      raise ValueError(
        "chat: training and evaluation each need a conversation, got "
        f"{len(self)} in all, of {self.counts.describe()}; give more data"
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
  skip_bad: bool | None = False,
  images: "ChatImages | None" = None,
) -> Documents:
  """Reads files of conversations.

  Too long ones end with the last turn of the assistant that fits, or else
  where a row does.

  Args:
    paths: Files, folders or globs.
    encoder: Of the model.
    seq: Tokens that a model reads; documents have at most one more.
    vocab_size: The model's.
    format: Of `formats.FORMATS`; None finds each file's by its first row.
    skip_bad: Whether bad rows are counted instead of raised; None where they
      cannot be, so that the error does not say so.
    images: How images come into rows; None where all is text.

  Raises:
    FileNotFoundError: nothing at a path.
    ValueError: a bad row, with its file and line; no row at all; a template
      whose turns cannot be found; ids outside the vocabulary.
  """
  reader = _Reader(encoder, format, skip_bad, images)
  ids, masks, lengths = [np.empty(0, np.int32)], [np.empty(0, bool)], [0]
  found: list[RowImage] = []
  image_counts = [0]
  without_target = truncated = lost = longest = 0
  shortest: list[int] = []
  with tqdm(desc="tokenizing", unit="row", unit_scale=True, delay=2) as bar:
    rows, again = itertools.tee(reader.read(paths))
    encoded = encoder.encode((each.rendered for each in rows), kept=seq + 1)
    for each, (tokens, mask, ends) in zip(again, encoded, strict=True):
      check_ids(tokens, str(each.row.file), vocab_size)
      bar.update()
      if images is not None:
        try:
          tokens, mask, ends = images.expand(
            tokens, mask, ends, images=len(each.images)
          )
        except BadRow as error:
          reader.refuse(each.row, error)
          continue
      longest = max(longest, len(tokens) - 1)
      if len(tokens) > seq + 1:
        fitting = bisect.bisect_right(ends, seq + 1)
        kept = ends[fitting - 1] if fitting else seq + 1
        lost += int(mask[kept:].sum())
        if mask.any() and not mask[:kept].any():
          # Cut in front of the first answer, whose first token is a target.
          shortest.append(int(np.argmax(mask)))
        # Copies, for a part would keep the whole in memory.
        tokens, mask = tokens[:kept].copy(), mask[:kept].copy()
        truncated += bool(mask.any())
      if not mask.any():
        without_target += 1
        continue
      ids.append(tokens)
      masks.append(mask)
      lengths.append(len(tokens))
      if images is not None:
        # No image is cut in two: without an end that fits, the first answer
        # does not, and images are in front of it.
        image_counts.append(images.count(tokens))
        found += each.images[: image_counts[-1]]
  counts = Counts(
    reader.rows, dict(reader.bad), without_target, truncated, lost, longest
  )
  if len(lengths) == 1:
    remedy = "check the files"
    if shortest:
      remedy = (
        f"pass --seq {min(shortest)} (of train.evaluate --length) at least"
      )
    raise ValueError(
      f"chat: {', '.join(map(str, paths))} must have a row to learn, got "
      f"{counts.describe()}; {remedy}"
    )
  starts = np.cumsum(image_counts, dtype=np.int64)
  return Documents(
    np.concatenate(ids),
    np.concatenate(masks),
    np.cumsum(lengths, dtype=np.int64),
    counts,
    images and DocumentImages(images, found, starts),
  )


class _ReadRow(NamedTuple):
  """A good row, its text, and its images."""

  row: Row
  rendered: Rendered
  images: tuple["RowImage", ...]


class _Reader:
  """Reads rows of files as texts, and counts the bad ones."""

  def __init__(
    self,
    encoder: ChatEncoder,
    format: str | None,
    skip_bad: bool | None,
    images: "ChatImages | None",
  ):
    self._encoder = encoder
    self._format = format
    self._skip_bad = skip_bad
    self._images = images
    self.rows = 0
    self.bad: collections.Counter[str] = collections.Counter()

  def read(self, paths: list[str]) -> Iterator[_ReadRow]:
    """Yields each good row."""
    for file in find_row_files(paths):
      format = self._format
      for row in read_rows(file):
        self.rows += 1
        try:
          if isinstance(row.value, BadRow):
            raise row.value
          format = format or self._recognize(row)
          parsed = formats.parse(row.value, format)
          found = self._find_images(row, parsed)
          yield _ReadRow(row, self._encoder.render(parsed), found)
        except BadRow as error:
          self.refuse(row, error)

  def _find_images(self, row: Row, parsed) -> "tuple[RowImage, ...]":
    if self._images is not None:
      return self._images.of_row(row, parsed)
    for key in ("image", "images"):
      if row.value.get(key):
        raise BadRow(
          "images beside text",
          f"a row must be text alone here, got {key}: what is trained does not "
          "see images",
        )
    return ()

  def refuse(self, row: Row, error: BadRow) -> None:
    """Counts a bad row; raises ValueError where none may be."""
    if not self._skip_bad:
      raise ValueError(
        f"chat: {os.fspath(row.file)} line {row.line}: {error}; {error.remedy}"
        + ("" if self._skip_bad is None else _SKIP)
      ) from error
    self.bad[error.reason] += 1

  def _recognize(self, row: Row) -> str:
    if format := formats.recognize(row.value):
      return format
    keys = list(row.value) if isinstance(row.value, dict) else row.value
    known = ", ".join("+".join(keys) for keys, _ in formats.FORMATS.values())
    raise BadRow(
      "wrong format",
      f"a row must have the keys of a known format ({known}), got "
      f"{str(keys)[:80]}",
    )
