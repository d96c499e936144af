# SPDX-License-Identifier: Apache-2.0
"""Flat files of token ids, of which only what a batch needs is read.

Why not memory-mapped: where a file was cut short, or its disk fails, reading a
map ends the process with SIGBUS, and no sentence says why.
"""

import dataclasses
import functools
import os

import numpy as np

from train.data import sources


@dataclasses.dataclass(frozen=True)
class TokenFile:
  """A flat file of token ids; `len` and slices work as on an array.

  Attributes:
    path: The file.
    dtype: Of its ids, uint16 or uint32.
    size: How many ids it holds.
    offset: Bytes before the first one.
  """

  path: str
  dtype: str
  size: int
  offset: int

  @property
  def itemsize(self) -> int:
    """Bytes of an id."""
    return np.dtype(self.dtype).itemsize

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, where: slice) -> np.ndarray:
    """Reads ids, less than 2 GiB of them.

    Raises:
      OSError: the file cannot be read.
      ValueError: it has become shorter.
    """
    start, stop, _ = where.indices(self.size)
    wanted = max(stop - start, 0) * self.itemsize
    place = self.offset + start * self.itemsize
    file = _opened(self.path)  # Held, so that nothing closes it meanwhile.
    read = os.pread(file.number, wanted, place)
    if len(read) < wanted:
      raise ValueError(
        f"load_tokens: {self.path} must keep the {self.size} ids that it began "
        f"with, got its end after {place + len(read)} bytes; restore it, and "
        "pass --resume"
      )
    return np.frombuffer(read, self.dtype)


def open_tokens(path: str, dtype: str) -> list[TokenFile]:
  """Opens token files; their content is read when a slice of it is asked for.

  Args:
    path: As for `sources.find_files`; in a folder, files that end in .npy or
      .bin.
    dtype: uint16 or uint32. A NumPy header is checked against it, not needed.

  Returns:
    The files, sorted by path.

  Raises:
    FileNotFoundError: there is none.
    ValueError: a file that cannot be a flat array of this dtype.
  """
  files = sources.find_files(path, suffixes=(".npy", ".bin"))
  _opened.cache_clear()  # There may be other files by these names now.
  return [_measured(str(file), dtype) for file in files]


def _measured(path: str, dtype: str) -> TokenFile:
  """Finds where a file's ids begin and how many they are."""
  with open(path, "rb") as file:
    has_header = file.read(6) == b"\x93NUMPY"
  if not has_header:
    size, itemsize = os.path.getsize(path), np.dtype(dtype).itemsize
    if size % itemsize:
      raise ValueError(
        f"load_tokens: a file of {dtype} must hold a multiple of {itemsize} "
        f"bytes, got {size} in {path}; check dtype, or copy the file again if "
        "it was cut short"
      )
    return TokenFile(path, dtype, size // itemsize, offset=0)
  try:
    array = np.load(path, mmap_mode="r")
  except ValueError as error:
    raise ValueError(
      f"load_tokens: {path} begins as a NumPy file but cannot be read as one "
      f"({error}); write it again with numpy.save"
    ) from error
  if array.dtype != np.dtype(dtype) or array.ndim != 1:
    raise ValueError(
      f"load_tokens: {path} must hold a flat array of {dtype}, got "
      f"{array.dtype} {list(array.shape)}; pass its dtype, or save it flat"
    )
  return TokenFile(path, dtype, len(array), offset=array.offset)


class _Opened:
  """A file that threads read at places of their own."""

  def __init__(self, path: str):
    self.number = os.open(path, os.O_RDONLY)

  def __del__(self):
    if hasattr(self, "number"):
      os.close(self.number)


# A published corpus has thousands of files: stay well below the usual limit of
# 1024 that are open.
@functools.lru_cache(maxsize=256)
def _opened(path: str) -> _Opened:
  return _Opened(path)
