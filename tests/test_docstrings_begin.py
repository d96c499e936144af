# SPDX-License-Identifier: Apache-2.0
"""Checks that docstrings begin with a verb or the subject, not a fragment."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

FRAGMENT = re.compile(
  r"(Of|What|As|Which|Whose|None of|Where|So|Those|How many)\b"
)
# Folders and files to check.
DONE = (
  "benchmarks",
  "coat_jax/numerics/checks.py",
  "coat_jax/codecs",
  "coat_jax/numerics/formats.py",
  "coat_jax/layers",
  "coat_jax/mesh.py",
  "coat_jax/models",
  "coat_jax/ops",
  "coat_jax/optax_coat.py",
  "coat_jax/optimizer",
  "coat_jax/pallas",
  "coat_jax/numerics/qtensor.py",
  "coat_jax/recipes.py",
  "coat_jax/optimizer/sharding.py",
  "coat_jax/numerics/stochastic.py",
  "examples",
  "studies",
  "train",
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(source: str) -> list[tuple[int, str]]:
  """Lists (line number, text) of docstrings that begin with a fragment."""
  return [
    (node.body[0].lineno, text.splitlines()[0])
    for node in ast.walk(ast.parse(source))
    if isinstance(node, DOCUMENTED)
    and (text := ast.get_docstring(node))
    and FRAGMENT.match(text)
  ]


def files(name: str) -> list[Path]:
  """Returns the Python files of a folder, or the file itself."""
  path = ROOT / name
  return sorted(path.rglob("*.py")) if path.is_dir() else [path]


@pytest.mark.parametrize("name", DONE)
def test_docstrings_begin_with_a_verb_or_the_subject(name):
  assert files(name)
  places = [
    f"{path.relative_to(ROOT)}:{line}: {text}"
    for path in files(name)
    for line, text in fragments(path.read_text())
  ]
  assert not places, "\n".join(["begin with a verb or the subject:", *places])


@pytest.mark.parametrize(
  "source",
  [
    '"""What follows the stack."""',
    'class A:\n  """Of the layers, one."""',
    'class A:\n  def f(self):\n    """None of layers.\n\n    More.\n    """',
    'async def f():\n  """How many there are."""',
  ],
)
def test_fragment_is_found(source):
  assert len(fragments(source)) == 1


@pytest.mark.parametrize(
  "source",
  [
    '"""Offsets of tensors."""',
    'def f():\n  """None if all layers are the same."""',
    'def f():\n  x = """What is no docstring."""\n  return x',
  ],
)
def test_other_beginnings_are_allowed(source):
  assert fragments(source) == []
