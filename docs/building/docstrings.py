# SPDX-License-Identifier: Apache-2.0
"""Docstrings on their way to the reference pages: plain text to Markdown.

A docstring is read in a terminal first. Three things that it writes for there
would be lost in Markdown: tables and formulas that are indented, lists without
a blank line before them, and the formulas of optax's docstrings.
"""

import re
from typing import Any

import griffe

_SECTION = re.compile(
  r"(Args|Attributes|Examples?|Raises|Returns|Yields):", re.ASCII
)
_ITEM = re.compile(r"\s+[*-] ")


class Markdown(griffe.Extension):
  """Rewrites the docstring of every object that is loaded."""

  def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
    if obj.docstring is not None:
      obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
  """Writes what a docstring says in Markdown; its sections stay as they are."""
  text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
  text = re.sub(
    r"^\.\. math::\n((?:\n|  .*\n?)+)",
    lambda match: f"$$\n{match[1].strip()}\n$$\n",
    text,
    flags=re.MULTILINE,
  )
  out, in_section = [], False
  for paragraph in text.split("\n\n"):
    lines = paragraph.split("\n")
    if not lines[0].startswith(" "):
      in_section = bool(_SECTION.fullmatch(lines[0]))
    if not in_section:
      lines = _plain_paragraph(lines)
    out.append("\n".join(lines))
  return "\n\n".join(out)


def _plain_paragraph(lines: list[str]) -> list[str]:
  """A paragraph outside all sections: preformatted, a list, or as it is."""
  if all(re.match(r"  +\S", line) for line in lines):
    if not _ITEM.match(lines[0]):
      return ["```text", *(line[2:] for line in lines), "```"]
  out = []
  for line in lines:
    if _ITEM.match(line) and out and not out[-1].startswith((" ", "*", "-")):
      out.append("")
    out.append(line)
  return out
