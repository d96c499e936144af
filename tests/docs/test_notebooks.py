# SPDX-License-Identifier: Apache-2.0
"""Runs every notebook, and compares its output except for digits."""

import re

import pytest

from docs.building import notebooks as building
from tests.docs import notebooks
from tests.docs.pages import DOCS
from tests.test_words import private_words

every_notebook = pytest.mark.parametrize(
  "path", notebooks.NOTEBOOKS, ids=lambda path: path.stem
)


def without_digits(text: str) -> str:
  """Returns a text without its numbers, which depend on the machine."""
  return re.sub(r"[ ]*-?\d[\d,.]*(e-?\d+)?", "#", text)


def check_optimizer(names, printed):
  adam, coat = names["adam_losses"], names["coat_losses"]
  assert coat[0] == pytest.approx(adam[0], rel=1e-5)
  # The losses differ by at most 10 % of Adam's reduction of the loss.
  assert coat[-1] == pytest.approx(adam[-1], abs=0.1 * (adam[0] - adam[-1]))
  for moment in ("mu", "nu"):
    assert 0 < names["report"][moment]["relative_error"] < 0.1
  nearest, stochastic = re.findall(r"[\d.]+$", printed[-1], re.M)
  assert float(nearest) == 1
  assert float(stochastic) == pytest.approx(0.999, abs=1e-4)


def check_fp8_model(names, printed):
  for losses in (names["bf16_losses"], names["fp8_losses"]):
    assert losses[0] > 4 and losses[-1] < 0.2
  assert names["text"] == names["sentence"][: names["length"]]
  assert names["error"] < 0.1
  bf16, coat = re.findall(r"(\d+) bytes per token", "".join(printed))
  assert int(coat) < int(bf16) / 3


CHECKS = {"optimizer": check_optimizer, "fp8_model": check_fp8_model}


@pytest.mark.slow
@every_notebook
def test_notebook_runs_and_prints_what_it_shows(path, as_a_reader):
  names, printed = notebooks.run(path)
  CHECKS[path.stem](names, printed)
  cells = notebooks.code_cells(notebooks.read(path))
  for cell, text in zip(cells, printed, strict=True):
    stored = notebooks.stored_output(cell)
    assert without_digits(text) == without_digits(stored)


@every_notebook
def test_notebook_is_short_and_stores_its_outputs(path):
  notebook = notebooks.read(path)
  cells = notebooks.code_cells(notebook)
  assert len(notebook["cells"]) < 20
  for i, cell in enumerate(cells):
    assert cell["execution_count"] == i + 1
    does_print = "print(" in "".join(cell["source"])
    assert bool(notebooks.stored_output(cell)) == does_print
    compile("".join(cell["source"]), path.name, "exec")
  assert private_words(building.write_page(path)) == {}


@every_notebook
def test_links_of_notebooks_lead_to_files(path):
  cells = notebooks.read(path)["cells"]
  text = "".join("".join(x["source"]) for x in cells if "outputs" not in x)
  links = re.findall(r"\]\(([^)]+)\)", text)
  assert links and all((path.parent / x).exists() for x in links)


def test_notebooks_are_found_and_made_into_pages():
  assert {path.stem for path in notebooks.NOTEBOOKS} == {*CHECKS}
  index = (DOCS / "index.md").read_text()
  config = (DOCS.parent / "mkdocs.yml").read_text()
  for path in notebooks.NOTEBOOKS:
    assert f"(notebooks/{path.stem}.md)" in index
    assert f"notebooks/{path.stem}.md" in config
    page = building.write_page(path)
    assert page.startswith("# ") and f"]({path.name})" in page
    assert ".ipynb)" not in page.replace(f"]({path.name})", "", 1)
