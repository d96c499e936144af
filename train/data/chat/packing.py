# SPDX-License-Identifier: Apache-2.0
"""Packs documents into rows of `seq + 1` tokens.

Documents are placed in order of decreasing length, each into the fullest row
that still has room for it (best-fit decreasing). The seed sets the order of
documents of equal length. Segment numbers keep attention within one document: 1
for the first document in a row, 2 for the second, and so on; 0 for padding.

All rows have room for the same number of images, so that all batches have the
same shapes.
"""

import bisect
import dataclasses
from typing import ClassVar

import numpy as np

from train.data.chat.documents import Documents


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
  """Rows of packed documents, assembled when they are read."""

  has_padding: ClassVar[bool] = True

  documents: Documents
  members: list[tuple[int, ...]]  # The indices of the documents in each row.
  seq: int  # Number of tokens that a model reads; rows have one more.
  images: int = 0  # Number of image slots in each row; 0 for text only.

  def __len__(self) -> int:
    return len(self.members)

  @property
  def filled(self) -> float:
    """The share of the rows' tokens that are not padding."""
    lengths = self.documents.lengths
    used = sum(int(lengths[list(row)].sum()) for row in self.members)
    return used / (len(self) * (self.seq + 1))

  def read(self, row: int | None) -> dict[str, np.ndarray]:
    """Assembles a row; returns a row of padding if `row` is None."""
    members = () if row is None else self.members[row]
    tokens = np.zeros(self.seq + 1, np.int32)
    segments, mask = np.zeros_like(tokens), np.zeros(self.seq + 1, bool)
    place = 0
    for number, member in enumerate(members):
      own, is_target = self.documents.tokens_of(member)
      here = slice(place, place + len(own))
      tokens[here], mask[here] = own, is_target
      segments[here] = number + 1
      place = here.stop
    found = {"tokens": tokens, "segments": segments, "is_target": mask}
    if images := self.documents.images:
      images_of = self.documents.images_of
      own = [image for member in members for image in images_of(member)]
      found["images"] = images.reader.read(own, slots=self.images)
    return found


def pack(
  documents: Documents,
  numbers: np.ndarray,
  *,
  seq: int,
  seed: int,
  is_packed: bool = True,
) -> PackedRows:
  """Packs the documents with the indices `numbers` into rows.

  If `is_packed` is false, each row contains only one document.
  """
  lengths = documents.lengths
  longest = int(lengths[numbers].max(initial=0))
  if longest > seq + 1:
    raise ValueError(
      f"pack: documents must have at most {seq} + 1 tokens, got {longest}; "
      f"load them with seq={seq}"
    )
  if documents.images is None:
    counts, images = np.zeros(len(documents), np.int64), 0
  else:
    counts = np.diff(documents.images.starts)
    # Take the maximum over all documents, so that shapes do not depend on which
    # documents are held out.
    images = int(counts.max(initial=1))
  if not is_packed:
    return PackedRows(documents, [(int(i),) for i in numbers], seq, images)
  order = np.random.default_rng(seed).permutation(numbers)
  order = order[np.argsort(-lengths[order], kind="stable")]
  # rooms[i] is a sorted list of (free tokens, row), for rows that have i free
  # image slots.
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
