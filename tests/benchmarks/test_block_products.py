# SPDX-License-Identifier: Apache-2.0
"""Tests the rows of benchmarks.block_products."""

import json

import pytest

from benchmarks import block_products


def test_rows_state_speed_and_error(capsys):
  rows = block_products.main(
    [
      *("--preset=llama_60m", "--tokens=128", "--repeats=1"),
      *("--matrices", "out", "--products", "linear_dgrad", "linear_wgrad"),
    ]
  )
  printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert printed == rows
  found = [(row["case"]["product"], row["implementation"]) for row in rows]
  assert found == [
    (product, implementation)
    for product in ("linear_dgrad", "linear_wgrad")
    for implementation in ("bf16", "xla")
  ]
  for row in rows:
    tflops = 2 * 128 * 512 * 512 / row["median_ms"] * 1e-9
    assert row["tflops"] == pytest.approx(tflops, rel=1e-4)
  # linear_dgrad rounds its result to BF16; linear_wgrad does not round.
  errors = [row["error"] for row in rows if row["implementation"] == "xla"]
  assert 0.001 < errors[0] < 0.003 and errors[1] == 0


def test_unknown_tile_exits_with_2(capsys):
  with pytest.raises(SystemExit) as stopped:
    block_products.main(["--tiles", "wide"])
  assert stopped.value.code == 2
  assert "invalid choice: 'wide'" in capsys.readouterr().err
