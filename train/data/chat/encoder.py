# SPDX-License-Identifier: Apache-2.0
"""From conversations to token ids and a mask of those to be learned.

A conversation's whole text is tokenized at once, so that no token differs from
what the model will be given, and the mask is taken from the characters that
each token is of.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from train.data.chat.formats import BadRow, Completion, Conversation
from train.data.chat.targets import Span, TargetFinder
from train.data.chat.template import ChatTemplate, read_special_tokens
from train.data.tokenizer import Tokenizer

# Text, (start, end) of what is to be learned, and ids before the text's own.
Rendered = tuple[str, list[Span], list[int]]


def open_template(folder: str | Path, name: str | None) -> ChatTemplate | None:
  """Finds the template of a tokenizer, or one by its name.

  Args:
    folder: That of tokenizer.json.
    name: Of `published.PUBLISHED`; None for the tokenizer's own.

  Returns:
    The template; None where the tokenizer has none.

  Raises:
    ValueError: no such name, or damaged files.
  """
  folder = Path(folder).expanduser()
  if name is None:
    return ChatTemplate.load(folder)
  return ChatTemplate.published(name, folder)


class ChatEncoder:
  """Makes token ids and masks of conversations."""

  def __init__(self, tokenizer_path: str | Path, template: ChatTemplate | None):
    """Reads the tokenizer, and special tokens beside it."""
    path = Path(tokenizer_path).expanduser()
    self._tokenizer = Tokenizer(str(path))
    # What is put in front of plain text.
    (plain,) = self._tokenizer.encode(["a"])
    with_special, _ = self._tokenizer.encode_with_special("a")
    first = next(iter(plain), None)
    self._front = list(
      itertools.takewhile(lambda token: token != first, with_special)
    )
    self._end = read_special_tokens(path.parent).get("eos_token", "")
    self._tokenizer.drop_post_processor()
    self._template = template
    if template is not None:
      self._finder = TargetFinder(template, self._tokenizer.added_tokens)

  def render(self, row: Conversation | Completion) -> Rendered:
    """Makes text of a row."""
    if isinstance(row, Completion):
      text = row.prompt + row.completion
      if not self._end:
        raise ValueError(
          "chat: the end of a completion needs the tokenizer's eos_token, got "
          "none; put tokenizer_config.json beside tokenizer.json"
        )
      text += "" if text.endswith(self._end) else self._end
      spans, front = [(len(row.prompt), len(text))], self._front
    elif self._template is None:
      raise ValueError(
        "chat: the tokenizer must have a chat template, got none; put "
        "chat_template.jinja beside tokenizer.json, or name a template"
      )
    else:
      found = self._finder.find(row.messages, row.tools, row.trained)
      (text, spans), front = found, []
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise BadRow(
        "not text", "text must be Unicode, got half of a surrogate pair"
      ) from error
    return text, spans, front

  def encode(
    self, rows: Iterable[Rendered], *, kept: int = 0
  ) -> Iterator[tuple[np.ndarray, np.ndarray, list[int]]]:
    """Tokenizes texts, some at a time."""
    rows, again = itertools.tee(rows)
    found = self._tokenizer.encode_each(
      (text for text, _, _ in rows), kept=kept
    )
    for (_, spans, front), (ids, offsets) in zip(again, found, strict=True):
      ids = np.concatenate([np.asarray(front, np.int32), ids])
      mask, ends = np.zeros(len(ids), bool), []
      for start, end in spans:
        is_in = (offsets[:, 1] > start) & (offsets[:, 0] < end)
        places = np.flatnonzero(is_in) + len(front)
        if len(places):  # A tokenizer may have none for what was said.
          mask[places] = True
          ends.append(int(places[-1]) + 1)
      mask[:1] = False  # Nothing predicts it.
      yield ids, mask, ends
