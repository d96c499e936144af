# SPDX-License-Identifier: Apache-2.0
"""Tests the kernels that split and join rotated heads."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.ops.rope import Rotary, rotation
from coat_jax.pallas.triton import rope
from tests.pallas.kernels import assert_same_operand, refused

DEFINITIONS = types.SimpleNamespace(
  split_heads=ops.split_heads.definition,
  join_heads=ops.join_heads.definition,
  join_heads_operand=ops.join_heads_operand.definition,
)


def case(b, t, n, k, h, dtype=jnp.bfloat16, theta=1e4, own=False):
  qkv = jax.random.normal(jax.random.key(0), (b, t, (n + 2 * k) * h), dtype)
  positions = jnp.arange(t) + 3
  if own:  # Each sequence has other positions.
    positions = positions[None] * (1 + jnp.arange(b)[:, None])
  return qkv, *rotation(positions, head_dim=h, theta=theta)


def both(module, qkv, cos, sin, n, k, **kwargs):
  """Splits into heads, and joins them again with the opposite rotation."""
  heads = module.split_heads(
    qkv, cos, sin, num_heads=n, num_kv_heads=k, **kwargs
  )
  return heads, module.join_heads(*heads, cos, -sin, **kwargs)


def operands(module, qkv, cos, sin, n, k, **kwargs):
  heads = DEFINITIONS.split_heads(qkv, cos, sin, num_heads=n, num_kv_heads=k)
  return module.join_heads_operand(*heads, cos, sin, **kwargs)[0]


def assert_near(actual, expected, dtype):
  """Allows an ulp of `dtype`: a product and a sum may be one operation."""
  ulp = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-22
  for a, e in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    assert a.dtype == e.dtype == dtype and a.shape == e.shape
    a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
    assert np.max(np.abs(a - e)) <= ulp * np.max(np.abs(e))


def test_rope_kernels_refuse():
  def split(*shape, **options):
    n, k = shape[2:4]
    rope.split_heads(*case(*shape, **options), num_heads=n, num_kv_heads=k)

  with refused("powers of two from 16"):
    split(1, 8, 2, 2, 24)
  with refused("multiples of 8"):
    split(1, 12, 2, 2, 16)
  with refused("bfloat16 and float32"):
    split(1, 8, 2, 2, 16, dtype=jnp.float16)
  with refused("all channels of a head must turn .* got 16 of 32"):
    split(1, 8, 2, 2, 32, theta=Rotary(1e4, rotary_dim=16))
  dq, dk = jnp.zeros((1, 12, 2, 16)), jnp.zeros((1, 12, 1, 16))
  _, cos, sin = case(1, 12, 2, 1, 16)
  with refused("got 12"):
    rope.join_heads(dq, dk, dk, cos, sin)
  with refused("got 12"):
    rope.join_heads_operand(dq, dk, dk, cos, sin)
  dq, dk = jnp.zeros((1, 8, 2, 16)), jnp.zeros((1, 8, 1, 16))
  _, cos, sin = case(1, 8, 2, 1, 16)
  with refused("multiples of 16 for columns"):
    rope.join_heads_operand(dq, dk, dk, cos, sin)


def test_rope_kernels_read_positions_of_each_sequence():
  arrays, heads = case(2, 16, 2, 1, 16, jnp.float32, own=True), (2, 1)
  want = both(DEFINITIONS, *arrays, *heads)
  assert_near(both(rope, *arrays, *heads, interpret=True), want, jnp.float32)
  want = operands(DEFINITIONS, *arrays, *heads)
  found = operands(rope, *arrays, *heads, interpret=True)
  assert_same_operand(found, want, 0.99)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("shape", [(2, 512, 32, 32, 128), (1, 1024, 8, 2, 64)])
def test_rope_kernels_on_a_gpu_match_definition(shape, own):
  arrays, heads = case(*shape, own=own), shape[2:4]
  want = both(DEFINITIONS, *arrays, *heads)
  assert_near(both(rope, *arrays, *heads), want, jnp.bfloat16)
  want = operands(DEFINITIONS, *arrays, *heads)
  assert_same_operand(operands(rope, *arrays, *heads), want, 0.999)
