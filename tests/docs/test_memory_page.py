# SPDX-License-Identifier: Apache-2.0
"""Checks that numbers in docs/memory.md match counts and measured rows."""

import pytest

from coat_jax import recipes
from tests.docs.pages import DOCS
from tests.docs.test_figures import measured, table
from tests.train.memory.runs import LLAMA2_7B
from train.memory.count import saved_bytes

PAGE = (DOCS / "memory.md").read_text()


def test_bytes_per_parameter_add_up():
  shown = table(PAGE, "## Bytes per parameter")
  assert len(shown) == 8
  for weights, gradients, optimizer, together, whole in shown:
    total = weights + (gradients or 0) + optimizer
    assert total == pytest.approx(together)
    # Numbers are rounded to 0.1 GB, and 2.078 is written as 2.08.
    assert whole == pytest.approx(total * 6.738415616, abs=0.08)


def test_bytes_per_token_match_the_counts():
  coat, bf16 = recipes.coat(), recipes.bf16()
  cases = [(bf16, "none"), (recipes.fp8_linear(), "none")]
  cases += [(recipes.coat(residuals="coat"), "none"), (coat, "none")]
  cases += [(recipes.coat(attention="fp8"), "none"), (coat, "fp8")]
  cases += [(bf16, "full"), (coat, "fp8_layer")]
  shown = table(PAGE, "## Bytes per token")
  for (how, remat), (units, megabytes) in zip(cases, shown, strict=True):
    kept = saved_bytes(LLAMA2_7B.model, how, remat=remat)
    assert kept / 8192 == pytest.approx(units, rel=0.01)
    assert 32 * kept / 1e6 == pytest.approx(megabytes, abs=0.006)


def test_whole_steps_match_the_rows():
  rows = measured("lean")
  # docs/plan.md states the largest and the median error.
  errors = sorted(abs(row["error"]) for row in rows)
  assert errors[-1] <= 0.04 and errors[len(errors) // 2] <= 0.003
  known = [
    [round(row[key] / 1e9, 1) for key in ("peak_bytes", "planned_bytes")]
    for row in rows
    if abs(row["error"]) <= 0.015
  ]
  shown = table(PAGE, "## Memory of whole steps")
  assert len(shown) == 20 and all(cells in known for cells in shown)


def test_errors_of_steps_with_recomputation_match_the_rows():
  # docs/plan.md states these errors.
  errors = sorted(abs(row["error"]) for row in measured("plan_remat"))
  assert len(errors) == 144 and errors[72] <= 0.003
  assert errors[139] <= 0.032 and errors[143] <= 0.117
