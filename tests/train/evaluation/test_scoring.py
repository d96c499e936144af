# SPDX-License-Identifier: Apache-2.0
"""Scores and perplexities match those computed in float64 without padding."""

import math
from typing import Any

import numpy as np
import pytest

from tests.train.evaluation.models import oracle, random_model
from train.data.text import ByteText, Text
from train.evaluation import scoring
from train.evaluation.perplexity import exp, perplexity, prefix_token, windows
from train.evaluation.scoring import Request, Scorer

LENGTH = 96
# Logits are a few tens, where f32 values are up to 4e-6 apart. A different
# summation order changes a total by several such steps.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model():
  return random_model()


@pytest.fixture(scope="module")
def score(model):
  return oracle(model)


def requests(score, *more):
  """Makes requests of both padded lengths, 64 and 96, and one too long."""
  rng = np.random.default_rng(0)
  counts = {9: 3, 120: 20, 65: 1} | dict(more)
  rows = {n: rng.integers(0, 256, n + 1).tolist() for n in counts}
  found = [
    Request(rows[n][:-count], rows[n][-count:]) for n, count in counts.items()
  ]
  # The most probable token after a context, and another token.
  context = rows[9][:9]
  best = max(range(256), key=lambda i: score(context, [i], LENGTH)[0][0])
  found += [Request(context, [i]) for i in (best, (best + 1) % 256)]
  # The last token is greedy, but the token before it is not.
  return [*found, Request(context[:-1], [context[-1], best])]


def test_scores_match_each_row_alone(model, score):
  asked = requests(score)
  scorer = Scorer(model, length=LENGTH, batch=3)
  program: Any = scoring._token_scores
  before = program._cache_size()
  found = scorer.score(asked)
  # One program is compiled for each padded length: 64 and 96.
  assert program._cache_size() == before + 2
  for request, got in zip(asked, found, strict=True):
    logprobs, is_greedy = score(*request[:2], LENGTH)
    assert abs(got.total - logprobs.sum()) < TOLERANCE
    np.testing.assert_allclose(got.logprobs, logprobs, atol=TOLERANCE)
    assert got.is_greedy == is_greedy
  assert [x.is_greedy for x in found[-3:]] == [True, False, False]
  # Scores do not depend on the other rows of a batch.
  again = scorer.score(asked[::-1])[::-1]
  for one, other in zip(found, again, strict=True):
    np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_of_nan_or_infinite_logits_are_refused(value):
  """Sets the embedding of token 7 to NaN or infinity."""
  model = random_model()
  model.embedding.set_value(model.embedding[...].at[7].set(value))
  scorer = Scorer(model, length=LENGTH, batch=3)
  scorer.score([Request([1, 2], [3, 4])])
  with pytest.raises(ValueError, match="must be finite, got NaN or infinity,"):
    scorer.score([Request([1, 2], [3, 4]), Request([1, 7], [3, 4])])


def test_exp_of_nan_is_nan_and_overflow_gives_infinity():
  assert math.isnan(exp(math.nan)) and exp(710.0) == math.inf
  assert exp(1.5) == math.exp(1.5)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
def test_scores_do_not_depend_on_the_batch_size(model, score, batch):
  asked = requests(score, (64, 64), (63, 1), (96, 90))
  for size in (3, batch):
    found = Scorer(model, length=LENGTH, batch=size).score(asked)
    for request, got in zip(asked, found, strict=True):
      assert abs(got.total - score(*request[:2], LENGTH)[0].sum()) < TOLERANCE


@pytest.mark.slow
def test_logits_are_computed_in_chunks(model, score, monkeypatch):
  """Uses chunks of 7 positions; 7 does not divide the row's length."""
  monkeypatch.setattr(scoring, "loss_positions", lambda *_: 7)
  asked = requests(score)[:1]
  (found,) = Scorer(model, length=LENGTH, batch=2).score(asked)
  assert abs(found.total - score(*asked[0][:2], LENGTH)[0].sum()) < TOLERANCE


@pytest.mark.parametrize(
  "context, continuation, message",
  [
    ([], [1], "at least one token, got 0 and 1"),
    ([1], [], "at least one token, got 1 and 0"),
    (
      [1],
      [2] * 97,
      "must have at most 96 tokens, got 97; pass a larger --length",
    ),
    ([1], [256], "below the vocabulary size 256, got 1 to 256"),
    ([-1], [2], "below the vocabulary size 256, got -1 to 2"),
  ],
)
def test_requests_that_cannot_be_scored_are_refused(
  model, context, continuation, message
):
  scorer = Scorer(model, length=LENGTH, batch=3)
  with pytest.raises(ValueError, match=message):
    scorer.score([Request(context, continuation)])


@pytest.mark.parametrize("name", ["length", "batch"])
def test_numbers_below_one_are_refused(model, name):
  with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
    Scorer(model, **{"length": 8, "batch": 1, name: 0})


