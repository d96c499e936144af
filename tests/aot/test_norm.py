# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton's norms for an H200: no spills at widths of real models.

With blocks of four rows of 4096 in four warps, this was seen to fail.
"""

import jax
import jax.numpy as jnp
import pytest

from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import Groups
from coat_jax.ops.types import NormStats
from coat_jax.pallas.triton import norm, norm_backward
from tests.aot.compiling import compile_for_h200, custom_calls

pytestmark = pytest.mark.aot

NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
M = 8192


def operands(n, kind, group_size=16):
  """Returns specs of x, x quantized, gamma, beta and statistics."""
  spec = jax.ShapeDtypeStruct
  row, vector = spec((M,), jnp.float32), spec((n,), jnp.float32)
  scale = spec((M, n // group_size), jnp.bfloat16)
  x_q = QTensor(spec((M, n), E4M3), scale, group_size)
  is_layer = kind == "layer"
  stats = NormStats(row if is_layer else None, row)
  x = spec((M, n), jnp.bfloat16)
  return x, x_q, vector, vector if is_layer else None, stats


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("n", [768, 4096, 5120, 6656, 8192])
def test_whole_rows_do_not_spill(n, kind):
  x, x_q, gamma, beta, stats = operands(n, kind)

  def run(x, x_q, gamma, beta, stats):
    made = norm.norm_input(
      x, gamma, beta, kind=kind, eps=1e-5, groups=Groups(16)
    )
    return made, norm_backward.norm_bwd(x, x_q, gamma, stats, add=x)

  compiled = compile_for_h200(
    run, x, x_q, gamma, beta, stats, options=NO_SPILLS
  )
  # The scale that follows from maxima is one of its own.
  assert custom_calls(compiled).total() == 3


@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
@pytest.mark.parametrize(
  "n, kind, group_size",
  [(4096, "rms", 16), (6656, "layer", 16), (4096, "rms", 128)],
)
def test_tiles_do_not_spill(n, kind, group_size, layout):
  _, x_q, gamma, beta, stats = operands(n, kind, group_size)

  def run(x_q, gamma, beta, stats, scale):
    return norm.norm_fwd(
      x_q,
      gamma,
      beta,
      stats,
      scale=scale,
      layout=layout,
    )

  scale = jax.ShapeDtypeStruct((), jnp.float32)
  compiled = compile_for_h200(
    run, x_q, gamma, beta, stats, scale, options=NO_SPILLS
  )
  assert custom_calls(compiled).total() == 1
