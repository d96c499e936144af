# SPDX-License-Identifier: Apache-2.0
"""Figures of the pages are those of the rows; pictures can be drawn again."""

import json
import re

import pytest

from benchmarks import memory, quantization_tables, stability
from docs.figures import expansion, flow, mesh, style
from tests.docs.pages import DOCS, ROOT

PERFORMANCE = (DOCS / "performance.md").read_text()


def measured(name):
  lines = (DOCS / "rows" / f"{name}.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def table(text, after):
  """The first table behind `after`: each row's numbers, None for other cells.

  Commas are left out, and so is all that follows a number.
  """
  _, found, rest = text.partition(after)
  assert found, after
  lines = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)[0].splitlines()
  return [
    [_number(cell) for cell in line.split("|")[2:-1]] for line in lines[2:]
  ]


def _number(cell):
  found = re.match(r"\d[\d,]*(\.\d+)?", cell.strip(" *"))
  return found and float(found[0].replace(",", ""))


def training_row(variant, batch):
  """The row of two GPUs."""
  (row,) = (
    row
    for row in measured("training")
    for case in (row["case"],)
    if (case["mesh"], case["batch_per_gpu"]) == ("fsdp=2", batch)
    and case["variant"] == variant
  )
  return row


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_headline_is_that_of_the_rows(page):
  before_table = (ROOT / page).read_text().partition("| Llama-2-7B")[0]
  pairs = table((ROOT / page).read_text(), before_table)
  rows = training_row("bf16", 2), training_row("minimal", 2)
  assert [round(row["tokens_per_s_per_gpu"]) for row in rows] in pairs
  assert [round(row["peak_bytes"] / 1e9, 1) for row in rows] in pairs
  # As test_memory counts them.
  assert [8, 2.08] in pairs


def test_training_table_is_that_of_the_rows():
  cases = [("bf16", 2), ("fp8_linear", 2), ("coat", 2), ("minimal", 2)]
  cases += [("bf16", 4), ("minimal", 4)]
  cases += [("bf16", 1), ("fp8_linear", 1), ("minimal", 9)]
  want = []
  for variant, batch in cases:
    row = training_row(variant, batch)
    rate = row["tokens_per_s_per_gpu"]
    # 80 GB hold one sequence in BF16.
    base = training_row("bf16", 1 if batch == 9 else batch)
    of_bf16 = round(rate / base["tokens_per_s_per_gpu"], 2)
    peak = round(row["peak_bytes"] / 1e9, 1)
    want.append([round(row["median_ms"]), round(rate), of_bf16, peak])
  assert table(PERFORMANCE, "## Training on several GPUs") == want


def test_layer_table_is_that_of_the_rows():
  times = {
    (row["case"]["variant"], row["case"]["mode"]): row
    for row in measured("layer")
  }
  units = {
    row["case"]["variant"]: row["units_per_layer"]
    for row in measured("layer_scan")
  }
  variants = ["bf16", "bf16_dots", "bf16_nothing", "bf16_names", "fp8_linear"]
  variants += ["coat", "minimal", "minimal_attention", "minimal_codes"]
  variants += ["minimal_nothing"]
  want = []
  for variant in variants:
    # Without the codes, 2 bytes a parameter, which the table names apart.
    unit = units["minimal" if variant == "minimal_codes" else variant]
    if variant == "bf16_names":  # Was compiled only.
      want.append([None] * 4 + [round(unit, 1)])
      continue
    forward, full = (times[variant, mode] for mode in ("forward", "full"))
    ms = [round(row["median_ms"], 2) for row in (forward, full)]
    rest = round(full["tflops"]), round(full["temporary_bytes"] / 1e6)
    want.append([*ms, *rest, round(unit, 1)])
  assert table(PERFORMANCE, "## One decoder layer") == want


def test_optimizer_table_is_that_of_the_rows():
  ms = {}
  for row in measured("optimizer"):
    case = row["case"]
    key = case["codec"], case.get("rounding"), row["implementation"]
    ms[*key, case["dtype"]] = row["median_ms"]
  keys = [("optax.adamw", None, "xla"), ("coat", "nearest", "mosaic")]
  keys += [
    (name, "stochastic", "mosaic")
    for name in ("coat", "coat_e8m0", "log8", "fp8")
  ]
  want = []
  for key in keys:
    cells = []
    for dtype in ("float32", "bfloat16"):
      relative = ms[*key, dtype] / ms[*keys[0], dtype]
      cells += [round(ms[*key, dtype], 2), round(relative, 2)]
    want.append(cells)
  assert table(PERFORMANCE, "## The optimizer's step")[: len(want)] == want


def test_table_of_saved_residuals_is_what_is_counted():
  text = (DOCS / "layers.md").read_text()
  shown = table(text, "## What is saved for the backward pass")
  for column, row in enumerate(memory.residuals("llama2_7b", 256)):
    want = [*row["units_by_kind"].values(), row["units"]]
    # Two decimals; RoPE's 4 bytes a token and the scalars are below one.
    assert [cells[column] for cells in shown] == pytest.approx(want, abs=6e-3)


def test_tables_of_quantization_are_those_of_the_rows():
  text = (DOCS / "stability.md").read_text()
  rows = [
    row for row in measured("quantization") if row["case"]["preset"] == "demo"
  ]
  found = quantization_tables.tables(rows)
  assert len(found) == 5
  for title, lines in found.items():
    assert lines in text, title


def test_page_says_how_much_of_the_grid_there_is():
  said = stability.progress(measured("stability"))
  assert said in " ".join((DOCS / "stability.md").read_text().split())


@pytest.mark.parametrize("figure", [expansion, flow, mesh])
@pytest.mark.slow
def test_figure_is_drawn_for_light_and_dark_pages(figure, tmp_path):
  name = figure.__name__.rpartition(".")[2]
  files = style.write(name, figure.draw, tmp_path)
  names = [f"{name}.{palette}.svg" for palette in ("light", "dark")]
  assert [file.name for file in files] == names
  for file in files:
    assert (DOCS / "figures" / file.name).exists()
    assert 10_000 < file.stat().st_size < 200_000
  assert files[0].read_bytes() != files[1].read_bytes()


def test_expansion_figure_shows_what_the_method_says():
  figure = expansion.draw(style.PALETTES[0])
  shown = [text.get_text() for ax in figure.axes for text in ax.texts]
  for words in ("32 of 128 become 0", "k = 0.75", "22 codes", "77 codes"):
    assert any(words in text for text in shown), words
  text = (DOCS / "method.md").read_text()
  for words in ("a quarter of the values", "k = 0.75", "22 codes", "are 77"):
    assert words in text
