# SPDX-License-Identifier: Apache-2.0
"""Prepares docstrings for mkdocstrings, which builds the reference pages.

Docstrings are written for a terminal. Markdown would break three things in
them: indented tables and formulas, lists without a blank line before them, and
formulas in the style of optax's docstrings.

Also, a function may have the same name as a module. As in Python,
`coat_jax.layers.linear` is then the function.
"""

import contextlib
import re
from typing import Any

import griffe

_SECTION = re.compile(
  r"(Args|Attributes|Examples?|Raises|Returns|Yields):", re.ASCII
)
_ITEM = re.compile(r"\s+[*-] ")


class Reference(griffe.Extension):
  """The extension that griffe calls for every object that it loads."""

  def __init__(self):
    super().__init__()
    # Objects that are defined in a package's __init__.py.
    self._written: dict[str, griffe.Object] = {}

  def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
    """Converts an object's docstring to Markdown."""
    if obj.docstring is not None:
      obj.docstring.value = to_markdown(obj.docstring.value)

  def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
    """Records what a package's __init__.py defines, before modules load."""
    if mod.is_init_module:
      for member in mod.members.values():
        if not member.is_alias:
          self._written[member.path] = member

  def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
    """Makes each name refer to the same object as in Python."""
    for module in pkg.modules.values():
      if module.is_init_module and not module.is_alias:
        self.on_package(pkg=module)
    shadowing = {}
    for name, module in pkg.members.items():
      if not isinstance(module, griffe.Module):
        continue
      path = f"{pkg.path}.{name}"
      if path in self._written:
        shadowing[name] = self._written[path]
      elif pkg.imports.get(name) == f"{path}.{name}":
        shadowing[name] = griffe.Alias(name, module.members[name], parent=pkg)
    # Other members must still find what they import from these modules.
    for member in pkg.members.values() if shadowing else ():
      if member.is_alias:
        with contextlib.suppress(griffe.AliasResolutionError):
          member.resolve_target()
    pkg.members.update(shadowing)


def to_markdown(text: str) -> str:
  """Converts a docstring to Markdown, except sections such as Args."""
  text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
  text = re.sub(
    r"^\.\. math::\n((?:\n|  .*\n?)+)",
    lambda match: f"$$\n{match[1].strip()}\n$$\n\n",
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
  """Converts a paragraph outside sections: a code block, a list or text."""
  if all(re.match(r"  +\S", line) for line in lines):
    if not _ITEM.match(lines[0]):
      return ["```text", *(line[2:] for line in lines), "```"]
  out = []
  for line in lines:
    if _ITEM.match(line) and out and not out[-1].startswith((" ", "*", "-")):
      out.append("")
    out.append(line)
  return out
