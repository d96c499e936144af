# SPDX-License-Identifier: Apache-2.0
"""Compares the memory of compiled training steps with plans and limits."""

import functools

import pytest

from benchmarks import planned

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(
  "preset, variant, gpus",
  [
    ("llama_60m", "minimal", 2),
    ("llama_60m", "bf16", 1),
    # XLA must not copy the stacked gradients.
    ("llama2_7b", "minimal_fp8", 2),
    pytest.param("llama2_7b", "bf16_full", 2, marks=pytest.mark.slow),
    pytest.param("olmo_1b", "bf16_full", 1, marks=pytest.mark.slow),
    # With more than 8 GPUs, XLA orders the sums of gradients differently.
    pytest.param("llama3_8b", "minimal_full", 16, marks=pytest.mark.slow),
    pytest.param("llama2_7b", "minimal_fp8", 64, marks=pytest.mark.slow),
    pytest.param("llama_60m", "coat", 2, marks=pytest.mark.slow),
    pytest.param("gpt2", "minimal", 1, marks=pytest.mark.slow),
    # demo_moe is the only MoE model that compiles quickly.
    ("demo_moe", "minimal", 1),
    # XLA must not transpose the experts or gradients of all layers at once.
    pytest.param("qwen3_30b_a3b", "leanest", 8, marks=pytest.mark.slow),
    pytest.param("qwen3_30b_a3b", "minimal_experts", 8, marks=pytest.mark.slow),
    pytest.param("llama2_7b", "lean", 4, marks=pytest.mark.slow),
    pytest.param("llama3_8b", "fp8_linear", 8, marks=pytest.mark.slow),
    # gemma2_2b has post norms, two kinds of layers, and a tied embedding with
    # the largest vocabulary.
    pytest.param("gemma2_2b", "leanest", 8, marks=pytest.mark.slow),
  ],
)
def test_plan_matches_the_compiler(preset, variant, gpus):
  batch, seq = planned.LOADS[preset]
  row = planned.row(preset, variant, gpus=gpus, batch=batch, seq=seq)
  assert abs(row["error"]) <= 0.05, row


@functools.cache
def peak(preset, gpus, batch, variant):
  """Returns the peak bytes of a compiled step, after checking its plan."""
  row = planned.row(preset, variant, gpus=gpus, batch=batch, seq=2048)
  assert abs(row["error"]) <= 0.05, row
  return row["peak_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
  "variant, most", [("minimal", 76e9), ("leanest", 31e9)]
)
def test_step_of_7b_fits_on_a_gpu_with_80_or_32_gb(variant, most):
  assert peak("llama2_7b", 1, 1, variant) <= most


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["leanest_lion", "leanest_factored"])
def test_step_of_7b_fits_on_a_gpu_with_24_gb_as_planned(variant):
  row = planned.row("llama2_7b", variant, gpus=1, batch=2, seq=2048)
  assert row["peak_bytes"] <= 23.5e9
  assert abs(row["error"]) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
  "variant, baseline, times_less",
  [
    ("coat", "bf16", 1.75),
    ("minimal", "bf16", 2.0),
    ("coat", "bf16_dots", 1.20),
    ("minimal", "bf16_dots", 1.35),
  ],
)
def test_variant_needs_less_memory_than_bf16_on_four_gpus(
  variant, baseline, times_less
):
  found = peak("llama2_7b", 4, 2, variant)
  assert peak("llama2_7b", 4, 2, baseline) >= times_less * found
