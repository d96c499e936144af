# SPDX-License-Identifier: Apache-2.0
"""Turns conversations into token ids and a mask of the target tokens.

The whole text of a conversation is tokenized at once, so tokens are the same
as at inference. A token is a target if any of its characters is.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from train.data.chat.formats import Completion, Conversation
from train.data.chat.targets import Span, TargetFinder
from train.data.chat.template import ChatTemplate, read_special_tokens
from train.data.sources import BadData
from train.data.tokenizer import Tokenizer

# A text, its target spans, and the ids to put before the text's own ids.
Rendered = tuple[str, list[Span], list[int]]


class ChatEncoder:
  """Turns conversations into token ids and masks."""

  def __init__(self, tokenizer_path: str | Path, template: ChatTemplate | None):
    """Reads a tokenizer.json and the special tokens from its folder."""
    path = Path(tokenizer_path).expanduser()
    self._tokenizer = Tokenizer(str(path))
    self._front = self._tokenizer.first_tokens()
    self._end = read_special_tokens(path.parent).get("eos_token", "")
    self._tokenizer.drop_post_processor()
    self._template = template
    if template is not None:
      self._finder = TargetFinder(template, self._tokenizer.added_tokens)

  def render(self, row: Conversation | Completion) -> Rendered:
    """Returns a row's text, its target spans, and the ids before the text."""
    if isinstance(row, Completion):
      text = row.prompt + row.completion
      if not self._end:
        raise ValueError(
          "chat: the end of a completion needs the tokenizer's eos_token, got "
          "none; put tokenizer_config.json next to tokenizer.json"
        )
      text += "" if text.endswith(self._end) else self._end
      spans, front = [(len(row.prompt), len(text))], self._front
    elif self._template is None:
      raise ValueError(
        "chat: the tokenizer must have a chat template, got none; put "
        "chat_template.jinja next to tokenizer.json, or name a template"
      )
    else:
      (text, spans), front = self._finder.find(row), []
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise BadData(
        "not text", "the text contains half of a surrogate pair"
      ) from error
    return text, spans, front

  def encode(
    self, rows: Iterable[Rendered], *, kept: int = 0
  ) -> Iterator[tuple[np.ndarray, np.ndarray, list[int]]]:
    """Yields ids, the target mask, and the ends of target spans, for each text.

    `Tokenizer.encode_each` documents `kept`.
    """
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
        if len(places):  # A span may produce no token.
          mask[places] = True
          ends.append(int(places[-1]) + 1)
      mask[:1] = False  # No token predicts the first one.
      yield ids, mask, ends
