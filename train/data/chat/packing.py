# SPDX-License-Identifier: Apache-2.0
"""Documents put together in rows of `seq + 1` tokens.

The longest goes first, and each into the fullest row that has room for it
(best fit, decreasing), which leaves little padding. Documents of one length go
in an order drawn from the seed. Segments tell them apart: 1, 2, ... in the
order of the row, and 0 for padding, so that attention can keep to one.

Where documents have images, rows have room for equally many: arrays of a batch
are of one shape, and a device gets the images of its own rows.
"""

import bisect
import dataclasses
from typing import ClassVar

import numpy as np

from train.data.chat.documents import Documents


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
  """Rows of tokens, made when they are read."""

  has_padding: ClassVar[bool] = True

  documents: Documents
  members: list[tuple[int, ...]]  # Document numbers of each row.
  seq: int  # Tokens that a model reads; rows have one more.
  images: int = 0  # Most images of a row; 0 if all is text.

  def __len__(self) -> int:
    return len(self.members)

  @property
  def filled(self) -> float:
    """Share of the rows' tokens that are not padding."""
    lengths = self.documents.lengths
    used = sum(int(lengths[list(row)].sum()) for row in self.members)
    return used / (len(self) * (self.seq + 1))

  def read(self, row: int | None) -> dict[str, np.ndarray]:
    """Reads a row."""
    members = () if row is None else self.members[row]
    tokens = np.zeros(self.seq + 1, np.int32)
    segments, mask = np.zeros_like(tokens), np.zeros(self.seq + 1, bool)
    place = 0
    for number, member in enumerate(members):
      start, end = self.documents.starts[member : member + 2]
      here = slice(place, place + int(end - start))
      tokens[here] = self.documents.tokens[start:end]
      mask[here] = self.documents.mask[start:end]
      segments[here] = number + 1
      place = here.stop
    found = {"tokens": tokens, "segments": segments, "is_target": mask}
    if images := self.documents.images:
      own = [image for member in members for image in images.of(member)]
      found["images"] = images.reader.read(own, slots=self.images)
    return found


def pack(
  documents: Documents,
  numbers: np.ndarray,
  *,
  seq: int,
  seed: int,
  is_packed: bool = True,
  images: int | None = None,
) -> PackedRows:
  """Puts documents into rows.

  Args:
    documents: Of at most `seq + 1` tokens each.
    numbers: Which of them, int [n].
    seq: Tokens that a model reads; rows have one more.
    seed: Of the order of documents of one length.
    is_packed: Whether a row may have more than one.
    images: That a row has room for, where documents have images; None for as
      many as any document has.

  Raises:
    ValueError: a document is too long, or has too many images.
  """
  lengths = documents.lengths
  longest = int(lengths[numbers].max(initial=0))
  if longest > seq + 1:
    raise ValueError(
      f"pack: documents must have at most {seq} + 1 tokens, got {longest}; "
      "load them with this sequence length"
    )
  if documents.images is None:
    counts, images = np.zeros(len(documents), np.int64), 0
  else:
    counts = np.diff(documents.images.starts)
    # All rows of a run have room for some, for shapes not to depend on which
    # documents are held out.
    most = int(counts.max(initial=1))
    images = most if images is None else images
    if most > images:
      raise ValueError(
        f"pack: documents must have at most {images} images, got {most}; give "
        "rows room for them, or leave these documents out"
      )
  if not is_packed:
    return PackedRows(documents, [(int(i),) for i in numbers], seq, images)
  order = np.random.default_rng(seed).permutation(numbers)
  order = order[np.argsort(-lengths[order], kind="stable")]
  # Of rows with room for 0, 1, ... images: (room, number), sorted.
  rooms: list[list[tuple[int, int]]] = [[] for _ in range(images + 1)]
  members: list[list[int]] = []
  for i in order.tolist():
    length, count = int(lengths[i]), int(counts[i])
    fitting = []
    for left in range(count, images + 1):
      place = bisect.bisect_left(rooms[left], (length, 0))
      if place < len(rooms[left]):
        fitting.append((*rooms[left][place], left, place))
    if fitting:
      room, row, left, place = min(fitting)
      rooms[left].pop(place)
    else:
      room, row, left = seq + 1, len(members), images
      members.append([])
    members[row].append(i)
    if room > length:
      bisect.insort(rooms[left - count], (room - length, row))
  return PackedRows(documents, [tuple(row) for row in members], seq, images)
