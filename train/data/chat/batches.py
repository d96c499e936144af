# SPDX-License-Identifier: Apache-2.0
"""Rows to batches: deterministic, sharded, resumable.

As `train.data.batches` for a stream of tokens: each epoch visits every row
once, in an order drawn from the seed and the epoch, and a batch may end one
epoch and begin the next. Batch i depends on the seed and i alone, so an
iterator's whole state is one integer.
"""

from typing import Protocol

import grain
import numpy as np

from train.data.batches import rows_of_process


class Rows(Protocol):
  """What batches are made of: `PackedRows`, or `train.data.labelled.Images`.

  Attributes:
    seq: Tokens of a row.
  """

  @property
  def seq(self) -> int: ...

  def __len__(self) -> int: ...

  def read(self, row: int | None) -> dict[str, np.ndarray]:
    """Reads a row, or for None what fills a batch up."""
    ...


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
    rows: From `pack`.
    batch_size: Rows of the global batch, a multiple of `process_count`.
    seed: At least 0 and below 2^32.
    process_index: This process, as `jax.process_index()`.
    process_count: All processes, as `jax.process_count()`.

  Returns:
    Batch i at [i], as for `to_iterator`: tokens int32, segments int32 and mask
    bool, each [batch_size / process_count, seq + 1]; and where documents have
    images, images f32 [batch_size / process_count, images a row, 3, H, W].

  Raises:
    ValueError: sizes that do not fit each other or the data.
  """
  own = rows_of_process(
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
  # With a remainder grain rounds a quotient of floats up.
  groups = numbers.batch(batch_size, drop_remainder=True)
  return groups.map(lambda group: _read(rows, group[own]))


def eval_batches(
  rows: Rows,
  *,
  batch_size: int,
  max_batches: int | None = None,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.MapDataset:
  """Makes the held-out batches, the same ones in every evaluation.

  Args:
    rows: From `pack`, of documents that are held out.
    batch_size: Rows of the global batch, a multiple of `process_count`.
    max_batches: Fewer batches, spread evenly over the rows; None takes all.
    process_index: This process, as `jax.process_index()`.
    process_count: All processes, as `jax.process_count()`.

  Returns:
    Batches as `train_batches` has them. The last is filled with padding, so
    that every held-out row counts.

  Raises:
    ValueError: sizes that do not fit each other, or no row.
  """
  own = rows_of_process(
    "eval_batches", batch_size, process_index, process_count
  )
  if not len(rows) or max_batches is not None and max_batches < 1:
    raise ValueError(
      "eval_batches: at least one row and one batch are needed, got "
      f"{len(rows)} rows and max_batches {max_batches}; hold more out, or pass "
      "None for all"
    )
  count = len(rows)
  if max_batches is not None:
    count = min(count, max_batches * batch_size)
  batches = -(-count // batch_size)
  # Which rows, and padding after them.
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
  options = grain.ReadOptions(
    num_threads=threads, prefetch_buffer_size=threads or 16
  )
  return iter(batches.to_iter_dataset(options))


def count_steps(rows: Rows, *, batch_size: int, epochs: float) -> int:
  """Steps in which each row is visited `epochs` times, rounded up.

  Args:
    rows: From `pack`.
    batch_size: Rows of the global batch.
    epochs: Above 0.

  Raises:
    ValueError: epochs of 0 or less.
  """
  if not epochs > 0:
    raise ValueError(f"count_steps: epochs must be above 0, got {epochs}")
  return int(np.ceil(len(rows) * epochs / batch_size))


def _read(rows: Rows, numbers: np.ndarray) -> dict[str, np.ndarray]:
  """Reads rows; below 0 is padding."""
  read = [rows.read(None if i < 0 else int(i)) for i in numbers]
  return {key: np.stack([row[key] for row in read]) for key in read[0]}
