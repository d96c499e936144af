# SPDX-License-Identifier: Apache-2.0
"""What a model answers in conversations, and how well it predicts the answers.

Each turn of the assistant that is to be learned is a question: all in front of
it, with the data's own answers to earlier ones, is the prompt, and the most
probable token is taken, one after the other, until the answer ends. How well
the data's answers are predicted is computed of all turns at once.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from coat_jax.models import Decoder, VisionLanguageModel, generate
from train.data.chat.documents import Documents
from train.data.text import Text
from train.evaluation.matching import is_match, is_short
from train.evaluation.perplexity import exp
from train.evaluation.scoring import Request, Scorer


class Question(NamedTuple):
  """A turn that a model is asked for.

  Attributes:
    conversation: Its number.
    prompt: The tokens in front of the turn.
    new: Of them, those behind the turn before.
    reference: The tokens of the turn in the data.
  """

  conversation: int
  prompt: list[int]
  new: list[int]
  reference: list[int]


class Answer(NamedTuple):
  """What a model answered, and what the data have.

  Attributes:
    conversation: Its number.
    question: What is in front of the answer, behind the answer before.
    reference: What the data have.
    answer: What the model wrote.
    images: Files of the conversation's images up to here.
    is_short: Whether the reference is a short answer.
    is_match: Whether the answer is the reference, by `matching.normalized`.
  """

  conversation: int
  question: str
  reference: str
  answer: str
  images: tuple[Path, ...]
  is_short: bool
  is_match: bool


class Answers(NamedTuple):
  """What `ask` found.

  Attributes:
    conversations: That were read.
    tokens: Of all answers of the data, predicted.
    nats: Their cross-entropy together.
    left_out: Questions that were not asked, for the prompt and an answer are
      longer than the model sees.
    answers: Of all others, in the data's order.
  """

  conversations: int
  tokens: int
  nats: float
  left_out: int
  answers: list[Answer]

  @property
  def nats_per_token(self) -> float:
    """The mean loss of the answers' tokens."""
    return self.nats / self.tokens

  @property
  def perplexity(self) -> float:
    """Of a token of the answers."""
    return exp(self.nats_per_token)

  @property
  def short(self) -> int:
    """How many references are short answers."""
    return sum(answer.is_short for answer in self.answers)

  @property
  def exact_match(self) -> float | None:
    """The share of short answers that match; None where there is none."""
    matches = sum(x.is_match for x in self.answers if x.is_short)
    return matches / self.short if self.short else None


def ask(
  model: Decoder | VisionLanguageModel,
  text: Text,
  documents: Documents,
  *,
  length: int,
  max_tokens: int,
  batch: int = 8,
  limit: int | None = None,
) -> Answers:
  """Asks a model all questions of conversations.

  Args:
    model: In recipe bf16, on one device.
    text: Its tokenizer.
    documents: The conversations, as the model sees them.
    length: The most tokens that the model sees at a time.
    max_tokens: Of an answer.
    batch: Conversations, or questions, that are computed at once.
    limit: Conversations to stop after; None for all.

  Returns:
    The counts, and the answers.

  Raises:
    ValueError: an image is damaged behind its header, or a number is outside
      its range.
  """
  count = min(len(documents), limit or len(documents))
  # One size for all, so that there is one program for each length.
  slots = max((len(_images(documents, i)) for i in range(count)), default=0)
  tokens, nats = _score(model, documents, count, slots, length, batch)
  asked = [x for i in range(count) for x in questions(documents, i)]
  fitting = [x for x in asked if len(x.prompt) + max_tokens <= length]
  found = _generate(model, text, documents, fitting, slots, max_tokens, batch)
  return Answers(count, tokens, nats, len(asked) - len(fitting), found)


def questions(documents: Documents, number: int) -> list[Question]:
  """Lists the questions of a conversation.

  Args:
    documents: Of which it is.
    number: Its own.
  """
  start, end = documents.starts[number : number + 2]
  tokens = documents.tokens[start:end].tolist()
  is_learned = np.r_[False, documents.mask[start:end], False]
  edges = np.flatnonzero(np.diff(is_learned))
  found, before = [], 0
  for first, last in edges.reshape(-1, 2).tolist():
    new = tokens[before:first]
    found.append(Question(number, tokens[:first], new, tokens[first:last]))
    before = last
  return found


