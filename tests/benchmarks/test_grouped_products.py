# SPDX-License-Identifier: Apache-2.0
"""Tests the rows of benchmarks.grouped_products."""

import json

import pytest

from benchmarks import grouped_products


def test_grouped_rows_state_speed_and_error(capsys):
  rows = grouped_products.main(
    [
      *("--models=demo_moe", "--tokens=64", "--repeats=1"),
      *("--matrices", "down", "--routings", "skewed"),
      *("--products", "dgrad", "wgrad"),
    ]
  )
  printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert printed == rows
  found = [(row["case"]["product"], row["implementation"]) for row in rows]
  assert found == [
    (product, implementation)
    for product in ("dgrad", "wgrad")
    for implementation in ("bf16", "xla")
  ]
  for row in rows:
    tflops = 2 * 128 * 192 * 128 / row["median_ms"] * 1e-9
    assert row["tflops"] == pytest.approx(tflops, rel=1e-4)
  # dgrad rounds its result to BF16; wgrad does not round.
  errors = [row["error"] for row in rows if row["implementation"] == "xla"]
  assert 0.001 < errors[0] < 0.003 and errors[1] == 0


def test_skewed_routing_has_large_and_empty_experts():
  sizes = grouped_products.sizes_of("skewed", 65536, 128)
  assert sizes.sum() == 65536 and sizes.min() == 0
  # Shares are proportional to 1, 1 / 2, ..., 1 / 127, whose sum is 5.4. Uniform
  # shares are 1 / 128.
  assert sizes.max() == pytest.approx(65536 / 5.4, rel=0.05)
  uniform = grouped_products.sizes_of("uniform", 65536, 128)
  # The bound is five standard deviations of a binomial with a mean of 512.
  assert abs(uniform - 512).max() < 5 * 512**0.5
