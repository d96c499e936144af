# SPDX-License-Identifier: Apache-2.0
"""Memory of whole training steps: as planned, and as much less as promised."""

import functools

import pytest

from benchmarks import planned, table7

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(
  "preset, variant, gpus",
  [
    ("llama_60m", "minimal", 2),
    ("llama_60m", "bf16", 1),
    ("llama_60m", "lean", 2),
    pytest.param("llama2_7b", "lean", 4, marks=pytest.mark.slow),
    pytest.param("llama2_7b", "leanest", 1, marks=pytest.mark.slow),
    pytest.param("llama2_7b", "minimal", 4, marks=pytest.mark.slow),
    pytest.param("llama2_7b", "coat", 4, marks=pytest.mark.slow),
    pytest.param("llama2_7b", "bf16", 4, marks=pytest.mark.slow),
    pytest.param("llama3_8b", "fp8_linear", 8, marks=pytest.mark.slow),
    pytest.param("olmo_1b", "minimal", 1, marks=pytest.mark.slow),
  ],
)
def test_the_plan_is_the_compilers(preset, variant, gpus):
  batch, seq = planned.LOADS[preset]
  row = planned.row(preset, variant, gpus=gpus, batch=batch, seq=seq)
  assert abs(row["error"]) <= 0.05, row


@functools.cache
def peak(preset, gpus, batch, variant):
  (case,) = (
    case
    for case in table7.CASES
    if (case.preset, case.gpus, case.batch) == (preset, gpus, batch)
  )
  return table7.measure(case, variant)["peak_bytes"]


@pytest.mark.slow
def test_7b_trains_on_one_gpu_of_80_gb():
  assert peak("llama2_7b", 1, 1, "minimal") <= 76e9


@pytest.mark.slow
def test_7b_trains_on_one_gpu_of_32_gb():
  assert peak("llama2_7b", 1, 1, "leanest") <= 31e9


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["llama2_7b", "llama2_13b"])
@pytest.mark.parametrize(
  "variant, baseline, times_less",
  [
    ("coat", "bf16", 1.75),
    ("minimal", "bf16", 2.0),
    ("coat", "bf16_dots", 1.20),
    ("minimal", "bf16_dots", 1.35),
  ],
)
def test_four_gpus_take_less_than_bf16(preset, variant, baseline, times_less):
  found = peak(preset, 4, 2, variant)
  assert peak(preset, 4, 2, baseline) >= times_less * found
