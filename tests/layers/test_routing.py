# SPDX-License-Identifier: Apache-2.0
"""Tests how the router computes the scores of experts, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.layers import routing
from tests.comparing import jit

BF16, F32 = jnp.bfloat16, jnp.float32


def operands(of_y, of_w):
  keys = jax.random.split(jax.random.key(0), 3)
  y = jax.random.normal(keys[0], (4, 16, 512)).astype(of_y)
  w = (0.02 * jax.random.normal(keys[1], (512, 32))).astype(of_w)
  return y, w, jax.random.normal(keys[2], (4, 16, 32))


@pytest.mark.parametrize("of_w", [BF16, F32])
@pytest.mark.parametrize("of_y", [BF16, F32])
def test_scores_are_as_exact_as_in_f32(of_y, of_w):
  y, w, _ = operands(of_y, of_w)
  scores = jit(routing._logits)(y, w)
  wanted = np.asarray(y, np.float64) @ np.asarray(w, np.float64)
  assert scores.dtype == F32
  # If w were rounded to BF16, the largest error would be 1e-3.
  np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("of_w", [BF16, F32])
def test_gradients_are_those_of_a_matmul(of_w):
  y, w, g = operands(BF16, of_w)
  dy, dw = jit(lambda y, w, g: jax.vjp(routing._logits, y, w)[1](g))(y, w, g)
  g, y64, w64 = (np.asarray(x, np.float64) for x in (g, y, w))
  assert (dy.dtype, dw.dtype) == (BF16, of_w)
  wanted = np.einsum("btd,bte->de", y64, g)
  for found, exact in ((dy, g @ w64.T), (dw, wanted)):
    error = np.abs(np.asarray(found, np.float64) - exact).max()
    # BF16 rounds to within 2^-9 of a value.
    assert error < 2**-8 * np.abs(exact).max()


def test_three_bf16_arrays_add_up_to_f32():
  x = jax.random.normal(jax.random.key(0), (1000,))
  parts = jit(routing._in_bf16)(x)
  assert all(part.dtype == BF16 for part in parts)
  total = sum(np.asarray(part, np.float64) for part in parts)
  np.testing.assert_array_equal(total, x)
