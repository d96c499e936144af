# SPDX-License-Identifier: Apache-2.0
"""Tests of drawing a layer's times."""

from pathlib import Path

import pytest

from benchmarks import plot

ROWS = Path(__file__).parents[2] / "docs" / "rows" / "layer.jsonl"


def test_the_rows_of_the_docs_can_be_drawn(tmp_path):
  out = tmp_path / "layer.png"
  plot.main([str(ROWS), str(out)])
  assert out.read_bytes().startswith(b"\x89PNG")
  rows = plot.read_rows(ROWS)
  assert {row["case"]["variant"] for row in rows} >= {"bf16", "minimal"}


def test_rows_without_times_are_refused(tmp_path):
  rows = tmp_path / "rows.jsonl"
  rows.write_text('{"bench": "layer.scan", "case": {}}\n')
  with pytest.raises(ValueError, match="must hold rows of layer.time"):
    plot.read_rows(rows)
