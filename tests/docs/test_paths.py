# SPDX-License-Identifier: Apache-2.0
"""Checks that the files and functions named on pages exist."""

import importlib
import re

import pytest

from coat_jax import recipes
from tests.docs.pages import DOCS, PAGES, ROOT

FOLDERS = "coat_jax|train|benchmarks|studies|examples|tests|docs"
# Folders in other projects.
OTHERS = {"examples/gemma"}


def quoted(text: str) -> list[str]:
  """Returns the inline code of a page, without its code blocks."""
  text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
  return re.findall(r"`([^`\n]+)`", text)


def missing_paths(text: str) -> list[str]:
  """Returns the paths in a page that do not exist."""
  paths = [x for x in quoted(text) if re.match(rf"({FOLDERS})/[\w/.]*$", x)]
  return [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize(
  "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)
def test_paths_exist(page):
  found = missing_paths(page.read_text())
  assert [path for path in found if path not in OTHERS] == []


def test_missing_path_is_found():
  assert missing_paths("`coat_jax/no_such.py`") == ["coat_jax/no_such.py"]


def test_architecture_names_existing_files_and_functions():
  text = (DOCS / "architecture.md").read_text()
  package = ROOT / "coat_jax"
  for name in quoted(text):
    if re.fullmatch(r"\w+/[\w/.]*", name):
      assert (ROOT / name).exists() or (package / name).exists(), name
    elif match := re.fullmatch(r"(mesh)\.(\w+)", name):
      if match[2] != "py":
        module = importlib.import_module(f"coat_jax.{match[1]}")
        assert hasattr(module, match[2]), name
  for file, names in re.findall(r"`([\w/]+)\.py`: ((?:`\w+`,? ?)+)", text):
    module = importlib.import_module(f"coat_jax.{file.replace('/', '.')}")
    for name in re.findall(r"`(\w+)`", names):
      assert hasattr(module, name), (file, name)


def test_layers_page_shows_the_description_of_a_recipe():
  text = (DOCS / "layers.md").read_text()
  assert recipes.coat(residuals="coat").describe() in text
