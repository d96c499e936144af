# SPDX-License-Identifier: Apache-2.0
"""Compares grouped FP8 matmuls with a loop over the groups in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2, qmax
from tests.comparing import assert_close, assert_same_bits, jit

E, D, F, M = 4, 24, 40, 16
# Sizes of groups: unequal, some empty, all rows in one group, and rows that
# belong to no group.
SIZES = [(5, 1, 7, 3), (0, 9, 0, 7), (0, 0, 0, 16), (3, 0, 1, 2), (0, 0, 0, 0)]
GRADIENTS = ops.PerTensor(E5M2)


def arrays(sizes):
  """Makes x, g and w; rows that belong to no group are zero."""
  rng = np.random.default_rng(0)
  shapes = (M, D), (M, F), (E, D, F)
  x, g, w = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
  x[sum(sizes) :] = g[sum(sizes) :] = 0
  # Experts have different scales.
  w *= 4.0 ** np.arange(E)[:, None, None]
  return [jnp.asarray(a) for a in (x, g, w)]


@jit
def operands(x, g, w):
  return (
    ops.quantize_tensor(x, layout="both"),
    ops.quantize_tensor(g, scaling=GRADIENTS, layout="both"),
    ops.quantize_experts(w, layout="both"),
  )


def decoded(codes, scale):
  return np.asarray(codes, np.float64) * np.float64(scale)


def by_hand(x, g, w, sizes):
  """Computes the three matmuls in float64, one group at a time."""
  x, g = decoded(x.rows, x.scale), decoded(g.rows, g.scale)
  w = decoded(w.rows, np.asarray(w.scale)[:, None, None])
  y, dx, dw = np.zeros((M, F)), np.zeros((M, D)), np.zeros((E, D, F))
  start = 0
  for e, size in enumerate(sizes):
    rows = slice(start, start + size)
    y[rows], dx[rows] = x[rows] @ w[e], g[rows] @ w[e].T
    dw[e] = x[rows].T @ g[rows]
    start += size
  return y, dx, dw


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grouped_fp8_matmuls_match_a_loop_over_groups(sizes):
  x, g, w = operands(*arrays(sizes))

  @jit
  def products(x, g, w, sizes):
    return (
      ops.grouped_linear_fwd(x, w, sizes, dtype=jnp.float32),
      ops.grouped_linear_dgrad(g, w, sizes, dtype=jnp.float32),
      ops.grouped_linear_wgrad(x, g, sizes),
    )

  found = products(x, g, w, jnp.int32(sizes))
  # Products of codes are exact, and only f32 sums are rounded.
  assert_close(found, by_hand(x, g, w, sizes), 1e-6)


def test_experts_have_separate_scales():
  w = arrays(SIZES[0])[2].at[2].set(0)
  q = ops.quantize_experts(w, layout="both")
  amax = np.max(np.abs(np.asarray(w)), axis=(1, 2))
  want = np.maximum(amax / qmax(E4M3), 2.0**-126)
  np.testing.assert_allclose(q.scale, want, rtol=1e-6)
  np.testing.assert_array_equal(q.columns, np.swapaxes(q.rows, 1, 2))
  # Errors are at most half a step of E4M3: 2^-4 of a value, or half of the
  # smallest step.
  error = np.abs(decoded(q.rows, want[:, None, None]) - np.asarray(w))
  step = np.maximum(2.0**-4 * np.abs(w), 2.0**-10 * want[:, None, None])
  assert np.all(error <= step * (1 + 1e-5))
  # If these scales are given, the codes must not change.
  again = ops.quantize_experts(w, scale=q.scale, layout="columns")
  assert_same_bits(again.columns, q.columns)
  assert again.rows is None


def test_weight_gradients_can_have_rows_first():
  sizes = jnp.int32(SIZES[0])
  x, g, _ = operands(*arrays(SIZES[0]))
  dw = ops.grouped_linear_wgrad(x, g, sizes)
  moved = ops.grouped_linear_wgrad(x, g, sizes, rows_first=True)
  assert_same_bits(moved, jnp.moveaxis(dw, 0, 1))


def test_grouped_fp8_matmuls_refuse_inconsistent_operands():
  sizes = jnp.int32(SIZES[0])
  x, g, w = operands(*arrays(SIZES[0]))
  with pytest.raises(ValueError, match=r"needs rows .* and columns of weights"):
    ops.grouped_linear_fwd(x, w._replace(columns=None), sizes)
  with pytest.raises(ValueError, match=r"scales and sizes \[E\], got .*\(3,\)"):
    ops.grouped_linear_dgrad(g, w, sizes[1:])
  with pytest.raises(ValueError, match=r"needs rows \[M, K\].*got \(16, 40\)"):
    ops.grouped_linear_fwd(g, w, sizes)
  with pytest.raises(ValueError, match="needs tokens and gradients in columns"):
    ops.grouped_linear_wgrad(x._replace(columns=None), g, sizes)
  short = g._replace(columns=g.columns[:, 1:])
  with pytest.raises(ValueError, match=r"got \(24, 16\), \(40, 15\) and"):
    ops.grouped_linear_wgrad(x, short, sizes)
