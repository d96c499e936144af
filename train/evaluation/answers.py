# SPDX-License-Identifier: Apache-2.0
"""Asks a model the questions of conversations and scores the answers.

Each turn of the assistant that is marked as a target is one question. The
prompt is everything before that turn, with the data's own answers in earlier
turns. The model always takes the most probable token, until the answer ends.
The cross-entropy of the data's answers is computed for all turns at once.

Short answers are compared as in VQA v2: in lower case, without punctuation,
articles and line ends, and with numbers up to ten as digits. One thing differs:
`vqaEval.py` of github.com/GT-Vision-Lab/VQA restores lost apostrophes; here
apostrophes are ignored.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from coat_jax.models import Decoder, ModelConfig, VisionLanguageModel, generate
from train.conversations import open_images
from train.data.chat.documents import Documents, load_documents
from train.data.chat.encoder import ChatEncoder, open_template
from train.data.text import Text
from train.evaluation.perplexity import exp
from train.evaluation.scoring import Request, Scorer
from train.source import Source

# Longer references hardly ever match exactly, so they are not compared.
SHORT_WORDS = 5
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_ARTICLES = {"a", "an", "the"}
_TENS = "zero one two three four five six seven eight nine ten".split()
_NUMBERS: dict[str, str] = {
  "none": "0",
  **{word: str(number) for number, word in enumerate(_TENS)},
}


def normalized(answer: str) -> str:
  """Puts an answer into the form that is compared."""
  text = " ".join(answer.split())
  has_thousands = re.search(r"\d,\d", text) is not None
  out = text
  for mark in _PUNCTUATION:
    # Beside a space it is punctuation; else it is between two words.
    is_beside = f"{mark} " in text or f" {mark}" in text
    out = out.replace(mark, "" if is_beside or has_thousands else " ")
  # A full stop, but not a decimal point.
  out = re.sub(r"\.(?!\d)", "", out).lower()
  out = re.sub("['\N{RIGHT SINGLE QUOTATION MARK}]", "", out)
  words = (_NUMBERS.get(word, word) for word in out.split())
  return " ".join(word for word in words if word not in _ARTICLES)


def is_short(reference: str) -> bool:
  """Whether a reference is a short answer, of 1 to `SHORT_WORDS` words."""
  return 1 <= len(normalized(reference).split()) <= SHORT_WORDS


def is_match(answer: str, reference: str) -> bool:
  """Whether an answer is the reference, both `normalized`."""
  return normalized(answer) == normalized(reference)


class Question(NamedTuple):
  """A turn that a model is asked for."""

  conversation: int
  prompt: list[int]  # All tokens before the turn.
  new: list[int]  # Those of them after the turn before.
  reference: list[int]  # The turn in the data.


class Answer(NamedTuple):
  """An answer of the model, with the reference answer."""

  conversation: int
  question: str  # The text since the last answer.
  reference: str  # The answer in the data.
  answer: str  # The model's answer.
  images: tuple[Path, ...]  # Files of the conversation's images up to here.
  is_short: bool  # Whether the reference is a short answer.
  # Whether the answer is the reference, by `normalized`.
  is_match: bool


class Answers(NamedTuple):
  """All answers of a model, and how well it predicts the references."""

  conversations: int
  tokens: int  # Number of reference-answer tokens scored.
  nats: float  # Their total cross-entropy.
  # Questions not asked, because prompt and answer exceed the context length.
  left_out: int
  answers: list[Answer]  # In the order of the data.

  @property
  def nats_per_token(self) -> float:
    """The mean loss of the answers' tokens."""
    return self.nats / self.tokens

  @property
  def perplexity(self) -> float:
    """Perplexity per token of the reference answers."""
    return exp(self.nats_per_token)

  @property
  def short(self) -> int:
    """Number of references that are short answers."""
    return sum(answer.is_short for answer in self.answers)

  @property
  def exact_match(self) -> float | None:
    """The share of short answers that match; None if there are none."""
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
  """Asks a model all questions of conversations."""
  count = min(len(documents), limit or len(documents))
  # The same size for all, so that each length needs only one program.
  slots = max((len(_images(documents, i)) for i in range(count)), default=0)
  tokens, nats = _score(model, documents, count, slots, length, batch)
  asked = [x for i in range(count) for x in questions(documents, i)]
  fitting = [x for x in asked if len(x.prompt) + max_tokens <= length]
  found = _generate(model, text, documents, fitting, slots, max_tokens, batch)
  return Answers(count, tokens, nats, len(asked) - len(fitting), found)


def questions(documents: Documents, number: int) -> list[Question]:
  """Lists the questions of a conversation."""
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
  # The ends of turns that are single tokens.
  ends = {question.reference[-1] for question in asked}
  ends = {token for token in ends if not text.decode([token])}
  stops = sorted({*text.stop_tokens, *ends})
  order = sorted(range(len(asked)), key=lambda i: -len(asked[i].prompt))
  found: dict[int, Answer] = {}
  with tqdm(total=len(asked), desc="questions", unit="row", delay=2) as bar:
    for some in itertools.batched(order, batch):
      # The last batch has as many rows as the others; some are only padding.
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
  """Counts the images before an answer."""
  if documents.images is None:
    return 0
  return documents.images.reader.count(np.asarray(question.prompt))


def _read(
  documents: Documents, number: int, count: int, slots: int
) -> np.ndarray:
  """The first images of a conversation, f32 [slots, 3, H, W]."""
  assert documents.images is not None  # Otherwise there are no slots.
  images = documents.images.of(number)[:count]
  return documents.images.reader.read(images, slots=slots)


def read_conversations(
  source: Source,
  files: list[str],
  *,
  length: int,
  tokenizer: str | None = None,
  template: str | None = None,
  images: Path | None = None,
) -> Documents:
  """Reads conversations as a model sees them."""
  file = Path(tokenizer or source.files / "tokenizer.json").expanduser()
  if not file.is_file():
    raise FileNotFoundError(
      f"evaluate: conversations need a tokenizer.json, got none in "
      f"{file.parent}; pass --tokenizer with one"
    )
  shape, reader = source.config, None
  if not isinstance(shape, ModelConfig):
    reader = open_images(source.files, shape, str(images or ""))
  # A run keeps a template in the same folder as its tokenizer.
  beside = file.parent if tokenizer else source.files
  return load_documents(
    files,
    ChatEncoder(file, open_template(beside, template)),
    seq=length,
    vocab_size=source.decoder_config.vocab_size,
    skip_bad=None,
    images=reader,
  )
