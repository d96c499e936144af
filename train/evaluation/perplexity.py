# SPDX-License-Identifier: Apache-2.0
"""Measures how well a model predicts texts.

A text that exceeds the model's length is read in windows of that length. Each
window begins `stride` tokens after the previous window, or fewer at the end of
the text. A token is counted only in the first window that predicts it. By
default, as in lm-evaluation-harness, the stride equals the length, and only the
last two windows overlap. A shorter stride gives each token more context, but
needs more windows.

  length 4, stride 2      read      a b c d | c d e f | e f g h
                          counted   b c d e |     f g |     h i
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from coat_jax.models import Decoder
from train.data.text import Text
from train.evaluation.scoring import Request, Scorer

Documents = Literal["apart", "joined"]


class Perplexity(NamedTuple):
  """Counts for a text, and measures that are computed from the counts."""

  documents: int  # Documents with at least one token.
  tokens: int
  bytes: int  # Size of the texts in UTF-8.
  words: int  # Parts between white space, as in lm-evaluation-harness.
  nats: float  # Total cross-entropy of all tokens.

  @property
  def nats_per_token(self) -> float:
    return self.nats / self.tokens

  @property
  def perplexity(self) -> float:
    """Perplexity per token, which depends on the tokenizer."""
    return exp(self.nats_per_token)

  @property
  def bits_per_byte(self) -> float:
    """Bits per byte; comparable between models with different tokenizers."""
    return self.nats / math.log(2) / self.bytes

  @property
  def word_perplexity(self) -> float:
    """Perplexity per word; comparable between tokenizers on the same text."""
    return exp(self.nats / self.words)


def perplexity(
  model: Decoder,
  text: Text,
  documents: Iterable[str],
  *,
  length: int,
  stride: int | None = None,
  batch: int = 8,
  kind: Documents = "apart",
) -> Perplexity:
  """Measures how well a model predicts texts.

  Every token of a document is predicted. Before the document, the model reads
  the token that `prefix_token` returns; this token is not counted. By
  default, `stride` equals `length`. With `kind` "apart", each document is
  scored alone. With "joined", all documents form one text, so a document's
  context includes the documents before it.
  """
  stride = length if stride is None else stride
  if not 1 <= stride <= length:
    raise ValueError(
      f"evaluate: stride must be 1 to {length}, the length of a window, got "
      f"{stride}; pass a stride in this range, or leave it out"
    )
  scorer, prefix = Scorer(model, length=length, batch=batch), prefix_token(text)
  counts = np.zeros(4, np.int64)

  def streams() -> Iterator[tuple[list[int], list[bool]]]:
    for document in documents:
      if tokens := text.encode(document):
        words = len(re.split(r"\s+", document))
        size = len(document.encode(errors="surrogateescape"))
        counts[:] += 1, len(tokens), size, words
        is_counted = [False] + [True] * len(tokens)
        yield [prefix, *tokens], is_counted

  found = streams()
  if kind == "joined":
    parts = list(found)
    tokens = [token for tokens, _ in parts for token in tokens]
    found = [(tokens, [flag for _, flags in parts for flag in flags])]
  asked = (
    (flags[middle:end], Request(tokens[start:middle], tokens[middle:end]))
    for tokens, flags in found
    for start, middle, end in windows(len(tokens), length, stride)
  )
  nats = 0.0
  scores = scorer.score_each(asked)
  for flags, score in tqdm(scores, desc="perplexity", unit="window", delay=2):
    nats -= float(np.sum(score.logprobs[flags], dtype=np.float64))
  if not counts[0]:
    raise ValueError(
      "evaluate: the texts must have at least one token, got none; pass "
      "--data with a text that is not empty"
    )
  return Perplexity(*map(int, counts), nats=nats)


def windows(
  count: int, length: int, stride: int
) -> Iterator[tuple[int, int, int]]:
  """Yields (start, middle, end) for each window.

  The context is tokens[start:middle], and tokens[middle:end] are counted.
  """
  done, step = 1, length
  while done < count:
    end = min(count, done + step)
    yield max(0, end - 1 - length), done, end
    done, step = end, stride


def prefix_token(text: Text) -> int:
  """Returns the token to put before a text: BOS, end of text, or a newline."""
  if text.prefix_token is not None:
    return text.prefix_token
  if line_end := text.encode("\n"):
    return line_end[-1]
  raise ValueError(
    "evaluate: the tokenizer must have a token that texts begin or end with, "
    "got none; set bos_token or eos_token in its tokenizer_config.json"
  )


def exp(x: float) -> float:
  """Returns exp(x), or infinity if it overflows."""
  return math.inf if x >= 709 else math.exp(x)
