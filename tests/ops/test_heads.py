# SPDX-License-Identifier: Apache-2.0
"""Tests splitting and joining heads; layers/test_rope.py tests rotations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E5M2
from coat_jax.ops import PerTensor, rope
from coat_jax.ops.rope import Rotary
from tests.comparing import assert_close, assert_same_bits

B, T, H = 2, 5, 6


def case(n, k, dtype=jnp.float32, positions=None, theta=1e4):
  columns = (n + 2 * k) * H
  qkv = jax.random.normal(jax.random.key(0), (B, T, columns), dtype)
  positions = jnp.arange(T) if positions is None else positions
  return qkv, rope.rotation(positions, head_dim=H, theta=theta)


@pytest.mark.parametrize("n, k", [(4, 2), (3, 3), (4, 1)])
def test_split_heads_orders_columns_by_key_head(n, k):
  qkv, _ = case(n, k)
  straight = jnp.ones((T, H // 2)), jnp.zeros((T, H // 2))
  q, key, v = ops.split_heads(qkv, *straight, num_heads=n, num_kv_heads=k)
  heads = np.asarray(qkv).reshape(B, T, -1, H)
  per_key = n // k + 2
  for i in range(k):
    group = heads[:, :, i * per_key : (i + 1) * per_key]
    np.testing.assert_array_equal(
      q[:, :, i * n // k : (i + 1) * n // k], group[:, :, :-2]
    )
    np.testing.assert_array_equal(key[:, :, i], group[:, :, -2])
    np.testing.assert_array_equal(v[:, :, i], group[:, :, -1])


@pytest.mark.parametrize("n, k", [(4, 2), (3, 3)])
@pytest.mark.parametrize(
  "options",
  [
    {},
    {"positions": jnp.int32([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])},
    {"theta": Rotary(1e4, rotary_dim=4)},
  ],
)
def test_join_heads_is_the_transpose_of_split_heads(n, k, options):
  qkv, angles = case(n, k, **options)

  def split(qkv):
    return ops.split_heads(qkv, *angles, num_heads=n, num_kv_heads=k)

  heads, vjp = jax.vjp(split, qkv)
  dheads = jax.tree.map(
    lambda x: jax.random.normal(jax.random.key(1), x.shape), heads
  )
  assert_close(ops.join_heads(*dheads, *angles), vjp(dheads)[0])


def test_split_heads_does_not_change_v():
  qkv, angles = case(4, 2, jnp.bfloat16)
  v = ops.split_heads(qkv, *angles, num_heads=4, num_kv_heads=2)[2]
  assert_same_bits(v, qkv.reshape(B, T, 2, 4, H)[:, :, :, 3])


def test_join_heads_operand_quantizes_the_joined_heads():
  qkv, angles = case(4, 2, jnp.bfloat16)
  heads = ops.split_heads(qkv, *angles, num_heads=4, num_kv_heads=2)
  joined = ops.join_heads(*heads, *angles)
  want = ops.quantize_tensor(joined, scaling=PerTensor(E5M2), layout="both")
  found, sums = ops.join_heads_operand(*heads, *angles)
  assert_same_bits(found, want)
  assert sums is None


def test_join_heads_operand_sums_the_joined_heads():
  qkv, angles = case(4, 2, jnp.bfloat16)
  heads = ops.split_heads(qkv, *angles, num_heads=4, num_kv_heads=2)
  _, sums = ops.join_heads_operand(*heads, *angles, has_sums=True)
  want = jnp.sum(ops.join_heads(*heads, *angles).astype(jnp.float32), (0, 1))
  assert_same_bits(sums, want)


def test_heads_without_angles_are_not_rotated():
  qkv, _ = case(4, 2, jnp.bfloat16)
  still = jnp.ones((T, H // 2)), jnp.zeros((T, H // 2))
  split = functools.partial(ops.split_heads, qkv, num_heads=4, num_kv_heads=2)
  heads = split(None, None)
  assert_same_bits(heads, split(*still))
  assert_same_bits(ops.join_heads(*heads, None, None), qkv)
