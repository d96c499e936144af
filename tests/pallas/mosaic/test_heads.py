# SPDX-License-Identifier: Apache-2.0
"""Compares the kernel that joins heads with its definition.

In the interpreter, a tile is a slice of what the definition returns. The PTX
that loads and rotates heads is tested on a GPU and by tests/aot/test_rows.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.ops.rope import Rotary, rotation
from coat_jax.pallas.mosaic.heads import join_heads_operand
from tests.pallas.kernels import assert_same_operand, refused

# B, T, N, K, H. Whole tiles cover the rows, the columns, neither or both.
SHAPES = [
  (16, 3, 2, 2, 72),
  (2, 64, 2, 1, 64),
  (1, 48, 8, 2, 64),
  (2, 72, 6, 2, 24),
]


def case(b, t, n, k, h, dtype=jnp.bfloat16, theta=None, own=False):
  """Makes gradients, and angles if heads are rotated."""
  dq, dk, dv = (
    jax.random.normal(jax.random.key(i), (b, t, count, h), dtype)
    for i, count in enumerate((n, k, k))
  )
  if theta is None:
    return dq, dk, dv, None, None
  positions = jnp.arange(t) + 3
  if own:  # Each sequence has different positions.
    positions = positions[None] * (1 + jnp.arange(b)[:, None])
  return dq, dk, dv, *rotation(positions, head_dim=h, theta=theta)


def check(shape, dtype, share, *, theta=None, own=False, **options):
  arrays = case(*shape, dtype=dtype, theta=theta, own=own)
  want, want_sums = jax.jit(
    lambda *args: ops.join_heads_operand.definition(*args, has_sums=True)
  )(*arrays)
  found, sums = join_heads_operand(*arrays, has_sums=True, **options)
  if share == 1:
    assert_same_operand(found, want)
  else:
    # XLA may fuse a product and a sum, so the largest value, which determines
    # the scale, may differ, or even round to its neighbour in BF16.
    apart = 2.0**-7 if dtype == jnp.bfloat16 and theta else 1e-6
    np.testing.assert_allclose(found.scale, want.scale, rtol=apart)
    found_again, _ = join_heads_operand(*arrays, **options)
    assert_same_operand(found_again, found)
    values, expected = (np.asarray(x.rows, np.float32) for x in (found, want))
    # E5M2 has two mantissa bits. If the terms of a rotation cancel, the result
    # has the rounding error of these terms.
    limit = 0.3 * np.abs(expected) + 2.0**-20 * np.max(np.abs(expected))
    assert np.all(np.abs(values - expected) <= limit)
    assert np.mean(values == expected) >= share
    np.testing.assert_array_equal(
      np.asarray(found.columns, np.float32),
      np.asarray(found.rows, np.float32).reshape(-1, found.rows.shape[-1]).T,
    )
  # The kernel sums m values in a different order, and each addition rounds by
  # 2^-24. A rotated value may be rounded to a neighbour in `dtype`.
  magnitudes = sum(
    np.sum(np.abs(np.float64(x)), axis=(0, 1)).max() for x in arrays[:3]
  )
  m = shape[0] * shape[1]
  of_dtype = 2.0**-8 if dtype == jnp.bfloat16 and theta else 0
  bound = (2.0**-23 * m + of_dtype / 8) * magnitudes
  assert np.all(np.abs(np.float64(sums) - want_sums) <= bound)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_joined_heads_match_the_definition(shape, dtype):
  check(shape, dtype, 1, interpret=True)


@pytest.mark.parametrize("own", [False, True])
def test_rotated_heads_match_the_definition(own):
  shape, theta = (2, 48, 2, 1, 32), Rotary(1e4, rotary_dim=16)
  check(shape, jnp.float32, 0.99, theta=theta, own=own, interpret=True)


def test_cos_without_sin_rotates_nothing():
  *heads, cos, _ = case(1, 32, 2, 2, 64, theta=1e4)
  found, _ = join_heads_operand(*heads, cos, None, interpret=True)
  want, _ = join_heads_operand(*heads, None, None, interpret=True)
  assert_same_operand(found, want)


def test_scale_is_smallest_for_zeros_and_nan_for_nan():
  zeros = [jnp.zeros((1, 32, 2, 64))] * 3
  how = dict(has_sums=True, interpret=True)
  operand, sums = join_heads_operand(*zeros, None, None, **how)
  assert operand.scale == 2.0**-126 and not np.any(sums)
  dq = zeros[0].at[0, 0, 0, 0].set(jnp.nan)
  found, sums = join_heads_operand(dq, *zeros[1:], None, None, **how)
  assert np.isnan(found.scale) and np.sum(np.isnan(sums)) == 1


def test_kernel_refuses_unsupported_arguments():
  def join(*shape, **options):
    arrays = case(*shape, **options)
    jax.eval_shape(join_heads_operand, *arrays)

  with refused("head size that is a multiple of 8, got 12"):
    join(1, 32, 4, 4, 12)
  with refused("multiple of 8 rotated pairs of channels, got 12"):
    join(1, 32, 4, 4, 24, theta=1e4)
  with refused("bfloat16 and float32"):
    join(1, 32, 4, 4, 16, dtype=jnp.float16)
  with refused("rows is a multiple of 16"):
    join(1, 36, 4, 4, 16)
  with refused(r"at least 32 x 128, got \[16, 192\]"):
    join(1, 16, 4, 4, 16)
  dq, dk, dv, *angles = case(1, 32, 4, 4, 16)
  with refused("same dtype, got bfloat16, float32 and bfloat16"):
    join_heads_operand(dq, dk.astype(jnp.float32), dv, *angles)
  large, small = (
    jax.ShapeDtypeStruct((3, 2**16, count, 128), jnp.float32)
    for count in (64, 1)
  )
  with refused("up to 4 GiB, got 6442450944"):
    jax.eval_shape(join_heads_operand, large, small, small, None, None)


def test_kernel_refuses_angles_that_it_cannot_read():
  dq, dk, dv, cos, sin = case(2, 32, 4, 4, 16, theta=1e4, own=True)
  for wrong, got in (
    (cos.astype(jnp.bfloat16), r"bfloat16 \(2, 32, 8"),
    (cos[:, :1], r"float32 \(2, 1, 8"),
  ):
    for angles in ((wrong, sin), (cos, wrong)):
      with refused(rf"\(32, 8\) or \(2, 32, 8\), got {got}"):
        join_heads_operand(dq, dk, dv, *angles)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
  "shape", [(16, 729, 16, 16, 72), (16, 577, 16, 16, 64), *SHAPES], ids=str
)
def test_joined_heads_on_a_gpu(shape, dtype):
  check(shape, dtype, 0.999)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
  "shape, theta",
  [
    ((2, 512, 32, 32, 128), 1e4),
    ((1, 1024, 8, 2, 64), 1e4),
    ((3, 80, 4, 2, 256), 1e4),
    ((3, 80, 6, 2, 80), Rotary(1e4, rotary_dim=32)),
  ],
  ids=str,
)
def test_rotated_heads_on_a_gpu(shape, theta, dtype, own):
  check(shape, dtype, 0.99, theta=theta, own=own)
