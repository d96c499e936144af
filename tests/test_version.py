# SPDX-License-Identifier: Apache-2.0
"""Checks where the version is defined, and the wheel on the install page."""

import ast
import re
import tomllib

import coat_jax
from tests.docs.pages import DOCS, ROOT


def test_version_is_a_literal_in_the_package():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert project["dynamic"] == ["version"] and "version" not in project
  # flit reads a literal from the file, without importing it.
  tree = ast.parse((ROOT / "coat_jax" / "__init__.py").read_text())
  (found,) = (
    ast.literal_eval(node.value)
    for node in tree.body
    if isinstance(node, ast.Assign)
    and ast.unparse(node.targets[0]) == "__version__"
  )
  assert coat_jax.__version__ == found
  assert re.fullmatch(r"\d+\.\d+\.\d+", found)


def test_install_page_names_the_wheel_of_this_version():
  names = re.findall(r"coat_jax-[\d.]+-py3", (DOCS / "install.md").read_text())
  assert {*names} == {f"coat_jax-{coat_jax.__version__}-py3"}
