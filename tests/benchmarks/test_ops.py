# SPDX-License-Identifier: Apache-2.0
"""Tests the benchmark of operations: its rows, bytes and FLOPs."""

import json

import jax
import pytest

from benchmarks import cases as shapes
from benchmarks import ops as benchmark

CASES = benchmark.all_cases(shapes.Sizes())


def test_cases_differ():
  cases = {str((case.op, case.shape, case.implementations)) for case in CASES}
  assert len(cases) == len(CASES)


@pytest.mark.parametrize(
  "case",
  [
    case
    for case in benchmark.all_cases(shapes.SMOKE)
    if case.num_bytes
    # Leave out cases that read an argument twice.
    and case.shape.get("scale") != "found"
    and case.op != "join_heads_operand"
    and not case.op.endswith("_bwd_operands")
  ],
  ids=lambda case: "-".join(map(str, (case.op, *case.shape.values()))),
)
def test_bytes_count_arguments_and_results(case):
  args = jax.eval_shape(case.arrays)
  results = jax.eval_shape(lambda *args: case.run("xla", *args), *args)
  # Vectors (statistics, parameters of norms and scales) are not counted.
  matrices = [x for x in jax.tree.leaves((args, results)) if x.ndim > 1]
  assert case.num_bytes == sum(x.size * x.dtype.itemsize for x in matrices)


def test_flops_of_matmuls_follow_from_their_shapes():
  flops = {
    case.shape["weight"]: case.flops
    for case in CASES
    if case.op == "linear_fwd" and "bf16" in case.implementations
  }
  assert flops == {
    "qkv": 2 * 8192 * 4096 * 12288,
    "out": 2 * 8192 * 4096 * 4096,
    "gate_up": 2 * 8192 * 4096 * 22016,
    "down": 2 * 8192 * 11008 * 4096,
  }
  names = "attention_fwd", "attention_bwd"
  attention = [case for case in CASES if case.op in names]
  whole = {"attention_fwd": 2 * 4 * 32 * 2048**2 * 128}
  whole["attention_bwd"] = 2.5 * whole["attention_fwd"]
  assert len(attention) == 10
  for case in attention:
    # A window of half the sequence leaves out a quarter of the triangle.
    share = 0.75 if "window" in case.shape else 1
    share /= case.shape.get("documents", 1)
    assert case.flops == share * whole[case.op]


def test_rows_state_speed_and_share_of_ceiling(capsys):
  arguments = ["--smoke", "--repeats=2", "--cases", "norm_bwd", "linear_wgrad"]
  rows = benchmark.main(arguments)
  first, *printed = map(json.loads, capsys.readouterr().out.splitlines())
  assert printed == rows
  assert first["bench"] == "ops.ceilings"
  products = {"linear_wgrad", "grouped_linear_wgrad"}
  assert {row["case"]["op"] for row in rows} == {"norm_bwd", *products}
  assert {row["implementation"] for row in rows} == {"xla", "bf16"}
  for row in rows:
    by_bytes = row["case"]["op"] == "norm_bwd"
    rate = row["gbps"] if by_bytes else row["tflops"]
    ceiling = {"copy": "copy_gbps", "fp8": "fp8_tflops", "bf16": "bf16_tflops"}
    expected = rate / first[ceiling[row["ceiling"]]]
    assert row["share_of_ceiling"] == pytest.approx(expected, rel=1e-4)
    work = row["bytes"] * 1e-6 if by_bytes else row["flops"] * 1e-9
    assert rate == pytest.approx(work / row["median_ms"], rel=1e-4)


def test_rows_compare_results_of_implementations(monkeypatch):
  x = jax.numpy.array([1.0, -0.0, jax.numpy.nan, 4.0])

  def run(name, x):
    x = x if name == "a" else x.at[:2].set(jax.numpy.array([3.0, 0.0]))
    return x, x.astype("bfloat16")

  case = shapes.Case("op", {}, run, lambda: (x,), ("a", "b"), num_bytes=8)
  monkeypatch.setattr(benchmark, "all_cases", lambda _: [case])
  monkeypatch.setattr(benchmark, "PORTABLE", ("a", "b"))
  same, apart = benchmark.main(["--smoke", "--repeats=1", "--compare=a"])
  assert same["unequal"] == same["largest_difference"] == [0, 0]
  assert apart["compared_with"] == "a"
  assert apart["unequal"] == apart["largest_difference"] == [0.5, 0.5]


@pytest.mark.parametrize("name", ["coat_jax", "flax"])
def test_fp8_linear_layers_are_close_to_bf16(name):
  cases = {
    case.implementations[0]: case
    for case in benchmark.all_cases(shapes.SMOKE)
    if case.op == "linear" and case.shape["weight"] == "down"
  }
  args = cases["bf16"].arrays()
  exact = jax.jit(lambda *args: cases["bf16"].run("bf16", *args))(*args)
  found = jax.jit(lambda *args: cases[name].run(name, *args))(*args)
  for a, b in zip(found, exact, strict=True):
    error = jax.numpy.linalg.norm((a - b).astype("float32"))
    # Rounding changes each of two operands by 2 % (E4M3) or 4 % (E5M2).
    assert 0.01 < error / jax.numpy.linalg.norm(b.astype("float32")) < 0.08


def test_case_that_a_kernel_refuses_is_skipped(monkeypatch, capsys):
  monkeypatch.setattr(benchmark, "PORTABLE", ("cublas",))
  only = shapes.Sizes(batch=1, seq=3, d_model=8, d_ff=8, num_heads=1)
  monkeypatch.setattr(benchmark, "SMOKE", only)
  rows = benchmark.main(["--smoke", "--repeats=1", "--cases", "linear_dgrad"])
  assert not rows
  assert "skipped: linear_dgrad" in capsys.readouterr().err


@pytest.mark.parametrize(
  "wrong",
  [["--repeats", "0"], ["--cases", "conv"], ["--implementations", "cudnn"]],
  ids=lambda wrong: wrong[0],
)
def test_wrong_arguments_exit_with_2(wrong, capsys):
  with pytest.raises(SystemExit) as stopped:
    benchmark.main(["--smoke", *wrong])
  assert stopped.value.code == 2
  assert "error:" in capsys.readouterr().err
