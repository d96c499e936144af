# SPDX-License-Identifier: Apache-2.0
"""From rows to batches: deterministic, sharded, resumable.

Rows are packed documents, images, or windows of a stream of tokens. Each epoch
visits every row once, in an order drawn from the seed and the epoch; a batch
may end one epoch and begin the next. grain shuffles row *numbers*, so that only
rows that are used are read. Batch i depends on the seed and i alone, so the
whole state of an iterator is one integer.
"""

import dataclasses
from typing import ClassVar, Protocol

import grain
import numpy as np

from train.data.tokens import TokenSource

# Threads that hide the latency of disks; in memory they only contend.
_THREADS = 16


class Rows(Protocol):
  """Rows to batch.

  Attributes:
    seq: Tokens of a row.
    has_padding: Whether a model ignores the row that fills a batch up; else
      only whole batches are made.
  """

  has_padding: ClassVar[bool]

  @property
  def seq(self) -> int: ...

  def __len__(self) -> int: ...

  def read(self, row: int | None) -> dict[str, np.ndarray]:
    """Reads a row, or for None the row that fills a batch up."""
    ...


@dataclasses.dataclass(frozen=True)
class Windows:
  """Windows of `seq + 1` tokens of a stream, the first of which is at `start`.

  A model reads the first `seq` tokens and predicts the last `seq`; so windows
  overlap in one token.
  """

  has_padding: ClassVar[bool] = False

  tokens: TokenSource
  start: int
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
  tokens: TokenSource,
  *,
  seq_len: int,
  batch_size: int,
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.DatasetIterator:
  """Makes an endless iterator: every window once an epoch, in seeded order.

  The order does not depend on the number of processes: process p reads rows
  p * batch_size / process_count onward of each global batch, so the parts put
  side by side are the batch that one process would have read. The iterator is
  saved and restored with `grain.checkpoint.CheckpointSave` and
  `CheckpointRestore`.

  Args:
    tokens: From `load_tokens`.
    seq_len: Tokens that a model reads; rows have one more.
    batch_size: Rows of the global batch, a multiple of `process_count`.
    seed: At least 0 and below 2^32.
    process_index: This process, as `jax.process_index()`.
    process_count: All processes, as `jax.process_count()`.

  Returns:
    An iterator of {"tokens": int32 [batch_size / process_count, seq_len + 1]}.

  Raises:
    ValueError: sizes that do not fit each other or the data.
  """
  found = train_batches(
    train_windows(tokens, seq_len),
    batch_size=batch_size,
    seed=seed,
    process_index=process_index,
    process_count=process_count,
  )
  return to_iterator(found, threads=threads_of(tokens))


def train_windows(tokens: TokenSource, seq_len: int) -> Windows:
  """Cuts the training share of a stream into windows."""
  size = tokens.train_size(seq_len)
  return Windows(tokens, 0, _count_windows(tokens, size, seq_len), seq_len)


