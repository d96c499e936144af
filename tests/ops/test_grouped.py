# SPDX-License-Identifier: Apache-2.0
"""Compares grouped matmuls with a loop over the groups."""

import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from tests.comparing import assert_close, jit

E, D, F = 4, 24, 40
# Sizes of groups: unequal, some empty, all rows in one group, no rows at all.
SIZES = [(5, 1, 7, 3), (0, 9, 0, 7), (0, 0, 0, 16), (0, 0, 0, 0)]


def arrays(sizes, dtype=np.float32):
  rng = np.random.default_rng(0)
  m = sum(sizes)
  shapes = (m, D), (m, F), (E, D, F)
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def by_hand(x, g, w, sizes):
  """Computes the three matmuls in float64, one group at a time."""
  x, g, w = (np.asarray(a, np.float64) for a in (x, g, w))
  ends = np.cumsum(sizes)
  groups = [slice(b - n, b) for b, n in zip(ends, sizes, strict=True)]
  y = [x[rows] @ w[e] for e, rows in enumerate(groups)]
  dx = [g[rows] @ w[e].T for e, rows in enumerate(groups)]
  dw = [x[rows].T @ g[rows] for rows in groups]
  return np.concatenate(y), np.concatenate(dx), np.stack(dw)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grouped_matmuls_match_a_loop_over_groups(sizes):
  x, g, w = arrays(sizes)

  @jit
  def products(x, g, w, sizes):
    return (
      ops.grouped_fwd(x, w, sizes, dtype=jnp.float32),
      ops.grouped_dgrad(g, w, sizes, dtype=jnp.float32),
      ops.grouped_wgrad(x, g, sizes),
    )

  found = products(x, g, w, jnp.int32(sizes))
  assert_close(found, by_hand(x, g, w, sizes), 1e-6)


def test_rows_after_the_last_group_change_nothing():
  sizes = SIZES[0]
  x, g, w = arrays((*sizes, 6))[:2] + arrays(sizes)[2:]
  used = sum(sizes)
  want = by_hand(x[:used], g[:used], w, sizes)
  x, g = x.at[used:].set(np.nan), g.at[used:].set(np.nan)
  y = ops.grouped_fwd(x, w, jnp.int32(sizes), dtype=jnp.float32)
  dx = ops.grouped_dgrad(g, w, jnp.int32(sizes), dtype=jnp.float32)
  assert not y[used:].any() and not dx[used:].any()
  dw = ops.grouped_wgrad(x, g.at[used:].set(1.0), jnp.int32(sizes))
  assert_close((y[:used], dx[:used], dw), want, 1e-6)


def test_grouped_matmuls_of_bfloat16_accumulate_in_f32():
  x, g, w = arrays(SIZES[0], jnp.bfloat16)
  sizes = jnp.int32(SIZES[0])
  y = ops.grouped_fwd(x, w, sizes)
  dw = ops.grouped_wgrad(x, g, sizes)
  assert y.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
  want = by_hand(x, g, w, SIZES[0])
  assert_close(y, want[0], 2.0**-8)
  # Products of BF16 values are exact in f32.
  assert_close(dw, want[2], 1e-6)


def test_grouped_matmuls_refuse_inconsistent_shapes():
  x, g, w = arrays(SIZES[0])
  sizes = jnp.int32(SIZES[0])
  with pytest.raises(ValueError, match=r"grouped: needs rows \[M, D\], weig"):
    ops.grouped_fwd(x[:, 1:], w, sizes)
  with pytest.raises(ValueError, match=r"sizes \[E\], got .* \(3,\)"):
    ops.grouped_dgrad(g, w, sizes[1:])
  with pytest.raises(ValueError, match=r"grouped: needs rows .*got \(15, 24\)"):
    ops.grouped_wgrad(x[1:], g, sizes)
