# SPDX-License-Identifier: Apache-2.0
"""From a stream of tokens to batches: deterministic, sharded, resumable.

The stream is cut into windows of `seq_len + 1` tokens, of which a model reads
the first `seq_len` and predicts the last `seq_len`. Each epoch visits every
window of the training share once, in an order drawn from the seed. The pipeline
is grain's and shuffles window *numbers*, so that only rows that are used are
read and the iterator's whole state is one integer.
"""

import grain
import numpy as np

from train.data.tokens import TokenSource


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
  rows = rows_of_process(
    "train_iterator", batch_size, process_index, process_count
  )
  if not 0 <= seed < 2**32:
    raise ValueError(
      f"train_iterator: seed must be at least 0 and below 2^32, got {seed}; "
      "pass another"
    )
  size = tokens.train_size(seq_len)
  windows = _count_windows("train_iterator", tokens, size, seq_len)
  if windows < batch_size:
    raise ValueError(
      f"train_iterator: a global batch needs {batch_size} windows of {seq_len} "
      f"tokens, got {windows} in the {size} training tokens of {tokens.name}; "
      "lower the batch size or the sequence length, or give more data"
    )
  numbers = grain.MapDataset.range(windows).seed(seed).shuffle().repeat()
  # With a remainder grain rounds a quotient of floats up: batches of one of an
  # endless dataset would be 2^63, and len() can say no more than 2^63 - 1.
  groups = numbers.batch(batch_size, drop_remainder=True)
  return iter(_read_windows(tokens, groups, rows, 0, seq_len))


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
    tokens: From `load_tokens`.
    seq_len: Tokens that a model reads; rows have one more.
    batch_size: Rows of the global batch, a multiple of `process_count`.
    max_batches: Fewer batches, spread evenly over the held-out share; None
      takes all whole ones.
    process_index: This process, as `jax.process_index()`.
    process_count: All processes, as `jax.process_count()`.

  Returns:
    An iterable of {"tokens": int32 [batch_size / process_count, seq_len + 1]}.

  Raises:
    ValueError: sizes that do not fit each other, or too little held out.
  """
  rows = rows_of_process(
    "eval_batches", batch_size, process_index, process_count
  )
  if max_batches is not None and max_batches < 1:
    raise ValueError(
      f"eval_batches: max_batches must be at least 1, got {max_batches}; pass "
      "None for all"
    )
  start = tokens.train_size(seq_len)
  _count_windows("eval_batches", tokens, start, seq_len)
  windows = (len(tokens) - start - 1) // seq_len
  if windows < batch_size:
    raise ValueError(
      f"eval_batches: a batch needs {batch_size} windows of {seq_len} tokens, "
      f"got {windows} in the {len(tokens) - start} held-out tokens of "
      f"{tokens.name}; raise held_out (now {tokens.held_out}), lower the "
      "evaluation batch, or give more data"
    )
  count = min(max_batches or windows, windows // batch_size) * batch_size
  numbers = grain.MapDataset.range(count).map(lambda i: i * windows // count)
  return _read_windows(tokens, numbers.batch(batch_size), rows, start, seq_len)


def _read_windows(
  tokens: TokenSource,
  numbers: grain.MapDataset,
  rows: slice,
  start: int,
  seq_len: int,
) -> grain.IterDataset:
  """From batches of window numbers to this process's rows of tokens."""

  def read(batch: np.ndarray) -> dict[str, np.ndarray]:
    firsts = [start + int(number) * seq_len for number in batch[rows]]
    windows = [tokens.read(first, first + seq_len + 1) for first in firsts]
    return {"tokens": np.stack(windows)}

  # Threads hide the latency of disks; in memory they only contend. grain's own
  # buffer of 500 elements would be gigabytes of batches.
  threads = 0 if tokens.is_in_memory else 16
  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=16)
  return numbers.map(read).to_iter_dataset(options)


def rows_of_process(op: str, batch_size: int, index: int, count: int) -> slice:
  """Which rows of a global batch are this process's."""
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


def _count_windows(
  op: str, tokens: TokenSource, size: int, seq_len: int
) -> int:
  """Whole windows in the `size` training tokens; at least one."""
  if seq_len < 1:
    raise ValueError(
      f"{op}: seq_len must be at least 1, got {seq_len}; pass a sequence length"
    )
  if size < seq_len + 1:
    raise ValueError(
      f"{op}: training and evaluation each need a sequence of {seq_len} + 1 "
      f"tokens, got {len(tokens)} tokens in all in {tokens.name}; lower the "
      "sequence length or give more data"
    )
  return (size - 1) // seq_len
