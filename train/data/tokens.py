# SPDX-License-Identifier: Apache-2.0
"""Reads one flat stream of token ids from text or from token files.

The end of the stream is held out for evaluation. Text is tokenized at the start
and kept in memory. Token files are flat files of uint16 or uint32, with or
without NumPy's header. They are read a batch at a time.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from coat_jax.models.ranges import check_fields
from train.data import sources, token_files
from train.data.token_files import TokenFile, open_tokens
from train.options import Share, fixed

Dtype = Literal["text", "uint16", "uint32"]
DTYPES = get_args(Dtype)
_THREADS = 16
# The number of samples to check before training, and the tokens per sample.
_SAMPLES, _SAMPLE_TOKENS = 64, 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """Options for the source of tokens.

  Attributes:
    path: A file, a folder (read recursively) or a glob; None for the source
      code of Python's standard library.
    tokenizer: A `tokenizers` JSON file for text; None to use bytes as ids.
    dtype: The content of the files: text, or token ids of this type.
    held_out: Share of the stream to hold out for evaluation, at most 0.5. The
      held-out part is the end of the stream, and has at least one sequence.

  Raises:
    ValueError: Options are incompatible or out of range.
  """

  path: str | None = None
  tokenizer: str | None = None
  dtype: Dtype = "text"
  held_out: Share = fixed(0.05)

  def __post_init__(self):
    check_fields(self)
    if self.dtype != "text" and self.path is None:
      raise ValueError(
        f"DataConfig: dtype {self.dtype} needs a path, got none; give the path "
        "of the token files, or leave dtype out to use the default text, the "
        "source code of Python's standard library"
      )
    if self.dtype != "text" and self.tokenizer is not None:
      raise ValueError(
        f"DataConfig: a tokenizer requires dtype text, got dtype {self.dtype}; "
        "leave the tokenizer out if the files hold token ids"
      )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenSource:
  """A flat stream of token ids below `vocab_size`; see `load_tokens`."""

  name: str  # Where the tokens come from; errors show it.
  parts: Sequence[np.ndarray | TokenFile]  # All flat, in the stream's order.
  vocab_size: int  # `read` checks that every id is below `vocab_size`.
  held_out: float  # The share held out for evaluation, at the stream's end.

  @functools.cached_property
  def _ends(self) -> list[int]:
    return list(itertools.accumulate(len(part) for part in self.parts))

  @property
  def threads(self) -> int:
    """Number of threads that prefetch; 0 if all tokens are in memory."""
    is_in_memory = all(isinstance(part, np.ndarray) for part in self.parts)
    return 0 if is_in_memory else _THREADS

  def __len__(self) -> int:
    return self._ends[-1] if self.parts else 0

  def read(self, start: int, stop: int) -> np.ndarray:
    """Reads tokens `start` to `stop - 1` of the stream, as int32."""
    tokens = np.empty(stop - start, np.int32)
    index = bisect.bisect_right(self._ends, start)
    done = 0
    while done < len(tokens):
      part = self.parts[index]
      begin = self._ends[index] - len(part)
      ids = part[start + done - begin : stop - begin]
      name = part.path if isinstance(part, TokenFile) else self.name
      sources.check_ids(ids, name, self.vocab_size)
      tokens[done : done + len(ids)] = ids
      done += len(ids)
      index += 1
    return tokens

  @functools.cached_property
  def fingerprint(self) -> str:
    """A hash of the tokens; a resumed run must have the same hash.

    Only sampled blocks of large token files are hashed.
    """
    return token_files.fingerprint(self.parts)

  @functools.cached_property
  def change_times(self) -> str | None:
    return token_files.change_times(self.parts)

  def train_size(self, seq_len: int) -> int:
    """Counts the tokens before the held-out part."""
    return len(self) - max(math.ceil(len(self) * self.held_out), seq_len + 1)


def load_tokens(config: DataConfig, vocab_size: int) -> TokenSource:
  """Opens the data; the stream contains files in the order of their paths.

  If the data are token files, only 64 short samples are checked here. All other
  tokens are checked when a batch reads them.
  """
  if config.dtype != "text":
    assert config.path is not None  # `DataConfig` checks it.
    parts = open_tokens(config.path, config.dtype)
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
      f"{source.name}; give a path to text or token files"
    )
  _check_samples(source, config.dtype)
  return source


def _check_samples(tokens: TokenSource, dtype: str) -> None:
  """Detects ids outside the vocabulary, and uint32 files read as uint16."""
  size = min(_SAMPLE_TOKENS, len(tokens))
  starts = np.linspace(0, len(tokens) - size, _SAMPLES).astype(int)
  samples = [tokens.read(x, x + size) for x in np.unique(starts).tolist()]
  is_half_zero = all(
    not ids[::2].any() or not ids[1::2].any() for ids in samples
  )
  has_ids = any(ids.any() for ids in samples)
  if dtype == "uint16" and is_half_zero and has_ids:
    raise ValueError(
      f"load_tokens: every other uint16 in samples of {tokens.name} is zero, "
      "so its ids are probably uint32; pass dtype uint32"
    )