def _score(
  model: Decoder | VisionLanguageModel,
  documents: Documents,
  count: int,
  slots: int,
  length: int,
  batch: int,
) -> tuple[int, float]:
  """Tokens of the data's answers, and their cross-entropy."""
  scorer, total, nats = Scorer(model, length=length, batch=batch), 0, 0.0
  order = np.argsort(-documents.lengths[:count], kind="stable").tolist()
  with tqdm(total=count, desc="answers", unit="row", delay=2) as bar:
    for some in itertools.batched(order, batch):
      requests, masks = [], []
      for i in some:
        here = slice(*documents.starts[i : i + 2])
        row = documents.tokens[here].tolist()
        images = None
        if slots:
          images = _read(documents, i, len(_images(documents, i)), slots)
        requests.append(Request(row[:1], row[1:], images))
        masks.append(documents.mask[here][1:])
      for score, mask in zip(scorer.score(requests), masks, strict=True):
        nats -= float(np.sum(score.logprobs[mask], dtype=np.float64))
        total += int(mask.sum())
      bar.update(len(some))
  return total, nats


def _generate(
  model: Decoder | VisionLanguageModel,
  text: Text,
  documents: Documents,
  asked: Sequence[Question],
  slots: int,
  max_tokens: int,
  batch: int,
) -> list[Answer]:
  """The answer to each question."""
  # Ends of turns, where they are tokens of their own.
  ends = {question.reference[-1] for question in asked}
  ends = {token for token in ends if not text.decode([token])}
  stops = sorted({*text.stop_tokens, *ends})
  order = sorted(range(len(asked)), key=lambda i: -len(asked[i].prompt))
  found: dict[int, Answer] = {}
  with tqdm(total=len(asked), desc="questions", unit="row", delay=2) as bar:
    for some in itertools.batched(order, batch):
      # The last batch has as many rows as all, of which some do not count.
      rows = [asked[i] for i in (*some, *some[:1] * (batch - len(some)))]
      pixels = None
      if slots:
        counts = (_count(documents, each) for each in rows)
        pixels = np.stack(
          [
            _read(documents, each.conversation, count, slots)
            for each, count in zip(rows, counts, strict=True)
          ]
        )
      new = generate(
        model,
        [each.prompt for each in rows],
        max_new_tokens=max_tokens,
        stop_tokens=stops,
        pixel_values=pixels,
      ).tokens
      for i, tokens in zip(some, new, strict=False):
        found[i] = _answer(text, documents, asked[i], tokens)
      bar.update(len(some))
  return [found[i] for i in range(len(asked))]


def _answer(
  text: Text, documents: Documents, question: Question, tokens: list[int]
) -> Answer:
  images, token = documents.images, None
  if images is not None:
    token = images.reader.token
  shown = [x for x in question.new if x != token]
  reference = text.decode(question.reference).strip()
  answer = text.decode(tokens).strip()
  count = _count(documents, question)
  return Answer(
    question.conversation,
    text.decode(shown).strip(),
    reference,
    answer,
    tuple(x.path for x in _images(documents, question.conversation)[:count]),
    is_short(reference),
    is_match(answer, reference),
  )


def _images(documents: Documents, number: int) -> list:
  """Images of a conversation."""
  return [] if documents.images is None else documents.images.of(number)


def _count(documents: Documents, question: Question) -> int:
  """How many images are in front of an answer."""
  if documents.images is None:
    return 0
  return documents.images.reader.count(np.asarray(question.prompt))


def _read(
  documents: Documents, number: int, count: int, slots: int
) -> np.ndarray:
  """The first images of a conversation, f32 [slots, 3, H, W]."""
  assert documents.images is not None  # Else there are no slots.
  images = documents.images.of(number)[:count]
  return documents.images.reader.read(images, slots=slots)
