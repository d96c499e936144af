# SPDX-License-Identifier: Apache-2.0
"""Checks that modules import only modules below them."""

import ast
import re
from pathlib import Path

import pytest

import coat_jax

ROOT = Path(__file__).parent.parent

# A folder may import only folders that are before it in this list.
FOLDERS = ("coat_jax", "train", "benchmarks", "studies")

# A module may import only modules of a lower rank.
RANKS = {
  "numerics": 0,
  "recipes": 1,
  **dict.fromkeys(["codecs", "mesh", "ops"], 2),
  **dict.fromkeys(["optimizer", "layers"], 3),
  **dict.fromkeys(["models", "optax_coat", "pallas"], 4),
  "integrations": 5,
}


def imports(tree):
  """Yields (node, dotted name) of each import; `from m import n` is m.n."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from ((node, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = "." * node.level + (node.module or "")
      yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def faults(path, source):
  """Yields what is wrong with a file at `path`, relative to the root."""
  tree = ast.parse(source)
  folder, own = path.parts[0], path.parts[min(1, len(path.parts) - 1)]
  own = own.removesuffix(".py")
  if len(source.splitlines()) > 400:
    yield "has more than 400 lines"
  if folder == "coat_jax" and own != "__init__" and own not in RANKS:
    yield f"{own} has no rank; give it one in {Path(__file__).name}"
    return
  for _, name in imports(tree):
    if name.startswith("."):
      yield f"relative import {name}"
    top = name.split(".")[0]
    if folder in FOLDERS and top in FOLDERS[FOLDERS.index(folder) + 1 :]:
      yield f"{name}: {folder} does not import {top}"
    if top != "coat_jax":
      continue
    if folder in FOLDERS[1:]:
      if "._" in name:
        yield f"private name {name}"
      continue
    if folder != "coat_jax":
      continue
    other = (name.split(".") + [""])[1]
    if other == "pallas" and own != "pallas":
      yield f"{name}: only ops loads kernels, by name and when first needed"
    if own in ("__init__", other):
      continue
    # Adapters may import names from coat_jax itself, as users do.
    if own == "integrations" and hasattr(coat_jax, other):
      continue
    if RANKS.get(other, 99) >= RANKS[own]:
      yield f"{name} is not below {own}"
  if folder in FOLDERS[1:]:
    yield from private_attributes(tree)


def private_attributes(tree):
  """Yields uses of private names of coat_jax's modules: `codecs._name`."""
  ours = {
    (alias.asname or alias.name).split(".")[0]
    for node in ast.walk(tree)
    if isinstance(node, ast.Import | ast.ImportFrom)
    for alias in node.names
    if f"{getattr(node, 'module', None) or alias.name}.".startswith("coat_jax.")
  }
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
      name = ast.unparse(node)
      if name.split(".")[0] in ours:
        yield f"private name {name}"


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_imports_only_go_down(folder):
  found = [
    f"{path.relative_to(ROOT)}: {fault}"
    for path in sorted((ROOT / folder).rglob("*.py"))
    for fault in faults(path.relative_to(ROOT), path.read_text())
  ]
  assert not found, "\n".join(found)


@pytest.mark.parametrize(
  "path, source",
  [
    ("coat_jax/numerics/qtensor.py", "from coat_jax import codecs"),
    ("coat_jax/ops/norm.py", "from coat_jax.mesh import spec_of"),
    ("coat_jax/recipes.py", "from coat_jax.mesh import spec_of"),
    ("coat_jax/numerics/qtensor.py", "def f():\n  import coat_jax"),
    ("coat_jax/numerics/qtensor.py", "from . import formats"),
    ("coat_jax/ops/norm.py", "from coat_jax.pallas import quantize"),
    ("coat_jax/pallas/norm.py", "from coat_jax import models"),
    ("coat_jax/__init__.py", "from coat_jax.pallas import quantize"),
    ("coat_jax/ops/norm.py", "import coat_jax.layers.norm"),
    ("coat_jax/unheard_of.py", ""),
    ("train/step.py", "from coat_jax.codecs import _coat"),
    ("train/step.py", "import coat_jax._private"),
    ("benchmarks/b.py", "from coat_jax import codecs\ncodecs._coat()"),
    ("train/step.py", "from benchmarks import harness"),
    ("benchmarks/b.py", "from studies.rows import read_rows"),
    ("studies/s.py", "import coat_jax._private"),
    ("train/step.py", "\n" * 401),
  ],
)
def test_each_rule_finds_a_planted_fault(path, source):
  assert list(faults(Path(path), source))


@pytest.mark.parametrize(
  "path, source",
  [
    ("coat_jax/codecs.py", "from coat_jax.numerics.qtensor import QTensor"),
    ("coat_jax/layers/mlp.py", "from coat_jax.layers import norm"),
    ("coat_jax/pallas/norm.py", "from coat_jax.ops.types import Operand"),
    ("coat_jax/pallas/norm.py", "from coat_jax.pallas import tile"),
    ("train/step.py", "import coat_jax\ncoat_jax.codecs.coat()"),
    ("studies/s.py", "from benchmarks.harness import emit"),
  ],
)
def test_no_rule_finds_what_is_allowed(path, source):
  assert not list(faults(Path(path), source))
