# SPDX-License-Identifier: Apache-2.0
"""Measures how well a model predicts texts.

A text that exceeds the model's length is read in windows. Each window is as
long as the model allows, begins `stride` tokens after the previous one, and
counts only the tokens that no earlier window counted. If the stride equals the
length, each token is read once, as in lm-evaluation-harness. A shorter stride
gives each token more context, but needs more windows.

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
  """Counts of a text, and measures that are computed from them."""

  documents: int  # Documents with at least one token.
  tokens: int  # All tokens; each is predicted.
  bytes: int  # Size of the texts in UTF-8.
  words: int  # Words split at white space, as in lm-evaluation-harness.
  nats: float  # Cross-entropy of all tokens together.

  @property
  def nats_per_token(self) -> float:
    """The mean cross-entropy of a token."""
    return self.nats / self.tokens

  @property
  def perplexity(self) -> float:
    """Perplexity per token, which depends on the tokenizer."""
    return exp(self.nats_per_token)

  @property
  def bits_per_byte(self) -> float:
    """Bits per byte, which can be compared between tokenizers."""
    return self.nats / math.log(2) / self.bytes

  @property
  def word_perplexity(self) -> float:
    """Perplexity per word, comparable between tokenizers on one text."""
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

  Every token of a document is predicted. The model first reads the token that
  `prefix_token` returns, which is not counted. `stride` is `length` by default.
  With `kind` "apart" each document is a text of its own; with "joined" all are
  one text, in which a document sees the documents before it.
  """
  stride = length if stride is None else stride
  if not 1 <= stride <= length:
    raise ValueError(
      f"evaluate: stride must be 1 to {length}, the length of a window, got "
      f"{stride}; pass such a number, or leave it out"
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
      "evaluate: at least one document must have a token, got none; pass "
      "--data with a text"
    )
  return Perplexity(*map(int, counts), nats=nats)


def windows(
  count: int, length: int, stride: int
) -> Iterator[tuple[int, int, int]]:
  """Yields (start, middle, end); tokens from `middle` to `end` are counted."""
  done, step = 1, length
  while done < count:
    end = min(count, done + step)
    yield max(0, end - 1 - length), done, end
    done, step = end, stride


def prefix_token(text: Text) -> int:
  """Returns the token to read before a text: BOS, end of text, or a newline."""
  if text.prefix_token is not None:
    return text.prefix_token
  if line_end := text.encode("\n"):
    return line_end[-1]
  raise ValueError(
    "evaluate: the tokenizer must have a token that texts begin or end with, "
    "got none; name bos_token or eos_token in its tokenizer_config.json"
  )


def exp(x: float) -> float:
  """Computes exp(x); infinity if it overflows."""
  return math.inf if x >= 709 else math.exp(x)
