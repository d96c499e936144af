# SPDX-License-Identifier: Apache-2.0
"""Tests the memory benchmark: fields of its rows, and bounds on memory."""

import json
import types

import jax
import pytest

from benchmarks import memory, training_step
from studies import table7
from train.presets import PRESETS

KINDS = ["norm", "activation", "rope", "attention", "linear", "total"]


@pytest.fixture(scope="module")
def residuals():
  rows = memory.residuals("llama2_7b", tokens=256)
  return {
    (c["recipe"], c["residuals"], c["attention"]): row
    for row in rows
    for c in [row["case"]]
  }


def test_residual_rows_have_all_fields_and_add_up(residuals):
  for row in residuals.values():
    assert row["bench"] == "memory.residuals"
    assert row["case"]["preset"] == "llama2_7b"
    assert list(row["bytes_per_token_layer"]) == KINDS
    *kinds, total = row["bytes_per_token_layer"].values()
    # Values in rows have six significant digits.
    assert sum(kinds) == pytest.approx(total, rel=1e-5)
    assert row["units"] == pytest.approx(total / 8192, rel=1e-5)
    assert {"date", "jax", "device"} <= row.keys()


@pytest.mark.parametrize(
  "kept, attention, bound",
  [("coat", "bf16", 12.2), ("minimal", "bf16", 8.3), ("minimal", "fp8", 6.9)],
)
def test_coat_saves_no_more_than_its_bound(residuals, kept, attention, bound):
  row = residuals["coat", kept, attention]
  # A number far below the bound would mean that the count misses an array.
  assert bound - 0.3 < row["units"] <= bound


def test_counts_match_the_paper_and_the_reference(residuals):
  bf16 = residuals["bf16", "autodiff", "bf16"]
  fp8_linear = residuals["fp8_linear", "autodiff", "bf16"]
  coat = residuals["coat", "coat", "bf16"]
  assert bf16["paper_units"] == 22.66 and coat["paper_units"] == 13.33
  assert bf16["units"] > fp8_linear["units"] > 2 * coat["units"]
  # Counted by hand, the tensors that the reference's Llama layer saves take
  # 98472 bytes per token without RoPE's inputs, and 114856 with them.
  config = PRESETS["llama2_7b"]().model
  assert memory.reference_bytes(config) == 98472
  reference = coat["reference_units"]
  assert reference["without_rope"] == pytest.approx(98472 / 8192, rel=1e-5)
  assert reference["with_rope"] == pytest.approx(114856 / 8192, rel=1e-5)
  # We save the same tensors, plus positions and scales of weights.
  assert coat["units"] == pytest.approx(reference["without_rope"], rel=1e-3)


def test_state_rows_are_within_their_bounds(capsys):
  rows = memory.main(["state", "--preset", "llama2_7b"])
  printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert printed == rows
  bounds = {"coat": 2.09, "coat_e8m0": 2.04, "log8": 2.04}
  for row in rows:
    assert row["bench"] == "memory.state"
    case, found = row["case"], row["bytes_per_param"]
    assert case["preset"] == "llama2_7b"
    itemsize = {"float32": 4, "bfloat16": 2}[case["params"]]
    assert found["params"] == found["grads"] == itemsize
    assert 2 < found["optimizer"] <= bounds.get(case["codec"], 8)
    assert row["num_params"] == 6_738_415_616
  assert {row["case"]["codec"] for row in rows} == memory.CODECS.keys()


def test_command_line_sets_tokens_and_refuses_bad_values(capsys):
  rows = memory.main(["residuals", "--preset", "demo", "--tokens", "64"])
  assert len(rows) == len(memory.RECIPES)
  assert all(row["case"]["tokens"] == 64 for row in rows)
  capsys.readouterr()
  for bad in (["residuals", "--tokens", "0"], ["state", "--preset", "llama9"]):
    with pytest.raises(SystemExit, match="2"):
      memory.main(bad)
  assert "from 1 to 1048576, got 0" in capsys.readouterr().err


def test_plan_refuses_a_mesh_that_does_not_fit(not_compiling, capsys):
  line = ["plan", "--presets", "demo", "--gpus", "1", "3"]
  with pytest.raises(SystemExit, match="2"):
    memory.main(line)
  *_, last = capsys.readouterr().err.splitlines()
  assert "error: mesh: fsdp must divide d_model, got fsdp=3" in last
  assert not not_compiling, "a step was compiled before all were checked"


class Compiled:
  """A fake compiled step with a peak of 100 bytes in BF16, otherwise 40."""

  def __init__(self, config):
    self.peak_memory_in_bytes = 100 if config.recipe == "bf16" else 40

  def memory_analysis(self):
    return self


@pytest.fixture
def not_compiling(monkeypatch):
  """Fakes compiled steps; returns the list of configs that were compiled."""
  configs = []

  def compile_step(config):
    configs.append(config)
    state = types.SimpleNamespace(
      params=jax.ShapeDtypeStruct((10,), "float32"),
      optimizer=jax.ShapeDtypeStruct((20,), "uint8"),
    )
    return Compiled(config), state

  monkeypatch.setattr(training_step, "compile_step", compile_step)
  return configs


def test_table7_rows_compare_variants_with_the_paper(not_compiling):
  options = ["--presets", "llama2_7b", "--gpus", "4"]
  variants = ["bf16", "coat", "minimal_attention"]
  rows = table7.main([*options, "--variants", *variants])
  assert [config.mesh for config in not_compiling] == ["fsdp=4"] * 3
  assert {(c.batch, c.seq) for c in not_compiling} == {(8, 2048)}
  assert [c.optim.codec for c in not_compiling] == ["float32", "coat", "coat"]
  # In the paper, BF16 takes 55.1 GB and COAT 35.6 GB.
  published = [1, 55.1 / 35.6, 55.1 / 35.6]
  for row, ratio, recipe in zip(
    rows, published, ["bf16", "coat", "coat"], strict=True
  ):
    case = row["case"]
    assert row["bench"] == "memory.table7"
    assert (case["preset"], case["gpus"], case["batch"]) == ("llama2_7b", 4, 2)
    assert case["recipe"] == recipe
    assert row["published_ratio"] == pytest.approx(ratio, rel=1e-5)
    assert row["ratio_to_bf16"] == 100 / row["peak_bytes"]
    parts = ("weight", "gradient", "optimizer", "activation")
    assert sum(row[f"{p}_bytes"] for p in parts) == row["peak_bytes"]
  kept = [(r["case"]["residuals"], r["case"]["attention"]) for r in rows]
  assert kept == [("autodiff", "bf16"), ("coat", "bf16"), ("minimal", "fp8")]


def test_ratios_need_the_row_of_bf16(not_compiling):
  arguments = ["--presets", "llama2_7b", "--gpus", "1", "--variants", "coat"]
  (row,) = table7.main(arguments)
  assert not_compiling[0].mesh == ""
  assert row["ratio_to_bf16"] is row["published_ratio"] is None


def test_plan_row_states_the_error_of_the_plan(not_compiling):
  (row,) = memory.main(
    ["plan", "--presets", "demo", "--gpus", "2", "--variants", "minimal"]
  )
  assert not_compiling[0].mesh == "fsdp=2"
  assert row["bench"] == "memory.plan" and row["peak_bytes"] == 40
  assert row["error"] == pytest.approx(row["planned_bytes"] / 40 - 1, rel=1e-5)
  assert row["moment"] in ("loss", "backward", "embedding")
