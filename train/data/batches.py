# SPDX-License-Identifier: Apache-2.0
"""Turns rows into batches that are deterministic, sharded and resumable.

Rows are packed documents, images, or windows of a token stream. Each epoch of
training visits every row once, in a random order that depends on the seed and
the epoch. A batch may contain the end of one epoch and the beginning of the
next. Batch i depends only on the rows, the batch size, the seed and i, so the
state of an iterator is a single integer.
"""

import dataclasses
from typing import ClassVar, Protocol

import grain
import numpy as np

from train.data.tokens import TokenSource


class Rows(Protocol):
  """Rows from which batches are made."""

  # Whether an incomplete last batch of held-out rows is padded. If False, the
  # batch is dropped.
  has_padding: ClassVar[bool]

  def __len__(self) -> int: ...

  def read(self, row: int | None) -> dict[str, np.ndarray]:
    """Reads a row, or returns a row of padding if `row` is None."""
    ...


@dataclasses.dataclass(frozen=True)
class Windows:
  """Windows of `seq + 1` tokens in a stream; neighbors overlap by one token."""

  has_padding: ClassVar[bool] = False

  tokens: TokenSource
  start: int  # Where the first window begins.
  count: int
  seq: int

  def __len__(self) -> int:
    return self.count

  def read(self, row: int | None) -> dict[str, np.ndarray]:
    if row is None:
      return {"tokens": np.zeros(self.seq + 1, np.int32)}
    first = self.start + row * self.seq
    return {"tokens": self.tokens.read(first, first + self.seq + 1)}


def train_iterator(
  tokens: TokenSource, *, seq_len: int, batch_size: int, seed: int
) -> grain.DatasetIterator:
  """Iterates endlessly over {"tokens": int32 [batch_size, seq_len + 1]}."""
  rows, _ = split_windows(tokens, seq_len)
  batches = train_batches(rows, batch_size=batch_size, seed=seed)
  return iter(read_ahead(batches, threads=tokens.threads))


def split_windows(tokens: TokenSource, seq_len: int) -> tuple[Windows, Windows]:
  """Cuts the training part and the held-out part of a stream into windows."""
  if seq_len < 1:
    raise ValueError(
      f"split_windows: seq_len must be at least 1, got {seq_len}; pass the "
      "number of tokens that a model reads per row"
    )
  start = tokens.train_size(seq_len)
  if start < seq_len + 1:
    raise ValueError(
      "split_windows: training data and held-out data need at least "
      f"{seq_len + 1} tokens each, got {len(tokens)} tokens altogether in "
      f"{tokens.name}; lower the sequence length or the held-out share, or "
      "give more data"
    )
  held_out = (len(tokens) - start - 1) // seq_len
  return (
    Windows(tokens, 0, (start - 1) // seq_len, seq_len),
    Windows(tokens, start, held_out, seq_len),
  )


def train_batches(
  rows: Rows,
  *,
  batch_size: int,
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.MapDataset:
  """Returns an endless dataset of batches; pass it to `read_ahead`.

  Element i of the dataset holds this process's rows of batch i. `batch_size` is
  the number of rows in all processes together.
  """
  own = _own_rows(batch_size, process_index, process_count)
  if not 0 <= seed < 2**32:
    raise ValueError(
      f"train_batches: seed must be at least 0 and below 2^32, got {seed}; "
      "pass a seed in this range"
    )
  if len(rows) < batch_size:
    raise ValueError(
      f"train_batches: the data must have at least {batch_size} rows, which is "
      f"one global batch, got {len(rows)}; lower the batch size or the "
      "sequence length, or give more data"
    )
  numbers = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat()
  # grain gives an endless dataset the length 2^63 - 1. Without drop_remainder,
  # it computes the number of batches in floating point. For batches of 1, this
  # number would be rounded up to 2^63, and len() would raise OverflowError.
  groups = numbers.batch(batch_size, drop_remainder=True)
  return groups.map(lambda group: _read(rows, group[own]))


def held_out_batches(
  rows: Rows,
  *,
  batch_size: int,
  max_batches: int | None = None,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.MapDataset:
  """Returns at most `max_batches` batches of held-out rows.

  An incomplete last batch is padded, or dropped if `rows.has_padding` is false.
  If the batches cannot hold all rows, they contain evenly spaced rows.
  """
  own = _own_rows(batch_size, process_index, process_count)
  if max_batches is not None and max_batches < 1:
    raise ValueError(
      f"held_out_batches: max_batches must be at least 1, got {max_batches}; "
      "pass None for all batches"
    )
  least = 1 if rows.has_padding else batch_size
  if len(rows) < least:
    raise ValueError(
      f"held_out_batches: at least {least} rows must be held out, got "
      f"{len(rows)}; raise held_out, lower the batch size, or give more data"
    )
  count = len(rows)
  if max_batches is not None:
    count = min(count, max_batches * batch_size)
  if not rows.has_padding:
    count -= count % batch_size
  batches = -(-count // batch_size)
  # Row numbers, followed by -1 for padding.
  numbers = np.full(batches * batch_size, -1)
  numbers[:count] = np.arange(count) * len(rows) // count
  groups = numbers.reshape(batches, batch_size)
  return grain.MapDataset.range(batches).map(
    lambda i: _read(rows, groups[i][own])
  )


def read_ahead(
  batches: grain.MapDataset, *, threads: int = 0
) -> grain.IterDataset:
  """Prefetches one batch per thread; with 0 threads, nothing is prefetched.

  grain can save and restore the position of an iterator over the result.
  """
  # grain's default buffer of 500 batches could hold gigabytes.
  options = grain.ReadOptions(
    num_threads=threads, prefetch_buffer_size=threads or 16
  )
  return batches.to_iter_dataset(options)


def _read(rows: Rows, numbers: np.ndarray) -> dict[str, np.ndarray]:
  """Reads and stacks rows; a negative row number stands for padding."""
  read = [rows.read(None if i < 0 else int(i)) for i in numbers]
  return {key: np.stack([row[key] for row in read]) for key in read[0]}


def _own_rows(batch_size: int, index: int, count: int) -> slice:
  """Selects the rows of a global batch that this process reads."""
  if not 0 <= index < count:
    raise ValueError(
      f"batches: process_index must be at least 0 and below {count}, got "
      f"{index}; pass jax.process_index() and jax.process_count()"
    )
  if batch_size < 1 or batch_size % count:
    raise ValueError(
      f"batches: the global batch size must be a positive multiple of {count}, "
      f"the number of processes, got {batch_size}; pass a multiple"
    )
  size = batch_size // count
  return slice(index * size, (index + 1) * size)
