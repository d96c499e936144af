# SPDX-License-Identifier: Apache-2.0
"""Turns conversations into token ids and a mask of the target tokens.

The whole text of a conversation is tokenized at once, so that its tokens are
the same as at inference. A target span is a range of characters that the loss
covers. A token is a target if any of its characters is in a target span. The
first token is never a target.
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
  """Renders and tokenizes conversations."""

  def __init__(self, tokenizer_path: str | Path, template: ChatTemplate | None):
    """Reads a tokenizer.json, and the special tokens from the same folder."""
    path = Path(tokenizer_path).expanduser()
    self._tokenizer = Tokenizer(str(path))
    self._front = self._tokenizer.first_tokens()
    self._end = read_special_tokens(path.parent).get("eos_token", "")
    self._tokenizer.drop_post_processor()
    self._template = template
    if template is not None:
      self._finder = TargetFinder(template, self._tokenizer.added_tokens)

  def render(self, row: Conversation | Completion) -> Rendered:
    """Returns a row's text, its target spans, and ids to prepend to it."""
    if isinstance(row, Completion):
      text = row.prompt + row.completion
      if not self._end:
        raise ValueError(
          "chat: a completion ends with the tokenizer's eos_token, got none; "
          "put a tokenizer_config.json with eos_token next to tokenizer.json"
        )
      text += "" if text.endswith(self._end) else self._end
      spans, front = [(len(row.prompt), len(text))], self._front
    elif self._template is None:
      raise ValueError(
        "chat: the tokenizer must have a chat template, got none; put "
        "chat_template.jinja next to tokenizer.json, or pass a published one, "
        "such as --template chatml"
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
    """Yields each text's ids, its target mask, and the ends of target spans."""
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
        if len(places):  # A span may have no token.
          mask[places] = True
          ends.append(int(places[-1]) + 1)
      mask[:1] = False  # The first token is never predicted.
      yield ids, mask, ends
