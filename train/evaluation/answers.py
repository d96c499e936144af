# SPDX-License-Identifier: Apache-2.0
"""Asks a model the questions in conversations and scores the answers.

Each assistant turn that the loss would cover is the reference answer to
one question. The prompt is everything before that turn, including the data's
answers to earlier questions. The model decodes greedily until the answer ends.

Short answers are compared as in VQA v2: in lower case, without punctuation,
articles or line breaks, and with number words up to ten as digits. There is one
difference: `vqaEval.py` of github.com/GT-Vision-Lab/VQA restores missing
apostrophes, whereas we ignore apostrophes.
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
from train.data.chat.encoder import ChatEncoder
from train.data.chat.template import ChatTemplate
from train.data.text import Text
from train.evaluation.perplexity import exp
from train.evaluation.scoring import Request, Scorer
from train.source import Source

# The longest reference, in words, that `exact_match` counts. An answer hardly
# ever matches a longer reference exactly.
SHORT_WORDS = 5
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_ARTICLES = {"a", "an", "the"}
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten".split()
_NUMBERS: dict[str, str] = {
  "none": "0",
  **{word: str(number) for number, word in enumerate(_NUMBER_WORDS)},
}


def normalized(answer: str) -> str:
  """Normalizes an answer for comparison."""
  text = " ".join(answer.split())
  has_thousands = re.search(r"\d,\d", text) is not None
  out = text
  for mark in _PUNCTUATION:
    # As in VQA v2, each mark becomes a space. But if the text has this mark
    # next to a space anywhere, or a comma between digits, the mark is removed.
    is_beside = f"{mark} " in text or f" {mark}" in text
    out = out.replace(mark, "" if is_beside or has_thousands else " ")
  # Remove full stops, but not decimal points.
  out = re.sub(r"\.(?!\d)", "", out).lower()
  out = re.sub("['\N{RIGHT SINGLE QUOTATION MARK}]", "", out)
  words = (_NUMBERS.get(word, word) for word in out.split())
  return " ".join(word for word in words if word not in _ARTICLES)


def is_short(reference: str) -> bool:
  """Returns whether a normalized reference has 1 to `SHORT_WORDS` words."""
  return 1 <= len(normalized(reference).split()) <= SHORT_WORDS


def is_match(answer: str, reference: str) -> bool:
  """Returns whether both texts are equal once normalized."""
  return normalized(answer) == normalized(reference)


class Question(NamedTuple):
  """A prompt, and the assistant's turn that follows it in the data."""

  conversation: int  # The conversation's index in the data.
  prompt: list[int]  # All tokens before the turn.
  new: list[int]  # The tokens between the previous answer and the turn.
  reference: list[int]  # The turn as it is in the data.
  images: int  # Number of images in the prompt.


class Answer(NamedTuple):
  """A model's answer, with the reference answer."""

  conversation: int  # The conversation's index in the data.
  question: str  # The text since the previous answer.
  reference: str  # The answer in the data.
  answer: str  # The model's answer.
  images: tuple[Path, ...]  # Files of the images before the answer.
  is_short: bool  # Whether the reference is a short answer.
  is_match: bool  # Whether both texts are equal once normalized.


class Answers(NamedTuple):
  """A model's answers, and how well the model predicts the references."""

  conversations: int  # Number of conversations.
  tokens: int  # Number of scored tokens in reference answers.
  nats: float  # Total cross-entropy of these tokens.
  left_out: int  # Number of questions with too little room for an answer.
  answers: list[Answer]  # In the order of the data.

  @property
  def nats_per_token(self) -> float:
    return self.nats / self.tokens

  @property
  def perplexity(self) -> float:
    """Perplexity per token of the reference answers."""
    return exp(self.nats_per_token)

  @property
  def short(self) -> int:
    return sum(answer.is_short for answer in self.answers)

  @property
  def exact_match(self) -> float | None:
    """The share of matched short references; None if no reference is short."""
    matches = sum(x.is_match for x in self.answers if x.is_short)
    return matches / self.short if self.short else None


class _Exam(NamedTuple):
  """A model, and the conversations whose questions it answers."""

  model: Decoder | VisionLanguageModel
  documents: Documents
  count: int  # Only the first `count` conversations are used.
  slots: int  # Number of images that each row has room for.
  batch: int  # Number of rows that are computed at once.

  def pixels(self, conversation: int, count: int) -> np.ndarray:
    """Reads a conversation's first `count` images, f32 [slots, 3, H, W]."""
    assert self.documents.images is not None
    images = self.documents.images_of(conversation)[:count]
    return self.documents.images.reader.read(images, slots=self.slots)


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
  """Asks a model the questions of the first `limit` conversations.

  An answer has at most `max_tokens` tokens. A question is left out if its
  prompt has more than `length - max_tokens` tokens.
  """
  count = min(len(documents), limit or len(documents))
  images = (len(documents.images_of(i)) for i in range(count))
  exam = _Exam(model, documents, count, max(images, default=0), batch)
  tokens, nats = _score(exam, length)
  asked = [x for i in range(count) for x in _questions(documents, i)]
  fitting = [x for x in asked if len(x.prompt) + max_tokens <= length]
  found = _generate(exam, text, fitting, max_tokens)
  return Answers(count, tokens, nats, len(asked) - len(fitting), found)


