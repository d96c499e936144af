# SPDX-License-Identifier: Apache-2.0
"""Computes log-probabilities of tokens given the tokens before them.

A row is a context followed by its continuation. Rows are padded on the right to
one of a few lengths: 64, 128, 256 and so on, up to the `Scorer`'s `length`. No
real token attends to padding, so padding does not change a row's score. One
program is compiled for each length that occurs.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from coat_jax.layers.vocabulary import loss_positions
from coat_jax.models import Decoder, VisionLanguageModel
from train.source import decoder_of

_SMALLEST_BUCKET = 64
# How many batches of rows are sorted by length together.
_SORTED = 64


class Request(NamedTuple):
  """Tokens to score."""

  # Ids of the tokens before the continuation, at least one.
  context: Sequence[int]
  continuation: Sequence[int]  # Ids of the tokens to score, at least one.
  # f32 [images, C, H, W], with the same number of images in all requests. A
  # request with images must not be too long: truncation could remove images.
  images: np.ndarray | None = None


class Score(NamedTuple):
  """The score of a continuation."""

  logprobs: np.ndarray  # f32 [n], the log-probability of each token, in nats.
  is_greedy: bool  # Whether every token is the most probable next token.

  @property
  def total(self) -> float:
    return float(np.sum(self.logprobs, dtype=np.float64))


class Scorer:
  """Scores tokens with a model, `batch` rows at once."""

  def __init__(
    self, model: Decoder | VisionLanguageModel, *, length: int, batch: int
  ):
    """Wraps a model that reads at most `length` tokens at once."""
    for name, value in (("length", length), ("batch", batch)):
      if value < 1:
        raise ValueError(
          f"evaluate: {name} must be at least 1, got {value}; pass a number of "
          + {"length": "tokens", "batch": "rows"}[name]
        )
    self._graph, self._params = nnx.split(model)
    self.length, self.batch = length, batch
    self._vocab_size = decoder_of(model).config.vocab_size

  def score(self, requests: Sequence[Request]) -> list[Score]:
    """Scores continuations; the longest rows are computed first.

    If a context and its continuation together are too long, the context loses
    its beginning. Scores are returned in the order of the requests.
    """
    rows = [self._row(request) for request in requests]
    found: dict[int, Score] = {}
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i))
    sizes = itertools.groupby(order, lambda i: self._bucket(len(rows[i]) - 1))
    for size, group in sizes:
      for batch in itertools.batched(group, self.batch):
        tokens = np.zeros((self.batch, size + 1), np.int32)
        for place, i in enumerate(batch):
          tokens[place, : len(rows[i])] = rows[i]
        images = self._images([requests[i] for i in batch])
        scored = _token_scores(self._graph, self._params, tokens, images)
        logprobs, is_greedy = (np.asarray(x) for x in scored)
        for place, i in enumerate(batch):
          end = len(rows[i]) - 1
          asked = slice(end - len(requests[i].continuation), end)
          found[i] = Score(
            _finite(logprobs[place, asked]),
            bool(is_greedy[place, asked].all()),
          )
    return [found[i] for i in range(len(rows))]

  def score_each[Key](
    self, requests: Iterable[tuple[Key, Request]]
  ) -> Iterator[tuple[Key, Score]]:
    """Yields (key, score) lazily, scoring `_SORTED` batches at a time."""
    for some in itertools.batched(requests, _SORTED * self.batch):
      scores = self.score([request for _, request in some])
      yield from zip((key for key, _ in some), scores, strict=True)

  def _row(self, request: Request) -> list[int]:
    """Checks a request; returns at most its last `length + 1` tokens."""
    context, continuation = map(list, request[:2])
    if not context or not continuation:
      raise ValueError(
        "evaluate: a context and its continuation must each have at least one "
        f"token, got {len(context)} and {len(continuation)}; check the task's "
        "texts"
      )
    if len(continuation) > self.length:
      raise ValueError(
        f"evaluate: a continuation must have at most {self.length} tokens, got "
        f"{len(continuation)}; pass a larger --length, or leave the task out"
      )
    row = (context + continuation)[-(self.length + 1) :]
    if not 0 <= min(row) <= max(row) < self._vocab_size:
      raise ValueError(
        "evaluate: token ids must be at least 0 and below the vocabulary size "
        f"{self._vocab_size}, got {min(row)} to {max(row)}; use the model's "
        "own tokenizer"
      )
    return row

  def _images(self, requests: Sequence[Request]) -> np.ndarray | None:
    """Stacks the images of a batch; the images of padding rows are zero."""
    if (first := requests[0].images) is None:
      return None
    out = np.zeros((self.batch, *first.shape), first.dtype)
    for row, request in zip(out, requests, strict=False):
      row[:] = request.images
    return out

  def _bucket(self, size: int) -> int:
    """Rounds up to 64 times a power of two, but at most to `length`."""
    steps = max(-(-size // _SMALLEST_BUCKET) - 1, 0).bit_length()
    return min(_SMALLEST_BUCKET << steps, self.length)


def _finite(logprobs: np.ndarray) -> np.ndarray:
  """Copies log-probabilities; raises ValueError if one is not finite."""
  if not np.all(np.isfinite(logprobs)):
    raise ValueError(
      "evaluate: log-probabilities must be finite, got NaN or infinity, so "
      "the model's weights are not finite or its activations overflow; "
      "evaluate an earlier checkpoint, or pass --compute float32"
    )
  return logprobs.copy()


@functools.partial(jax.jit, static_argnames=("graph",))
def _token_scores(
  graph: Any, params: Any, tokens: Array, images: Array | None
) -> tuple[Array, Array]:
  """Returns tokens' log-probabilities, and whether each token is the argmax."""
  model = nnx.merge(graph, params)
  seen = () if images is None else (images,)
  hidden, targets = model(tokens[:, :-1], *seen), tokens[:, 1:]
  decoder = decoder_of(model)
  positions = loss_positions(*targets.shape, decoder.config.vocab_size)

  def score_position(at_position):
    hidden, targets = at_position  # [rows, d_model] and [rows].
    logits = decoder.logits_of_hidden(hidden[:, None])[:, 0]
    at_target = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    logprobs = at_target - jax.nn.logsumexp(logits, axis=-1)
    return logprobs, jnp.argmax(logits, axis=-1) == targets

  by_position = jnp.moveaxis(hidden, 1, 0), targets.T
  scored = jax.lax.map(score_position, by_position, batch_size=positions)
  return scored[0].T, scored[1].T