@pytest.mark.parametrize("length, stride", [(4, 4), (4, 2), (4, 1), (50, 7)])
def test_windows_count_each_token_once_with_all_context(length, stride):
  for count in range(1, 40):
    found, done = list(windows(count, length, stride)), 1
    for i, (start, middle, end) in enumerate(found):
      # A window reads as many tokens as the model allows, and ends one
      # before the last counted token.
      assert middle == done and start == max(0, end - 1 - length)
      is_last = i == len(found) - 1
      assert is_last or end - middle == (stride if i else length)
      done = end
    assert done == count


def test_windows_without_overlap_match_the_harness():
  # lm-evaluation-harness has this example: a prefix, ten tokens, length 4.
  found = list(windows(11, 4, 4))
  assert found == [(0, 1, 5), (4, 5, 9), (6, 9, 11)]


class Words(Text):
  """Encodes each letter as a token, and puts token 7 before a text."""

  first_tokens = (7,)
  prefix_token = 7

  def encode(self, text):
    return [ord(x) for x in text if x.isalpha()]

  def decode(self, tokens):
    raise NotImplementedError


DOCUMENTS = [
  "It was a dark and stormy night, and the rain fell",
  "",
  "Ah 1 b c",
]
# The length and stride of windows, in tokens.
LONG, STRIDE = 24, 10


def nats(score, tokens, is_counted):
  """Returns the nats by definition: each token counts in its first window."""
  total, done, end = 0.0, 0, LONG
  while done < len(tokens) - 1:
    end = min(end, len(tokens) - 1)
    start = max(0, end - LONG)
    logprobs, _ = score(
      tokens[start : start + 1], tokens[start + 1 : end + 1], 99
    )
    new = np.array(is_counted[done + 1 : end + 1])
    total -= logprobs[-len(new) :][new].sum()
    done, end = end, end + STRIDE
  return total


def test_perplexity_matches_each_window_alone(model, score):
  options: dict = dict(length=LONG, stride=STRIDE, batch=2)
  found = perplexity(model, ByteText(), DOCUMENTS, **options)
  rows = [[10, *x.encode()] for x in DOCUMENTS if x]
  total = sum(nats(score, row, [True] * len(row)) for row in rows)
  assert abs(found.nats - total) < TOLERANCE
  assert found[:4] == (2, 57, 57, 11 + 4)
  assert found.nats_per_token == found.nats / 57
  assert math.isclose(found.perplexity, math.exp(total / 57), rel_tol=1e-5)
  bits = total / math.log(2) / 57
  assert math.isclose(found.bits_per_byte, bits, rel_tol=1e-5)
  per_word = math.exp(total / 15)
  assert math.isclose(found.word_perplexity, per_word, rel_tol=1e-5)
  # Joined to one text: the token before each document is read but not counted.
  joined = perplexity(model, ByteText(), DOCUMENTS, kind="joined", **options)
  flags = [[False] + [True] * (len(row) - 1) for row in rows]
  total = nats(score, sum(rows, []), sum(flags, []))
  assert joined[:4] == found[:4]
  assert abs(joined.nats - total) < TOLERANCE
  assert abs(joined.nats - found.nats) > 0.1


def test_tokens_bytes_and_words_are_counted_separately(model):
  options: dict = dict(length=LONG, batch=2)
  found = perplexity(model, Words(), ["né 1 b\n"], **options)
  # é is one token. An empty last word counts, as in the harness.
  assert found[:4] == (1, 3, 8, 4)
  for figure, divisor in (
    (math.log(found.perplexity), 3),
    (math.log(2) * found.bits_per_byte, 8),
    (math.log(found.word_perplexity), 4),
  ):
    assert math.isclose(figure, found.nats / divisor, rel_tol=1e-6)


def test_default_stride_is_the_length(model):
  options: dict = dict(length=LONG, batch=2)
  one = perplexity(model, ByteText(), DOCUMENTS[:1], **options)
  same = perplexity(model, ByteText(), DOCUMENTS[:1], stride=LONG, **options)
  other = perplexity(model, ByteText(), DOCUMENTS[:1], stride=5, **options)
  assert one == same != other


@pytest.mark.parametrize("stride", [0, LONG + 1])
def test_stride_outside_the_window_is_refused(model, stride):
  with pytest.raises(
    ValueError, match=f"stride must be 1 to 24, .* got {stride}"
  ):
    perplexity(model, ByteText(), ["a"], length=LONG, stride=stride)


def test_documents_without_a_token_are_refused(model):
  with pytest.raises(
    ValueError, match="the texts must have at least one token"
  ):
    perplexity(model, ByteText(), ["", ""], length=LONG)


def test_prefix_is_a_line_end_if_the_tokenizer_has_none():
  class Other(Words):
    prefix_token = None
    found = [5, 6]

    def encode(self, text):
      return self.found if text == "\n" else []

  assert prefix_token(Other()) == 6
  Other.found = []
  with pytest.raises(ValueError, match="set bos_token or eos_token"):
    prefix_token(Other())
