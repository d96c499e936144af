# SPDX-License-Identifier: Apache-2.0
"""Converts formulas to MathML, which browsers draw without scripts or fonts."""

import html
import re

from latex2mathml import converter

_FORMULA = re.compile(
  r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL
)


def on_page_content(content: str, **_) -> str:
  """Converts the formulas in a page's HTML; MkDocs calls this for each page."""
  return _FORMULA.sub(_convert, content)


def _convert(match: re.Match) -> str:
  display = {"span": "inline", "div": "block"}[match[1]]
  latex = html.unescape(match[2]).strip()
  return converter.convert(latex, display=display)