def eval_batches(
  tokens: TokenSource,
  *,
  seq_len: int,
  batch_size: int,
  max_batches: int | None = None,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.IterDataset:
  """Makes the held-out batches, the same ones in every evaluation.

  Args:
    tokens, seq_len, batch_size, process_index, process_count: See
      `train_iterator`.
    max_batches: Fewer batches, spread evenly over the held-out share; None
      takes all whole ones.

  Returns:
    An iterable of {"tokens": int32 [batch_size / process_count, seq_len + 1]}.

  Raises:
    ValueError: sizes that do not fit each other, or too little held out.
  """
  found = held_out_batches(
    held_out_windows(tokens, seq_len, batch_size),
    batch_size=batch_size,
    max_batches=max_batches,
    process_index=process_index,
    process_count=process_count,
  )
  return found.to_iter_dataset(read_options(threads_of(tokens)))


def held_out_windows(
  tokens: TokenSource, seq_len: int, batch_size: int
) -> Windows:
  """Cuts the held-out share of a stream into windows, at least a batch."""
  start = tokens.train_size(seq_len)
  _count_windows(tokens, start, seq_len)
  windows = (len(tokens) - start - 1) // seq_len
  if windows < batch_size:
    raise ValueError(
      f"eval_batches: a batch needs {batch_size} windows of {seq_len} tokens, "
      f"got {windows} in the {len(tokens) - start} held-out tokens of "
      f"{tokens.name}; raise held_out (now {tokens.held_out}), lower the "
      "evaluation batch, or give more data"
    )
  return Windows(tokens, start, windows, seq_len)


def train_batches(
  rows: Rows,
  *,
  batch_size: int,
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.MapDataset:
  """Makes endless batches; those of all processes side by side are the batch.

  Args:
    rows: Such as from `pack`.
    batch_size, seed, process_index, process_count: See `train_iterator`.

  Returns:
    Batch i at [i], for `to_iterator`: the arrays of rows, stacked.

  Raises:
    ValueError: sizes that do not fit each other or the data.
  """
  own = _rows_of_process(
    "train_batches", batch_size, process_index, process_count
  )
  if not 0 <= seed < 2**32:
    raise ValueError(
      f"train_batches: seed must be at least 0 and below 2^32, got {seed}; "
      "pass another"
    )
  if len(rows) < batch_size:
    raise ValueError(
      f"train_batches: a global batch needs {batch_size} rows of {rows.seq} "
      f"tokens, got {len(rows)}; lower the batch size or the sequence length, "
      "or give more data"
    )
  numbers = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat()
  # With a remainder grain rounds a quotient of floats up: batches of one of an
  # endless dataset would be 2^63, and len() can say no more than 2^63 - 1.
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
  """Makes batches of rows, the same ones each time; padding may fill the last.

  With `max_batches` there are fewer, spread evenly over the rows.
  """
  own = _rows_of_process(
    "eval_batches", batch_size, process_index, process_count
  )
  if max_batches is not None and max_batches < 1:
    raise ValueError(
      f"eval_batches: max_batches must be at least 1, got {max_batches}; pass "
      "None for all"
    )
  if not len(rows):
    raise ValueError(
      "eval_batches: at least one row is needed, got none; hold more out"
    )
  count = len(rows)
  if max_batches is not None:
    count = min(count, max_batches * batch_size)
  if not rows.has_padding:
    count -= count % batch_size
  batches = -(-count // batch_size)
  # Row numbers, and -1 for padding after them.
  numbers = np.full(batches * batch_size, -1)
  numbers[:count] = np.arange(count) * len(rows) // count
  groups = numbers.reshape(batches, batch_size)
  return grain.MapDataset.range(batches).map(
    lambda i: _read(rows, groups[i][own])
  )


def to_iterator(
  batches: grain.MapDataset, *, threads: int = 0
) -> grain.DatasetIterator:
  """Makes an iterator, saved and restored as `grain.checkpoint` does.

  Args:
    batches: From `train_batches`.
    threads: That read a batch each, ahead of its use; 0 for none. Text is in
      memory, where threads only contend. Images are read, decoded and resized
      by Pillow, which does not hold the interpreter's lock meanwhile: threads
      are enough, and processes would have each batch sent to them and back.
  """
  return iter(batches.to_iter_dataset(read_options(threads)))


def read_options(threads: int) -> grain.ReadOptions:
  """Returns the options that read batches ahead in so many threads."""
  # grain's own buffer of 500 elements would be gigabytes of batches.
  return grain.ReadOptions(
    num_threads=threads, prefetch_buffer_size=threads or 16
  )


def threads_of(tokens: TokenSource) -> int:
  """Returns how many threads read batches of a stream ahead."""
  return 0 if tokens.is_in_memory else _THREADS


def count_steps(rows: Rows, *, batch_size: int, epochs: float) -> int:
  """Steps in which each row is visited `epochs` times, rounded up."""
  if not epochs > 0:
    raise ValueError(f"count_steps: epochs must be above 0, got {epochs}")
  return int(np.ceil(len(rows) * epochs / batch_size))


def _read(rows: Rows, numbers: np.ndarray) -> dict[str, np.ndarray]:
  """Reads rows; below 0 is padding."""
  read = [rows.read(None if i < 0 else int(i)) for i in numbers]
  return {key: np.stack([row[key] for row in read]) for key in read[0]}


def _rows_of_process(op: str, batch_size: int, index: int, count: int) -> slice:
  """Selects the rows of a global batch that this process reads."""
  if not 0 <= index < count:
    raise ValueError(
      f"{op}: process_index must be at least 0 and below {count}, got {index}; "
      "pass jax.process_index() and jax.process_count()"
    )
  if batch_size < 1 or batch_size % count:
    raise ValueError(
      f"{op}: the global batch must be a positive multiple of the {count} "
      f"processes, got {batch_size}; pass such a batch size"
    )
  size = batch_size // count
  return slice(index * size, (index + 1) * size)


def _count_windows(tokens: TokenSource, size: int, seq_len: int) -> int:
  """Whole windows in the `size` training tokens; at least one."""
  if seq_len < 1:
    raise ValueError(
      f"windows: seq_len must be at least 1, got {seq_len}; pass a length"
    )
  if size < seq_len + 1:
    raise ValueError(
      f"windows: training and evaluation each need a sequence of {seq_len} + 1 "
      f"tokens, got {len(tokens)} tokens in all in {tokens.name}; lower the "
      "sequence length or give more data"
    )
  return (size - 1) // seq_len
