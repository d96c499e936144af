# SPDX-License-Identifier: Apache-2.0
"""Checks that the API reference has an entry for every public name."""

import ast
import importlib
import inspect
import re
from types import ModuleType

import griffe
import pytest

from coat_jax.optimizer import sharding
from docs.building import docstrings
from tests.docs.pages import DOCS, ROOT

PUBLIC = (
  "coat_jax",
  "coat_jax.codecs",
  "coat_jax.codecs.group",
  "coat_jax.layers",
  "coat_jax.models",
  "coat_jax.numerics",
  "coat_jax.optax_coat",
  "coat_jax.recipes",
  "coat_jax.optimizer",
)
ENTRIES = [
  entry
  for page in sorted((DOCS / "reference").glob("*.md"))
  for entry in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]


def find(path: str):
  """Returns the object at a dotted path; prefers functions to modules."""
  parent, _, name = path.rpartition(".")
  if parent and hasattr(find(parent), name):
    return getattr(find(parent), name)
  return importlib.import_module(path)


def public_names(module: ModuleType) -> list[str]:
  """Lists names that a module defines or exports as `x as x`."""
  names = []
  for node in ast.parse(inspect.getsource(module)).body:
    match node:
      case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
        names.append(name)
      case ast.TypeAlias(name=ast.Name(id=name)):
        names.append(name)
      case ast.AnnAssign(target=ast.Name(id=name)):
        names.append(name)
      case ast.Assign(targets=targets):
        names += [x.id for x in targets if isinstance(x, ast.Name)]
      case ast.ImportFrom(names=aliases):
        names += [x.asname for x in aliases if x.asname == x.name]
  return [
    name
    for name in names
    if not name.startswith("_")
    and not isinstance(getattr(module, name), ModuleType)
  ]


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_have_entries(module):
  documented = [find(entry) for entry in ENTRIES]
  missing = [
    path
    for name in public_names(importlib.import_module(module))
    if (path := f"{module}.{name}") not in ENTRIES
    # One entry is enough for what can be imported from several modules.
    and not any(find(path) is other for other in documented)
  ]
  assert missing == [], "write `::: NAME` into a page of docs/reference"


def test_entries_are_unique():
  objects = [find(entry) for entry in ENTRIES]
  twice = [
    entry
    for i, entry in enumerate(ENTRIES)
    if any(objects[i] is other for other in objects[:i])
  ]
  assert twice == []


def test_entries_have_the_kind_of_the_object():
  """If a function has the name of its module, the entry is the function."""
  extensions = griffe.load_extensions(docstrings.Reference())
  package = griffe.load("coat_jax", search_paths=[ROOT], extensions=extensions)
  for entry in ENTRIES:
    documented, python = package[entry.removeprefix("coat_jax.")], find(entry)
    kinds = (documented.is_module, documented.is_class)
    # A dtype is a class too, but its entry is an attribute.
    is_class = inspect.isclass(python) and documented.kind.value != "attribute"
    assert kinds == (inspect.ismodule(python), is_class), entry


def test_functions_take_precedence_over_modules_of_their_name():
  files = {
    "__init__.py": "from p.a import A as A\nfrom p.a import a as a\n"
    "from p.b import B as B\n\ndef b(): ...",
    "a.py": "def a(): ...\n\nclass A: ...",
    "b.py": "class B: ...",
  }
  extensions = griffe.load_extensions(docstrings.Reference())
  with griffe.temporary_visited_package("p", files, extensions=extensions) as p:
    assert p["a"].is_function and p["b"].is_function
    assert p["A"].is_class and p["B"].is_class


def test_docstrings_become_markdown():
  lines = ["Table:", "", "  a  b", "  1  2", "", "List:", "  * one", "  * two"]
  lines += ["", "Args:", "  x: [n].", "", "    More."]
  want = ["Table:", "", "```text", "a  b", "1  2", "```", "", "List:", ""]
  want += lines[6:]
  assert docstrings.to_markdown("\n".join(lines)).split("\n") == want
  formula = "With :math:`x`,\n\n.. math::\n\n  y = x\n\nit is."
  want = "With $x$,\n\n$$\ny = x\n$$\n\nit is."
  assert docstrings.to_markdown(formula) == want


def test_public_names_are_found_in_the_source():
  found = public_names(importlib.import_module("coat_jax"))
  assert "coat_adamw" in found and "MeshAxes" in found
  assert "codecs" not in found
  assert public_names(sharding) == [
    "abstract_state",
    "state_shardings",
    "fit_group_size",
  ]
