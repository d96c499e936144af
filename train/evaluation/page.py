# SPDX-License-Identifier: Apache-2.0
"""Writes answers as one HTML file with their images, for a person to read.

The page needs no server, runs no scripts and loads nothing. Its content
security policy enforces this, whatever a model writes.
"""

import base64
import io
import itertools
import string
from collections.abc import Sequence
from html import escape
from pathlib import Path

from train.evaluation.answers import Answer, Answers
from train.evaluation.report import answer_figures

# The longer side of a thumbnail, in pixels.
_SIDE = 256
_PAGE = Path(__file__).with_suffix(".html")


def render(models: Sequence[tuple[str, Answers]]) -> str:
  """Writes the page for one or more models that answered the same questions."""
  answers = [found.answers for _, found in models]
  asked = [
    [(each.conversation, each.reference) for each in column]
    for column in answers
  ]
  if any(column != asked[0] for column in asked):
    raise ValueError(
      "evaluate: cannot compare the models, because their questions "
      f"({' and '.join(str(len(column)) for column in asked)}) or references "
      "differ; pass models with the same tokenizer, and set --length"
    )
  only = (
    "Only conversations in which the answers differ"
    if len(models) > 1
    else "Only conversations with a short answer that does not match"
  )
  header, figures = answer_figures(models)
  rows = zip(*answers, strict=True)
  sections = [
    _section([name for name, _ in models], list(turns))
    for _, turns in itertools.groupby(rows, lambda row: row[0].conversation)
  ]
  return string.Template(_PAGE.read_text("utf-8")).substitute(
    figures="".join(
      [_cells("th", header), *(_cells("td", row) for row in figures)]
    ),
    only=only,
    sections="".join(sections),
  )


def _section(names: Sequence[str], turns: Sequence[Sequence[Answer]]) -> str:
  """Writes a conversation: its images, and a row for each turn."""
  is_same = not any(map(_is_shown, turns))
  rows = [_cells("th", ["question", "reference", *names])]
  for row in turns:
    texts = [row[0].question, row[0].reference]
    cells = "".join(map(_cell, texts)) + "".join(map(_answered, row))
    rows.append(f"<tr>{cells}</tr>")
  images = "".join(map(_figure, turns[-1][0].images))
  return (
    f'<section class="{"same" if is_same else "differs"}">'
    f'<div class="images">{images}</div>'
    f'<div class="turns"><table>{"".join(rows)}</table></div></section>\n'
  )


def _is_shown(row: Sequence[Answer]) -> bool:
  """Whether a turn is shown when the checkbox at the top is ticked."""
  if len(row) > 1:
    return len({each.answer for each in row}) > 1
  return row[0].is_short and not row[0].is_match


def _cells(tag: str, texts: Sequence[str]) -> str:
  cells = (f"<{tag}>{escape(text)}</{tag}>" for text in texts)
  return f"<tr>{''.join(cells)}</tr>"


def _cell(text: str, mark: str = "") -> str:
  return f'<td dir="auto">{escape(text)}{mark}</td>'


def _answered(answer: Answer) -> str:
  """Writes an answer, and whether it matches a short reference."""
  mark = ""
  if answer.is_short:
    kind, said = (
      ("is-match", "\N{CHECK MARK} match")
      if answer.is_match
      else ("no-match", "\N{MULTIPLICATION X} no match")
    )
    mark = f'<span class="mark {kind}">{said}</span>'
  return _cell(answer.answer, mark)


def _figure(file: Path) -> str:
  name = escape(file.name)
  return (
    f'<figure><img src="{_thumbnail(file)}" alt="{name}">'
    f"<figcaption>{name}</figcaption></figure>"
  )


def _thumbnail(file: Path) -> str:
  """Makes a small JPEG as a data URI, unrotated, as the model sees it."""
  from PIL import Image  # Needs the extra vision, like all code for images.

  with Image.open(file) as image:
    small = image.convert("RGB")
  small.thumbnail((_SIDE, _SIDE))
  written = io.BytesIO()
  small.save(written, "JPEG", quality=80)
  return (
    f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}"
  )
