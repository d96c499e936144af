# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton's gated functions and GELU for an H200: no spills.

With eight times the values per thread, SwiGLU's backward was seen to fail.
"""

import jax
import jax.numpy as jnp
import pytest

from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import Groups
from coat_jax.pallas.triton import gated, gelu
from tests.aot.compiling import compile_for_h200, custom_calls, fp8_moves

pytestmark = pytest.mark.aot

NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
BF16, F32 = jnp.bfloat16, jnp.float32
SCALE = jax.ShapeDtypeStruct((), F32)


def values(m, n, group_size=16) -> QTensor:
  codes = jax.ShapeDtypeStruct((m, n), E4M3)
  scale = jax.ShapeDtypeStruct((m, n // group_size), BF16)
  return QTensor(codes, scale, group_size)


def assert_kernels(fn, *specs, count):
  """Checks that `fn` compiles to this many kernels, and nothing moves codes.

  Computing the scale from the maxima counts as a kernel.
  """
  compiled = compile_for_h200(fn, *specs, options=NO_SPILLS)
  assert custom_calls(compiled).total() == count
  assert not fp8_moves(compiled)


SHAPES = pytest.mark.parametrize("m, n", [(8192, 11008), (112, 688)])
DTYPES = pytest.mark.parametrize("dtype", [BF16, F32])


ACTIVATIONS = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])


@SHAPES
@DTYPES
@ACTIVATIONS
def test_gated(m, n, dtype, activation):
  gate_up = jax.ShapeDtypeStruct((m, 2 * n), dtype)
  how = dict(activation=activation)
  assert_kernels(
    lambda x: gated.gated_input(x, groups=Groups(16), **how), gate_up, count=2
  )
  dy, x = jax.ShapeDtypeStruct((m, n), dtype), values(m, n)
  assert_kernels(
    lambda dy, gate, up, scale: gated.gated_bwd_operands(
      dy, gate, up, scale=scale, **how
    ),
    *(dy, x, x, SCALE),
    count=3,
  )


@SHAPES
@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
@pytest.mark.parametrize("group_size", [16, 128])
@ACTIVATIONS
def test_gated_forward(m, n, layout, group_size, activation):
  n = n // group_size * group_size
  x = values(m, n, group_size)
  assert_kernels(
    lambda gate, up, scale: gated.gated_fwd(
      gate,
      up,
      activation=activation,
      scale=scale,
      layout=layout,
    )[:2],
    *(x, x, SCALE),
    count=1,
  )


@SHAPES
@DTYPES
def test_gelu(m, n, dtype):
  options = dict(approximate=True)
  dy, x = jax.ShapeDtypeStruct((m, n), dtype), values(m, n)
  assert_kernels(
    lambda x: gelu.gelu_input(x, groups=Groups(16), **options), dy, count=2
  )
  assert_kernels(
    lambda x, s: gelu.gelu_fwd(x, scale=s, layout="both", **options)[:2],
    *(x, SCALE),
    count=1,
  )
  assert_kernels(
    lambda dy, x, s: gelu.gelu_bwd_operands(dy, x, scale=s, **options),
    *(dy, x, SCALE),
    count=3,
  )
