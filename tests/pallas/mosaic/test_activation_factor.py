# SPDX-License-Identifier: Apache-2.0
"""Tests Mosaic's activation functions with a factor per row, and with E5M2."""

import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E5M2
from coat_jax.numerics.qtensor import quantize_with_scale
from coat_jax.ops import Groups
from tests.pallas.kernels import assert_same_codes
from tests.pallas.mosaic.test_activation import (
  BF16,
  F32,
  SHAPES,
  SHARE,
  assert_same_input,
  assert_same_operand,
  both,
  check_kernels,
  inputs,
  run,
)


def factor_of(m):
  """Makes factors of m rows, one of them 0."""
  return jnp.linspace(0.05, 1.5, m)[:, None].at[m // 3].set(0)


@SHAPES
def test_kernels_multiply_rows_by_a_factor(shape, group_size):
  dy, x, options = inputs(shape, True, group_size, least=-2.0)
  factor = factor_of(shape[0])
  # Rows with the factor 0 must not reach any result.
  for i in (3, shape[0] - 1):
    factor, x, dy = (
      factor.at[i].set(0),
      x.at[i].set(jnp.nan),
      dy.at[i].set(jnp.inf),
    )
  how = dict(activation="silu", factor=factor)
  actual, (parts, scale) = both("activation_input", x, **options, **how)
  assert_same_input(actual, (parts, scale))
  gate, up = (part.dequantize() for part in parts)
  activated = np.nan_to_num(ops.activation_values(gate, activation="silu") * up)
  y = activated * np.asarray(factor)
  np.testing.assert_allclose(scale, np.max(np.abs(y)) / 448, rtol=1e-6)
  how |= dict(scale=scale)
  actual, expected = both("activation_fwd", parts, **how)
  assert_same_operand(actual, expected)
  codes = quantize_with_scale(jnp.asarray(y), scale, group_size=None)
  assert_same_codes(actual.rows, codes.qvalue, SHARE)
  actual, expected = both("activation_bwd_operands", dy, parts, **how)
  assert_same_operand(actual[0], expected[0])
  assert_same_operand(actual[1], expected[1])
  used = np.isfinite(np.asarray(dy, F32)).all(axis=1)
  exact = np.asarray(dy, np.float64)[used] * activated[used]
  exact = exact.sum(axis=1, keepdims=True)
  for result in (actual, expected):
    assert result[3].shape == factor.shape
    np.testing.assert_allclose(
      result[3][used], exact, rtol=0, atol=1e-5 * np.abs(exact).max()
    )
  # The gradient of factor * f is the gradient of f for factor * dy.
  scaled = jnp.where(factor == 0, 0, dy * factor), *parts
  plain = run(
    ops.activation_bwd.definition, scaled[0], parts, activation="silu"
  )
  want = np.nan_to_num(np.concatenate(plain, axis=-1))
  found = np.asarray(actual[0].rows, F32) * np.asarray(actual[0].scale)
  # E5M2 has 2 bits after the point.
  np.testing.assert_allclose(found, want, rtol=2**-2.9, atol=1e-6 * want.max())


@pytest.mark.parametrize("gated", [True, False])
def test_backward_kernel_reads_values_in_e5m2(gated):
  dy, x, _ = inputs((32, 128), gated)
  parts = tuple(
    ops.quantize_groups(part, groups=Groups(16, E5M2))
    for part in jnp.split(x, 1 + gated, axis=1)
  )
  how = dict(activation="silu", scale=jnp.float32(1))
  actual, expected = both("activation_bwd_operands", dy, parts, **how)
  assert_same_operand(actual[0], expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
  "shape, group_size", [((2048, 768), 16), ((1008, 1408), 128)], ids=str
)
def test_kernels_with_a_factor_on_a_gpu(shape, group_size, dtype):
  factor = factor_of(shape[0])
  check_kernels(shape, group_size, "silu", True, dtype, 1e-5, factor)
