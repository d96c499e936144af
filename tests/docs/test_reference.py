# SPDX-License-Identifier: Apache-2.0
"""Every public name has an entry in the API reference, and nothing else has."""

import ast
import importlib
import inspect
import re
from types import ModuleType

import pytest

from tests.docs.pages import DOCS

PUBLIC = (
  "coat_jax",
  "coat_jax.codecs",
  "coat_jax.layers",
  "coat_jax.optax_coat",
  "coat_jax.plan",
  "coat_jax.recipe",
  "coat_jax.sharding",
)
# For the optimizer's other modules, not for users.
INTERNAL = {"coat_jax.optax_coat.paired", "coat_jax.optax_coat.parameter_key"}
ENTRIES = [
  entry
  for page in sorted((DOCS / "reference").glob("*.md"))
  for entry in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]


def find(path: str):
  """The object of a dotted path."""
  try:
    return importlib.import_module(path)
  except ModuleNotFoundError:
    module, _, name = path.rpartition(".")
    return getattr(find(module), name)


def public_names(module: ModuleType) -> list[str]:
  """What a module defines or exports as `x as x`; modules have own pages."""
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
    if (path := f"{module}.{name}") not in {*ENTRIES, *INTERNAL}
    # One entry is enough for what can be imported from several modules.
    and not any(find(path) is other for other in documented)
  ]
  assert missing == [], "write `::: NAME` into a page of docs/reference"


def test_entries_are_there_once():
  objects = [find(entry) for entry in ENTRIES]
  twice = [
    entry
    for i, entry in enumerate(ENTRIES)
    if any(objects[i] is other for other in objects[:i])
  ]
  assert twice == []


def test_public_names_are_those_of_the_source():
  found = public_names(importlib.import_module("coat_jax"))
  assert "coat_adamw" in found and "E4M3" in found
  assert "codecs" not in found
  assert public_names(importlib.import_module("coat_jax.sharding")) == [
    "abstract_state",
    "state_shardings",
    "fit_group_size",
  ]
