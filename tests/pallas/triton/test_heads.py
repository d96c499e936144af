# SPDX-License-Identifier: Apache-2.0
"""Tests the kernels that split and join heads without rotation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.pallas.triton import rope
from tests.comparing import assert_same_bits
from tests.pallas.kernels import assert_same_operand, refused

# B, T, N, K, H. Of rows and columns none, either or both are whole tiles.
SHAPES = [
  (16, 3, 2, 2, 72),
  (2, 64, 2, 1, 64),
  (1, 16, 8, 2, 64),
  (2, 72, 6, 2, 24),
]


def case(b, t, n, k, h, dtype=jnp.bfloat16):
  qkv = jax.random.normal(jax.random.key(0), (b, t, (n + 2 * k) * h), dtype)
  split = functools.partial(
    ops.split_heads.definition, num_heads=n, num_kv_heads=k
  )
  return qkv, split(qkv, None, None)


def joined_operand(parts, **options):
  return rope.join_heads_operand(*parts, None, None, **options)


def check(shape, dtype, **options):
  qkv, parts = case(*shape, dtype=dtype)
  n, k = shape[2:4]
  found = rope.split_heads(
    qkv, None, None, num_heads=n, num_kv_heads=k, **options
  )
  assert_same_bits(found, parts)
  assert_same_bits(rope.join_heads(*parts, None, None, **options), qkv)
  want, want_sums = ops.join_heads_operand.definition(
    *parts, None, None, has_sums=True
  )
  found, sums = joined_operand(parts, has_sums=True, **options)
  # XLA divides by the scale, the kernel on a GPU rounds as division does.
  assert_same_operand(found, want, 1 if options else 0.999)
  # Sums of m values in another order: each addition rounds by 2^-24.
  bound = 2.0**-23 * qkv.shape[0] * qkv.shape[1]
  magnitudes = np.sum(np.abs(np.float64(qkv)), axis=(0, 1))
  assert np.all(np.abs(np.float64(sums) - want_sums) <= bound * magnitudes)
  assert joined_operand(parts, **options)[1] is None


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_match_definition(shape, dtype):
  check(shape, dtype, interpret=True)


def test_operand_of_zeros_and_of_nan():
  _, parts = case(*SHAPES[0])
  zeros = jax.tree.map(jnp.zeros_like, parts)
  (operand, sums) = joined_operand(zeros, has_sums=True, interpret=True)
  assert operand.scale == 1 and not np.any(sums)
  q, k, v = parts
  found, sums = joined_operand(
    (q, k, v.at[0, 0, 0, 0].set(jnp.nan)), has_sums=True, interpret=True
  )
  assert np.isnan(found.scale) and np.sum(np.isnan(sums)) == 1


def test_kernels_refuse_what_they_cannot_take():
  def split(*shape, dtype=jnp.bfloat16):
    qkv, _ = case(*shape, dtype=dtype)
    rope.split_heads(qkv, None, None, num_heads=shape[2], num_kv_heads=shape[3])

  with refused("multiples of 8"):
    split(1, 16, 2, 2, 12)
  with refused("bfloat16 and float32"):
    split(1, 16, 2, 2, 16, dtype=jnp.float16)
  with refused("must have 1 to"):
    split(0, 16, 2, 2, 16)
  with refused("multiple of 16 rows"):
    rope.join_heads_operand(*case(1, 12, 2, 2, 16)[1], None, None)
  angles = jnp.ones((16, 8)), jnp.zeros((16, 8))
  with refused("heads that are not rotated"):
    rope.join_heads_operand(*case(1, 16, 2, 2, 16)[1], *angles, has_sums=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
  "shape", [(16, 729, 16, 16, 72), (16, 577, 16, 16, 64), *SHAPES], ids=str
)
def test_kernels_on_a_gpu_match_definition(shape, dtype):
  check(shape, dtype)