def _questions(documents: Documents, number: int) -> list[Question]:
  tokens, mask = documents.tokens_of(number)
  edges = np.flatnonzero(np.diff(np.r_[False, mask, False]))
  found, before, count = [], 0, 0
  for first, last in edges.reshape(-1, 2).tolist():
    prompt, new, reference = (
      tokens[part].tolist()
      for part in (slice(first), slice(before, first), slice(first, last))
    )
    if documents.images is not None:
      count = documents.images.reader.count(tokens[:first])
    found.append(Question(number, prompt, new, reference, count))
    before = last
  return found


def _score(exam: _Exam, length: int) -> tuple[int, float]:
  """Returns the number of scored tokens and their cross-entropy in nats."""
  documents, total, nats = exam.documents, 0, 0.0
  scorer = Scorer(exam.model, length=length, batch=exam.batch)
  lengths = documents.lengths[: exam.count]
  order = np.argsort(-lengths, kind="stable").tolist()
  with tqdm(total=exam.count, desc="answers", unit="row", delay=2) as bar:
    for some in itertools.batched(order, exam.batch):
      requests, masks = [], []
      for i in some:
        tokens, mask = documents.tokens_of(i)
        row = tokens.tolist()
        images = exam.pixels(i, exam.slots) if exam.slots else None
        requests.append(Request(row[:1], row[1:], images))
        masks.append(mask[1:])
      for score, mask in zip(scorer.score(requests), masks, strict=True):
        nats -= float(np.sum(score.logprobs[mask], dtype=np.float64))
        total += int(mask.sum())
      bar.update(len(some))
  return total, nats


def _generate(
  exam: _Exam, text: Text, asked: Sequence[Question], max_tokens: int
) -> list[Answer]:
  stops = text.stops_after(question.reference[-1] for question in asked)
  order = sorted(range(len(asked)), key=lambda i: -len(asked[i].prompt))
  found: dict[int, Answer] = {}
  with tqdm(total=len(asked), desc="questions", unit="row", delay=2) as bar:
    for some in itertools.batched(order, exam.batch):
      # Pad the last batch, so that every batch has `exam.batch` rows.
      padded = (*some, *some[:1] * (exam.batch - len(some)))
      rows = [asked[i] for i in padded]
      pixels = None
      if exam.slots:
        pixels = np.stack([exam.pixels(x.conversation, x.images) for x in rows])
      new = generate(
        exam.model,
        [each.prompt for each in rows],
        max_new_tokens=max_tokens,
        stop_tokens=stops,
        pixel_values=pixels,
      ).tokens
      for i, tokens in zip(some, new, strict=False):
        found[i] = _answer(exam.documents, text, asked[i], tokens)
      bar.update(len(some))
  return [found[i] for i in range(len(asked))]


def _answer(
  documents: Documents, text: Text, question: Question, tokens: list[int]
) -> Answer:
  """Decodes an answer and compares it with the reference."""
  image_token = documents.images and documents.images.reader.token
  shown = [x for x in question.new if x != image_token]
  reference = text.decode(question.reference).strip()
  answer = text.decode(tokens).strip()
  images = documents.images_of(question.conversation)[: question.images]
  return Answer(
    question.conversation,
    text.decode(shown).strip(),
    reference,
    answer,
    tuple(image.path for image in images),
    is_short(reference),
    is_match(answer, reference),
  )


def read_conversations(
  source: Source,
  files: list[str],
  *,
  length: int,
  tokenizer: str | None = None,
  template: str | None = None,
  skip_bad: bool = False,
  images: Path | None = None,
) -> Documents:
  """Reads conversations for a model; `images` is the folder of image files."""
  file = Path(tokenizer or source.files / "tokenizer.json").expanduser()
  if not file.is_file():
    raise FileNotFoundError(
      f"evaluate: conversations need a tokenizer.json, got none in "
      f"{file.parent}; pass --tokenizer with the model's tokenizer.json"
    )
  text, reader = source.config, None
  if not isinstance(text, ModelConfig):
    reader = open_images(source.files, text, str(images or ""))
    text = text.text
  # A chat template is stored in the same folder as its tokenizer.
  folder = file.parent if tokenizer else source.files
  return load_documents(
    files,
    ChatEncoder(file, ChatTemplate.load(folder, template)),
    seq=length,
    vocab_size=text.vocab_size,
    skip_bad=skip_bad,
    images=reader,
  )
