# SPDX-License-Identifier: Apache-2.0
"""Triton's grouped products, compiled for an H200: one kernel, no spills."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax.pallas.triton import grouped
from tests.aot.compiling import (
  compile_for_h200,
  custom_calls,
  temporary_bytes,
)

pytestmark = pytest.mark.aot

NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


@pytest.mark.parametrize(
  "e, d, f, m, dtype",
  [
    (128, 2048, 1536, 65536, jnp.bfloat16),  # gate and up of Qwen3-30B-A3B
    (8, 160, 224, 112, jnp.bfloat16),
    (8, 160, 224, 112, jnp.float32),
  ],
)
@pytest.mark.parametrize(
  "kernel, a, b", [("fwd", "x", "w"), ("dgrad", "g", "w"), ("wgrad", "x", "g")]
)
def test_grouped_product_is_one_kernel(kernel, a, b, e, d, f, m, dtype):
  shapes = {"x": (m, d), "g": (m, f), "w": (e, d, f)}
  specs = [jax.ShapeDtypeStruct(shapes[name], dtype) for name in (a, b)]
  product = getattr(grouped, f"grouped_{kernel}")
  compiled = compile_for_h200(
    lambda a, b, sizes: product(a, b, sizes, dtype=dtype),
    *specs,
    jax.ShapeDtypeStruct((e,), jnp.int32),
    options=NO_SPILLS,
  )
  assert custom_calls(compiled).total() == 1
  # Where tiles start; XLA alone makes [m, e, d] of x.
  assert temporary_bytes(compiled) < 2**16
