# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton's activation functions for an H200: no spills.

With eight times the values per thread, SwiGLU's backward was seen to fail.
"""

import jax
import jax.numpy as jnp
import pytest

from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import QTensor
from coat_jax.ops import Groups
from coat_jax.pallas.triton import activation as kernels
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
ACTIVATIONS = pytest.mark.parametrize(
  "activation, gated",
  [("silu", True), ("gelu_tanh", True), ("gelu_tanh", False)],
)


@SHAPES
@DTYPES
@ACTIVATIONS
def test_activation(m, n, dtype, activation, gated):
  count, how = 1 + gated, dict(activation=activation)
  assert_kernels(
    lambda x: kernels.activation_input(
      x, gated=gated, groups=Groups(16), **how
    ),
    jax.ShapeDtypeStruct((m, count * n), dtype),
    count=2,
  )
  assert_kernels(
    lambda dy, parts, scale: kernels.activation_bwd_operands(
      dy, parts, scale=scale, **how
    ),
    *(jax.ShapeDtypeStruct((m, n), dtype), (values(m, n),) * count, SCALE),
    count=3,
  )


@SHAPES
@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
@pytest.mark.parametrize("group_size", [16, 128])
@ACTIVATIONS
def test_activation_forward(m, n, layout, group_size, activation, gated):
  n = n // group_size * group_size
  assert_kernels(
    lambda parts, scale: kernels.activation_fwd(
      parts, activation=activation, scale=scale, layout=layout
    )[:2],
    *((values(m, n, group_size),) * (1 + gated), SCALE),
    count=1,
  )
