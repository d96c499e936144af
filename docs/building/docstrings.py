# SPDX-License-Identifier: Apache-2.0
"""What mkdocstrings reads, made ready for the reference pages.

A docstring is read in a terminal first. Three things that it writes for there
would be lost in Markdown: tables and formulas that are indented, lists without
a blank line before them, and the formulas of optax's docstrings.

And a package may export a function under the name of the module that defines
it: `coat_jax.layers.linear` is the function, as it is in Python.
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
  """Called for all that is loaded."""

  def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
    """Rewrites a docstring."""
    if obj.docstring is not None:
      obj.docstring.value = to_markdown(obj.docstring.value)

  def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
    """Gives names to what Python gives them to."""
    _unshadow(pkg)


def _unshadow(package: griffe.Module) -> None:
  """Puts what a package imports before its modules of the same name."""
  for module in package.modules.values():
    if module.is_init_module and not module.is_alias:
      _unshadow(module)
  exported = {}
  for name, path in package.imports.items():
    module = package.members.get(name)
    if isinstance(module, griffe.Module) and name in module.members:
      if path == f"{module.path}.{name}":
        exported[name] = module.members[name]
  # The others still have to find what they import from these modules.
  for member in package.members.values() if exported else ():
    if member.is_alias:
      with contextlib.suppress(griffe.AliasResolutionError):
        member.resolve_target()
  for name, target in exported.items():
    package.members[name] = griffe.Alias(name, target, parent=package)


def to_markdown(text: str) -> str:
  """Writes what a docstring says in Markdown; its sections stay as they are."""
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
