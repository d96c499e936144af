# SPDX-License-Identifier: Apache-2.0
"""Finds the characters of a conversation's text that the assistant wrote.

A template with {% generation %} marks these characters. For other templates, we
infer the characters from rendered texts. A turn begins where the generation
prompt ends, because the model will continue from there. The turn includes the
text that ends it (such as <|eot_id|>), so that the model learns to stop. We use
two methods and check their results against the whole text. If neither method
finds a turn with certainty, an error is raised.
  * By contents: render the conversation again with different words in the
    assistant's turns. The text that differs is what the assistant wrote. This
    method is fast, and works for templates that drop the reasoning of earlier
    turns.
  * By beginnings: render only the messages before a turn, with the generation
    prompt. The turn starts where this text ends. Then render these messages and
    the turn, to find where the turn ends. The whole text must begin with the
    first text, and with the second text up to the turn's end. This method works
    even if a template fails when different words replace a tool call.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence

from train.data.chat.formats import Conversation
from train.data.chat.template import ChatTemplate, Message, TemplateFault
from train.data.sources import BadData

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Shape:
  """The text that a template writes around an assistant turn.

  Before its content, a turn has a header, which is not a target, and then a
  lead, which is a target. The header is the text that the turn shares with the
  generation prompt. Without a generation prompt, the text before the content is
  the lead if it is only white space, and otherwise the header.
  """

  # (header, lead) of the last turn, and of other turns.
  starts: tuple[tuple[str, str], tuple[str, str]]
  has_prompt: bool  # Whether the template has a generation prompt.
  ends: tuple[str, str]  # The texts that end the last turn and other turns.
  tail: str  # The text after the end of the last turn.


class TargetFinder:
  """Finds the assistant's characters in texts that a template rendered."""

  def __init__(self, template: ChatTemplate, added_tokens: Sequence[str]):
    self._template = template
    tokens = sorted((x for x in added_tokens if x), key=len, reverse=True)
    joined = "|".join(map(re.escape, tokens)) or "(?!)"
    self._token = re.compile(f"({joined})")

  def find(self, chat: Conversation) -> tuple[str, list[Span]]:
    """Renders a conversation; returns the text and its target spans."""
    try:
      text = self._template.render(chat.messages, tools=chat.tools)
      if self._template.has_generation(chat.tools):
        return text, self._marked(chat)
    except TemplateFault:  # A faulty template affects every row.
      raise
    except ValueError as error:
      raise BadData("template", str(error).removeprefix("chat: ")) from error
    spans = self._all_by_contents(text, chat)
    if spans is None:
      spans = [self._find_turn(text, chat, i) for i in chat.trained]
    end = 0
    for i, span in zip(chat.trained, spans, strict=True):
      if span is None or not end <= span[0] < span[1]:
        raise BadData(
          "no mask",
          f"cannot find turn {i + 1} in the rendered text, because the "
          "template changes or omits the turn; check that it writes each "
          "message's content, put {% generation %} around the assistant's, or "
          "use another template",
        )
      end = span[1]
    return text, [span for span in spans if span]

  def _marked(self, chat: Conversation) -> list[Span]:
    """Returns the spans of {% generation %} blocks in the turns to train on."""
    spans = self._template.generated(chat.messages, chat.tools)
    turns = [i for i, x in enumerate(chat.messages) if x["role"] == "assistant"]
    chosen = []
    if list(chat.trained) == turns:
      chosen = spans
    elif len(spans) == len(turns):
      both = zip(turns, spans, strict=True)
      chosen = [span for i, span in both if i in chat.trained]
    if not chosen:
      raise ValueError(
        "the template must have one {% generation %} block for each "
        f"assistant turn, got {len(spans)} blocks for {len(turns)} turns; "
        "correct the template"
      )
    return chosen

  def _all_by_contents(
    self, text: str, chat: Conversation
  ) -> list[Span] | None:
    """Finds all turns by replacing their contents; None if any is uncertain."""
    changed, others = list(chat.messages), [_other(i) for i in chat.trained]
    for i, other in zip(chat.trained, others, strict=True):
      if changed[i].keys() != {"role", "content"}:
        return None
      changed[i] = {"role": "assistant", "content": other}
    rendered = self._try(changed, chat.tools) or ""
    if any(rendered.count(other) != 1 for other in others):
      return None
    pieces = re.split("|".join(others), rendered)
    spans, place = [], len(pieces[0])
    if not text.startswith(pieces[0]):
      return None
    for i, piece in zip(chat.trained, pieces[1:], strict=True):
      said = chat.messages[i]["content"]
      start = self._start(text[:place])
      for written in (said, said.strip()):
        if text.startswith(written + piece, place):
          place += len(written)
          break
      else:
        return None
      end = self._end_text(chat, i)
      if start is None or not text.startswith(end, place):
        return None
      spans.append((start, place + len(end)))
      place += len(piece)
    return spans if place == len(text) else None

  def _find_turn(self, text: str, chat: Conversation, i: int) -> Span | None:
    """Finds a turn by replacing its content, or else by what precedes it.

    Returns None if the turn's position is uncertain.
    """
    other, start, end = _other(i), None, None
    changed = list(chat.messages)
    changed[i] = {"role": "assistant", "content": other}
    rendered = self._try(changed, chat.tools) or ""
    if rendered.count(other) == 1:
      # Between `before` and `after`, the whole text has the turn as the
      # template wrote it, for example without its reasoning.
      before, after = rendered.split(other)
      start, end_text = self._start(before), self._end_text(chat, i)
      if start is not None and not text.startswith(before[:start]):
        start = None
      if after.startswith(end_text) and text.endswith(after):
        end = len(text) - len(after) + len(end_text)
    if start is None and i:
      earlier = chat.messages[:i]
      prompt = self._try(earlier, chat.tools, add_generation_prompt=True) or ""
      prompt += "" if self._shape.has_prompt else self._shape.starts[0][0]
      if prompt and text.startswith(prompt):
        start = len(prompt)
    if end is None:
      until = self._try(chat.messages[: i + 1], chat.tools) or ""
      tail = self._shape.ends[0] + self._shape.tail
      cut = len(until) - len(self._shape.tail)
      if until.endswith(tail) and text.startswith(until[:cut]):
        end = cut
    return None if start is None or end is None else (start, end)

  def _start(self, before: str) -> int | None:
    """Finds where a turn begins in the text that precedes its content."""
    for header, lead in self._shape.starts:
      if before.endswith(header + lead):
        return len(before) - len(lead)
    return None

  def _end_text(self, chat: Conversation, i: int) -> str:
    return self._shape.ends[0 if i == len(chat.messages) - 1 else 1]

  def _try(
    self,
    messages: Sequence[Message],
    tools: list | None,
    add_generation_prompt: bool = False,
  ) -> str | None:
    """Renders messages; None if the template raises an error."""
    try:
      return self._template.render(
        messages, tools=tools, add_generation_prompt=add_generation_prompt
      )
    except ValueError:
      return None

  @functools.cached_property
  def _shape(self) -> Shape:
    """Infers the shape by rendering a short conversation."""
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
      last = self._start_of(before, prompt, plain)
      other = self._start_of(earlier, prompt, plain)
      if last and other:
        tail = after[len(ends[0]) :]
        return Shape((last, other), prompt != plain, ends, tail)
    raise ValueError(
      "chat: cannot find where an assistant turn begins and ends in the "
      "template's text; check that the template writes each message's content, "
      "put {% generation %} around the assistant's, or use another template"
    )

  def _start_of(
    self, before: str, prompt: str, plain: str
  ) -> tuple[str, str] | None:
    """Returns the header and the lead of a turn; None if they are uncertain."""
    # The prompt may continue differently from the turn, for example with the
    # start of a reasoning block.
    common = self._common(prompt, before)
    header = common[len(self._common(prompt, plain)) :]
    lead = before[len(common) :]
    if header or not lead.strip():
      is_certain = common == prompt or header and not lead
      return (header, lead) if is_certain else None
    return (lead, "") if prompt == plain else None

  def _ends(self, after: str, following: str) -> tuple[str, str] | None:
    """Finds how the last turn and other turns end after their contents."""
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
    """Returns the texts' common prefix, which never splits an added token."""
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
  """Returns a string that no text contains: noncharacters around a number."""
  return f"\ufdd0{i}\ufdd1"
