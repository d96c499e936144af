# SPDX-License-Identifier: Apache-2.0
"""Reads flat files of token ids a batch at a time, and fingerprints them.

Files are not memory-mapped: if a mapped file is truncated or its disk fails,
reading it ends the process with SIGBUS, without an error message.

Arrays in memory are hashed whole, and so are files that have at most 256 MiB in
total. In larger files, only blocks of 64 KiB are hashed: the first and last
block of each file, and about 4096 evenly spaced blocks. The fingerprint may
miss a change between two blocks, but such a change alters `change_times`.
"""

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from train.data import sources


@dataclasses.dataclass(frozen=True)
class TokenFile:
  """A flat file of token ids; `len` and slicing work as for an array."""

  path: str
  dtype: str  # uint16 or uint32.
  size: int  # Number of ids.
  offset: int  # Number of bytes before the first id.

  @property
  def itemsize(self) -> int:
    return np.dtype(self.dtype).itemsize

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, where: slice) -> np.ndarray:
    """Reads a slice, which must be smaller than 2 GiB."""
    start, stop, _ = where.indices(self.size)
    wanted = max(stop - start, 0) * self.itemsize
    place = self.offset + start * self.itemsize
    file = _opened(self.path)  # This variable keeps the file open.
    read = os.pread(file.number, wanted, place)
    if len(read) < wanted:
      raise ValueError(
        f"data: {self.path} must have at least "
        f"{self.offset + self.size * self.itemsize} bytes, as when the run "
        f"started, got {os.fstat(file.number).st_size}; restore the file, and "
        "pass --resume"
      )
    return np.frombuffer(read, self.dtype)


def open_tokens(path: str, dtype: str) -> list[TokenFile]:
  """Finds and measures token files; slicing reads their ids."""
  files = sources.find_files(path, suffixes=(".npy", ".bin"))
  _opened.cache_clear()  # Files opened earlier may have been replaced.
  return [_measured(str(file), dtype) for file in files]


def _measured(path: str, dtype: str) -> TokenFile:
  """Finds where the ids of a file begin and how many there are."""
  with open(path, "rb") as file:
    has_header = file.read(6) == b"\x93NUMPY"
  if not has_header:
    size, itemsize = os.path.getsize(path), np.dtype(dtype).itemsize
    if size % itemsize:
      raise ValueError(
        f"load_tokens: the size of a file of {dtype} must be a multiple of "
        f"{itemsize} bytes, got {size} bytes in {path}; check dtype, or copy "
        "the file again if it was cut short"
      )
    return TokenFile(path, dtype, size // itemsize, offset=0)
  try:
    array = np.load(path, mmap_mode="r")
  except ValueError as error:
    raise ValueError(
      f"load_tokens: {path} begins like a NumPy file but cannot be read as one "
      f"({error}); write it again with numpy.save"
    ) from error
  if array.dtype != np.dtype(dtype) or array.ndim != 1:
    raise ValueError(
      f"load_tokens: {path} must hold a flat array of {dtype}, got "
      f"{array.dtype} {list(array.shape)}; pass the array's dtype, or save the "
      "array flat"
    )
  return TokenFile(path, dtype, len(array), offset=array.offset)


class _Opened:
  """An open file that threads read at independent positions."""

  def __init__(self, path: str):
    self.number = os.open(path, os.O_RDONLY)

  def __del__(self):
    if hasattr(self, "number"):
      os.close(self.number)


# A published corpus has thousands of files, but a process can usually open only
# 1024 at a time.
@functools.lru_cache(maxsize=256)
def _opened(path: str) -> _Opened:
  return _Opened(path)


_BLOCK_BYTES, _BLOCKS = 1 << 16, 1 << 12
_THREADS = 16

Parts = Sequence[np.ndarray | TokenFile]


def fingerprint(parts: Parts) -> str:
  """Hashes the token stream that these arrays or files form."""
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
  return _distance(parts) == _BLOCK_BYTES


def change_times(parts: Parts) -> str | None:
  """Hashes modification times; None if the fingerprint covers all data."""
  if is_read_whole(parts):
    return None
  return hash_change_times(part.path for part in _files(parts))


def hash_change_times(files: Iterable[str | os.PathLike]) -> str:
  """Hashes the files' modification times."""
  times = [os.stat(file).st_mtime_ns for file in files]
  return hashlib.sha256(str(times).encode()).hexdigest()[:16]


def _files(parts: Parts) -> list[TokenFile]:
  return [part for part in parts if isinstance(part, TokenFile)]


def _distance(parts: Parts) -> int:
  """Counts the bytes from the start of one block to the start of the next."""
  size = sum(len(file) * file.itemsize for file in _files(parts))
  return max(_BLOCK_BYTES, -(-size // _BLOCKS))


def _blocks(parts: Parts) -> Iterator[tuple[np.ndarray | TokenFile, slice]]:
  """Yields (part, slice) for each slice that is hashed."""
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
