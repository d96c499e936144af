# SPDX-License-Identifier: Apache-2.0
"""From text or token files to batches: deterministic, sharded, checkpointable.

A `TokenSource` is one flat stream of token ids. Its last share is held out for
evaluation; the rest is cut into windows of `seq_len + 1` tokens, of which a
model reads the first `seq_len` and predicts the last `seq_len`. Each epoch
visits every window once, in an order drawn from the seed. The pipeline is
grain's and shuffles window *numbers*, so that only rows that are used are read
and the iterator's whole state is one integer.

Three kinds of data (`DataConfig`):
  * nothing given: the source text of the running Python's own standard library,
    real text that every machine has, as bytes;
  * text: a file, folder or glob, as bytes or through a `tokenizers` JSON file,
    tokenized once at the start and kept in memory;
  * tokens: flat `uint16` or `uint32` files, memory-mapped and never read whole,
    with NumPy's header or without one, as OLMo publishes Dolma.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import grain
import numpy as np

from train.data import sources

_SAMPLES, _SAMPLE_TOKENS = 64, 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """Where tokens come from.

  Attributes:
    path: A file, a folder (read recursively) or a glob; None is the source text
      of Python's standard library.
    tokenizer: A `tokenizers` JSON file for text; None reads bytes as ids.
    dtype: What the files hold: text, or token ids of this type.
    held_out: Share of the stream, at its end, that is kept for evaluation and
      never trained on; at least one sequence is.

  Raises:
    ValueError: options that exclude each other, or a share outside (0, 1).
  """

  path: str | None = None
  tokenizer: str | None = None
  dtype: Literal["text", "uint16", "uint32"] = "text"
  held_out: float = 0.05

  def __post_init__(self):
    if not 0 < self.held_out < 1:
      raise ValueError(
        "DataConfig: held_out must be a share between 0 and 1, got "
        f"{self.held_out}; 0.05 keeps 5 % for evaluation"
      )
    if self.dtype not in ("text", "uint16", "uint32"):
      raise ValueError(
        "DataConfig: dtype must be 'text', 'uint16' or 'uint32', got "
        f"{self.dtype!r}; name the type that the token files were written in"
      )
    if self.dtype != "text" and self.path is None:
      raise ValueError(
        f"DataConfig: dtype {self.dtype} needs a path, got none; give the "
        "token files, or leave dtype as 'text' for the embedded text"
      )
    if self.dtype != "text" and self.tokenizer is not None:
      raise ValueError(
        f"DataConfig: tokenizer applies to text, got dtype {self.dtype}; leave "
        "tokenizer out, for these files hold token ids already"
      )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenSource:
  """A flat stream of token ids below `vocab_size`; see `load_tokens`.

  Attributes:
    name: Where the tokens come from, for messages.
    parts: Flat integer arrays, or memory-mapped files, one after the other.
    vocab_size: Every id that is read is checked to be below it.
    held_out: Share at the end that is kept for evaluation.
  """

  name: str
  parts: Sequence["np.ndarray | sources.TokenFile"]
  vocab_size: int
  held_out: float

  @functools.cached_property
  def _ends(self) -> list[int]:
    return list(itertools.accumulate(len(part) for part in self.parts))

  @property
  def is_in_memory(self) -> bool:
    return all(isinstance(part, np.ndarray) for part in self.parts)

  def __len__(self) -> int:
    return self._ends[-1] if self.parts else 0

  def read(self, start: int, stop: int) -> np.ndarray:
    """Reads tokens `start` to `stop` of the stream.

    Args:
      start: First token, at least 0.
      stop: One past the last token, at most `len(self)`.

    Returns:
      int32 [stop - start].

    Raises:
      ValueError: an id outside the vocabulary, with the file that holds it.
    """
    tokens = np.empty(stop - start, np.int32)
    index = bisect.bisect_right(self._ends, start)
    done = 0
    while done < len(tokens):
      part = self.parts[index]
      begin = self._ends[index] - len(part)
      ids = part[start + done - begin : stop - begin]
      name = part.path if isinstance(part, sources.TokenFile) else self.name
      sources.check_ids(ids, name, self.vocab_size)
      tokens[done : done + len(ids)] = ids
      done += len(ids)
      index += 1
    return tokens

  def samples(self) -> Iterator[np.ndarray]:
    """Yields up to 64 short pieces spread over the stream, 1 MiB in all."""
    size = min(_SAMPLE_TOKENS, len(self))
    starts = np.linspace(0, len(self) - size, _SAMPLES).astype(int)
    for start in np.unique(starts).tolist():
      yield self.read(start, start + size)

  def fingerprint(self) -> str:
    """A short hash of the length and samples, to tell other data at resume."""
    digest = hashlib.sha256(str(len(self)).encode())
    for sample in self.samples():
      digest.update(sample.tobytes())
    return digest.hexdigest()[:16]

  def train_size(self, seq_len: int) -> int:
    """Number of tokens before the held-out share, which ends the stream."""
    return len(self) - max(math.ceil(len(self) * self.held_out), seq_len + 1)


def load_tokens(config: DataConfig, vocab_size: int) -> TokenSource:
  """Opens the data and checks what can be checked without reading it all.

  Text is read (and tokenized) here, in memory. Token files are mapped: 64 short
  samples are checked here and every batch when it is read.

  Args:
    config: Where tokens come from.
    vocab_size: The model's vocabulary; byte data needs 256 ids at most and
      leaves the others unused.

  Returns:
    The stream of tokens, in the order of the sorted paths.

  Raises:
    FileNotFoundError: nothing at the path, or no file of the kind.
    ValueError: empty data, a file that is not what it was said to be, an
      unreadable tokenizer, or ids outside the vocabulary.
  """
  if config.dtype != "text":
    parts = sources.open_tokens(config.path, config.dtype)
  elif config.tokenizer is None:
    parts = [sources.read_bytes(config.path, vocab_size)]
  else:
    parts = [sources.read_tokenized(config.path, config.tokenizer, vocab_size)]
  source = TokenSource(
    name=config.path or "Python's standard library",
    parts=[part for part in parts if len(part)],
    vocab_size=vocab_size,
    held_out=config.held_out,
  )
  if not len(source):
    raise ValueError(
      f"load_tokens: the data must not be empty, got no token in "
      f"{source.name}; give a path with text"
    )
  _check_samples(source, config.dtype)
  return source


def train_iterator(
  tokens: TokenSource,
  *,
  seq_len: int,
  batch_size: int,
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.DatasetIterator:
  """Batches without end: every window once an epoch, shuffled by the seed.

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
  rows = _rows("train_iterator", batch_size, process_index, process_count)
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
  """The held-out batches, the same ones each time it is iterated.

  Args:
    tokens: From `load_tokens`.
    seq_len: Tokens that a model reads; rows have one more.
    batch_size: Rows of the global batch, a multiple of `process_count`.
    max_batches: Fewer batches, spread evenly over the held-out share; None
      takes all that are whole.
    process_index: This process, as `jax.process_index()`.
    process_count: All processes, as `jax.process_count()`.

  Returns:
    An iterable of {"tokens": int32 [batch_size / process_count, seq_len + 1]}.

  Raises:
    ValueError: sizes that do not fit each other, or too little held out.
  """
  rows = _rows("eval_batches", batch_size, process_index, process_count)
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


def _rows(op: str, batch_size: int, index: int, count: int) -> slice:
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


def _check_samples(tokens: TokenSource, dtype: str) -> None:
  """Finds wrong ids and a wrong dtype before training does."""
  samples = list(tokens.samples())
  is_half_zero = all(
    not ids[::2].any() or not ids[1::2].any() for ids in samples
  )
  has_ids = any(ids.any() for ids in samples)
  if dtype == "uint16" and is_half_zero and has_ids:
    raise ValueError(
      f"load_tokens: {tokens.name} must hold uint16, got zero in every other "
      "place, as uint32 reads; pass dtype uint32"
    )
