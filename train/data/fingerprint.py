# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of data: whether a resumed run reads the tokens of before.

What is in memory is hashed whole, and so are token files of up to 256 MiB in
all. Of larger ones are read blocks of 64 KiB: the first and the last of each
file, and 4096 at equal distances. So another file, order, length or
tokenization is seen, and any change that is longer than the distance between
two blocks, a 4096th of all. A shorter one between them is not. `change_times`
is a hint of those.
"""

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from train.data.token_files import TokenFile

_BLOCK_BYTES, _BLOCKS = 1 << 16, 1 << 12
# They hide the latency of disks.
_THREADS = 16

Parts = Sequence[np.ndarray | TokenFile]


def fingerprint(parts: Parts) -> str:
  """Hashes the stream of tokens that arrays or files are, one after another.

  Args:
    parts: Flat arrays, or files; all of one dtype.

  Returns:
    `2:` and 32 digits. Where all is read, it does not depend on where the
    stream is cut into parts; else the parts' sizes count too.
  """
  sizes = [len(part) for part in parts]
  if is_read_whole(parts):
    sizes = [sum(sizes)]
  digest = hashlib.sha256(str(sizes).encode())
  with ThreadPoolExecutor(_THREADS) as pool:
    for batch in itertools.batched(_blocks(parts), 4 * _THREADS):
      for tokens in pool.map(lambda block: block[0][block[1]], batch):
        digest.update(np.ascontiguousarray(tokens))
  return f"2:{digest.hexdigest()[:32]}"


def is_read_whole(parts: Parts) -> bool:
  """Whether the fingerprint sees every token."""
  return _distance(parts) == _BLOCK_BYTES


def change_times(parts: Parts) -> str | None:
  """Hashes when each file was changed last; None of what is read whole.

  A copy of the same files has other times, so these are a hint only.
  """
  if is_read_whole(parts):
    return None
  times = [os.stat(part.path).st_mtime_ns for part in _files(parts)]
  return hashlib.sha256(str(times).encode()).hexdigest()[:16]


def _files(parts: Parts) -> list[TokenFile]:
  return [part for part in parts if isinstance(part, TokenFile)]


def _distance(parts: Parts) -> int:
  """Bytes from the beginning of a block to that of the next one."""
  size = sum(len(file) * file.itemsize for file in _files(parts))
  return max(_BLOCK_BYTES, -(-size // _BLOCKS))


def _blocks(parts: Parts) -> Iterator[tuple[np.ndarray | TokenFile, slice]]:
  """Yields what is read of each part."""
  distance = _distance(parts)
  for part in parts:
    if isinstance(part, np.ndarray):
      yield part, slice(None)
      continue
    block = _BLOCK_BYTES // part.itemsize
    starts = list(range(0, len(part), distance // part.itemsize))
    if distance > _BLOCK_BYTES:
      starts.append(max(len(part) - block, 0))
    for start in starts:
      yield part, slice(start, start + block)
