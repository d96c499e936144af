# SPDX-License-Identifier: Apache-2.0
"""Finds the characters of a conversation's text that the assistant wrote.

Published templates do not say, so it is found from what they write. A turn of
the assistant reaches from where the prompt to generate ends, as the model will
see it when it is asked, to the end of what ends the turn (<|eot_id|>, say), so
that the model learns to stop. Two ways, of which each is checked against the
whole text; where neither holds there is an error, and never a guess:
  * by contents: the conversation is rendered once more with other words in the
    assistant's place. What differs is what it said;
  * by beginnings: the messages before a turn, with the prompt to generate, and
    the messages up to it must be how the whole text begins.
The first is quick, and right for templates that drop the reasoning of earlier
turns; the second for those that refuse other words in place of a tool's call.
{% generation %}, where a template has it, comes before both.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence

from train.data.chat.formats import BadRow
from train.data.chat.rendering import TemplateLimit
from train.data.chat.template import ChatTemplate, Message, MissingToken

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Shape:
  """The text that a template writes around a turn of the assistant."""

  # (header, lead) of the last turn, and of others. The header is what a turn
  # has of the prompt to generate, or, where the template has no such prompt,
  # what is before the content unless that is space. The lead is between header
  # and content, and is learned.
  starts: tuple[tuple[str, str], tuple[str, str]]
  has_prompt: bool  # Whether the template has a prompt to generate.
  ends: tuple[str, str]  # The text that ends the last turn, and others.
  tail: str  # The text after the end of the last turn.


class TargetFinder:
  """Finds the assistant's characters in texts of one template."""

  def __init__(self, template: ChatTemplate, added_tokens: Sequence[str]):
    """Makes a finder; the template is looked at when it is first needed."""
    self._template = template
    tokens = sorted((x for x in added_tokens if x), key=len, reverse=True)
    joined = "|".join(map(re.escape, tokens)) or "(?!)"
    self._token = re.compile(f"({joined})")

  def find(
    self,
    messages: Sequence[Message],
    tools: list | None,
    trained: Sequence[int],
  ) -> tuple[str, list[Span]]:
    """Renders a conversation; returns the text and the spans to learn."""
    try:
      text = self._template.render(messages, tools=tools)
      if self._template.has_generation(tools):
        return text, self._marked(messages, tools, trained)
    except (MissingToken, TemplateLimit):  # So it is of every row.
      raise
    except ValueError as error:
      raise BadRow("template", str(error).removeprefix("chat: ")) from error
    spans = self._all_at_once(text, messages, tools, trained)
    if spans is None:
      spans = [self._one(text, messages, tools, i) for i in trained]
    end = 0
    for i, span in zip(trained, spans, strict=True):
      if span is None or not end <= span[0] < span[1]:
        raise BadRow(
          "no mask",
          f"the place of turn {i + 1} in the template's text must be certain, "
          "got a template that changes it or leaves it out; put "
          "{% generation %} into the template, or take another",
        )
      end = span[1]
    return text, [span for span in spans if span]

  def _marked(
    self,
    messages: Sequence[Message],
    tools: list | None,
    trained: Sequence[int],
  ) -> list[Span]:
    """Uses {% generation %} blocks, which do not say which turn is which."""
    spans = self._template.generated(messages, tools)
    turns = [i for i, x in enumerate(messages) if x["role"] == "assistant"]
    if list(trained) == turns:
      chosen = spans
    elif len(spans) == len(turns):
      chosen = [s for i, s in zip(turns, spans, strict=True) if i in trained]
    else:
      chosen = []
    if not chosen:
      raise ValueError(
        "the template's {% generation %} must hold the turns to be learned, "
        f"got {len(spans)} blocks of {len(turns)} turns; correct the template"
      )
    return chosen

  def _all_at_once(
    self,
    text: str,
    messages: Sequence[Message],
    tools: list | None,
    trained: Sequence[int],
  ) -> list[Span | None] | None:
    """By contents, where the template writes all of them as they are."""
    changed, others = list(messages), [_other(i) for i in trained]
    for i, other in zip(trained, others, strict=True):
      if messages[i].keys() != {"role", "content"}:
        return None
      changed[i] = {"role": "assistant", "content": other}
    rendered = self._try(changed, tools) or ""
    if any(rendered.count(other) != 1 for other in others):
      return None
    pieces = re.split("|".join(others), rendered)
    spans, place = [], len(pieces[0])
    if not text.startswith(pieces[0]):
      return None
    for i, piece in zip(trained, pieces[1:], strict=True):
      said = messages[i]["content"]
      start = self._start(text[:place])
      for written in (said, said.strip()):
        if text.startswith(written + piece, place):
          place += len(written)
          break
      else:
        return None
      end = self._end_text(messages, i)
      if start is None or not text.startswith(end, place):
        return None
      spans.append((start, place + len(end)))
      place += len(piece)
    return spans if place == len(text) else None

  def _one(
    self, text: str, messages: Sequence[Message], tools: list | None, i: int
  ) -> Span | None:
    """Finds one turn, by contents or by beginnings."""
    other, start, end = _other(i), None, None
    changed = list(messages)
    changed[i] = {"role": "assistant", "content": other}
    rendered = self._try(changed, tools) or ""
    if rendered.count(other) == 1:
      # Between the two is whatever the template made of the turn: calls of
      # tools, say, or contents without their reasoning.
      before, after = rendered.split(other)
      start, end_text = self._start(before), self._end_text(messages, i)
      if start is not None and not text.startswith(before[:start]):
        start = None
      if after.startswith(end_text) and text.endswith(after):
        end = len(text) - len(after) + len(end_text)
    if start is None and i:
      prompt = self._try(messages[:i], tools, add_generation_prompt=True) or ""
      prompt += "" if self._shape.has_prompt else self._shape.starts[0][0]
      if prompt and text.startswith(prompt):
        start = len(prompt)
    if end is None:
      until = self._try(messages[: i + 1], tools) or ""
      tail = self._shape.ends[0] + self._shape.tail
      cut = len(until) - len(self._shape.tail)
      if until.endswith(tail) and text.startswith(until[:cut]):
        end = cut
    return None if start is None or end is None else (start, end)

  def _start(self, before: str) -> int | None:
    """Finds where a turn begins, given the text before its content."""
    for header, lead in self._shape.starts:
      if before.endswith(header + lead):
        return len(before) - len(lead)
    return None

  def _end_text(self, messages: Sequence[Message], i: int) -> str:
    return self._shape.ends[0 if i == len(messages) - 1 else 1]

  def _try(
    self,
    messages: Sequence[Message],
    tools: list | None,
    add_generation_prompt: bool = False,
  ) -> str | None:
    """Renders a part, which a template may refuse."""
    try:
      return self._template.render(
        messages, tools=tools, add_generation_prompt=add_generation_prompt
      )
    except TemplateLimit:
      raise
    except ValueError:
      return None

  @functools.cached_property
  def _shape(self) -> Shape:
    """Looks at what the template makes of a short conversation."""
    asked, said, more = _other(0), _other(1), _other(2)
    user = {"role": "user", "content": asked}
    answer = {"role": "assistant", "content": said}
    for system in ([], [{"role": "system", "content": "x"}]):
      turn = self._try([*system, user, answer], None)
      if turn is None or turn.count(said) != 1:
        continue
      again = {"role": "user", "content": more}
      both = self._try([*system, user, answer, again], None) or turn
      prompt = self._try([*system, user], None, add_generation_prompt=True)
      plain = self._try([*system, user], None)
      before, after = turn.split(said)
      earlier, _, following = both.partition(said)
      ends = self._ends(after, following.partition(more)[0])
      if ends is None or prompt is None or plain is None:
        continue
      has_prompt = prompt != plain
      starts = (
        self._start_of(before, prompt, plain),
        self._start_of(earlier, prompt, plain),
      )
      if starts[0] and starts[1]:
        tail = after[len(ends[0]) :]
        return Shape((starts[0], starts[1]), has_prompt, ends, tail)
    raise ValueError(
      "chat: the template must write a turn of the assistant between a prompt "
      "and an end, got one where they cannot be told apart; put "
      "{% generation %} into the template, or take another"
    )

  def _start_of(
    self, before: str, prompt: str, plain: str
  ) -> tuple[str, str] | None:
    """Header and lead of a turn; None where they cannot be told apart."""
    # Where the turn goes on otherwise than the prompt (which opens a block of
    # reasoning, say), the header is what they have in common.
    common = self._common(prompt, before)
    header = common[len(self._common(prompt, plain)) :]
    lead = before[len(common) :]
    if header or not lead.strip():
      is_certain = common == prompt or header and not lead
      return (header, lead) if is_certain else None
    return (lead, "") if prompt == plain else None

  def _ends(self, after: str, following: str) -> tuple[str, str] | None:
    """Finds the text that ends a turn, last or not; None if there is none."""
    if end := self._common(after, following).rstrip():
      return end, end
    firsts = []
    for text in (after, following):
      token = self._token.search(text)
      if token is None or text[: token.start()].strip():
        return None
      firsts.append(text[: token.end()])
    return firsts[0], firsts[1]

  def _common(self, one: str, other: str) -> str:
    """How both texts begin, cut within no token that the tokenizer added."""
    common = ""
    for a, b in zip(
      self._token.split(one), self._token.split(other), strict=False
    ):
      if a != b:
        if not (self._token.match(a) or self._token.match(b)):
          common += os.path.commonprefix([a, b])
        break
      common += a
    return common


def _other(i: int) -> str:
  """A string that no text contains: U+FDD0 and U+FDD1 are noncharacters."""
  return f"\ufdd0{i}\ufdd1"
