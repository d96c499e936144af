# SPDX-License-Identifier: Apache-2.0
"""Writes answers and their images as one HTML page for a person to read.

The page needs no server, runs no scripts and loads no other files. Its content
security policy enforces this, whatever text a model writes.
"""

import base64
import io
import itertools
from collections.abc import Sequence
from pathlib import Path

import jinja2

from train.evaluation.answers import Answer, Answers
from train.evaluation.report import answer_figures

# The longer side of a thumbnail, in pixels.
_SIDE = 256
_PAGE = Path(__file__).with_suffix(".html")


def render(models: Sequence[tuple[str, Answers]]) -> str:
  """Returns the page's HTML for models that answered the same questions."""
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
  turns = zip(*answers, strict=True)
  conversations = itertools.groupby(turns, lambda turn: turn[0].conversation)
  header, figures = answer_figures(models)
  environment = jinja2.Environment(autoescape=True, trim_blocks=True)
  environment.filters["thumbnail"] = _thumbnail
  environment.tests["shown"] = _is_shown
  return environment.from_string(_PAGE.read_text("utf-8")).render(
    header=header,
    figures=figures,
    names=[name for name, _ in models],
    conversations=[list(group) for _, group in conversations],
  )


def _is_shown(turn: Sequence[Answer]) -> bool:
  """Returns whether the page's filter keeps the conversation of this turn."""
  if len(turn) > 1:
    return len({each.answer for each in turn}) > 1
  return turn[0].is_short and not turn[0].is_match


def _thumbnail(file: Path) -> str:
  """Returns a small JPEG as a data URI; ignores EXIF rotation, as models do."""
  from PIL import Image  # Part of the `vision` extra.

  with Image.open(file) as image:
    small = image.convert("RGB")
  small.thumbnail((_SIDE, _SIDE))
  written = io.BytesIO()
  small.save(written, "JPEG", quality=80)
  return (
    f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}"
  )
