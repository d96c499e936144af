# SPDX-License-Identifier: Apache-2.0
"""Compares 24-bit weights with integer arithmetic in NumPy, bit for bit."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax.optimizer import SplitWeight, join_weights, split_weights, weights
from tests.comparing import assert_same_bits

SIGN, INFINITY = 0x80000000, 0x7F800000


def every_end():
  """Returns f32 bits: each bf16 with critical lower halves, and random bits."""
  high = np.arange(1 << 16, dtype=np.uint32) << 16
  edges = (0x00, 0x01, 0x7F, 0x80, 0x81, 0xFF)
  low = np.array([a << 8 | b for a in edges for b in edges], np.uint32)
  drawn = np.random.default_rng(0).integers(0, 2**32, 1 << 16, np.uint64)
  return np.concatenate([(high[:, None] | low).ravel(), drawn.astype("u4")])


def oracle(bits, noise=None):
  """Splits f32 bits into bf16 bits and a byte, in integer arithmetic."""
  size = (bits & 0x7FFFFFFF).astype(np.int64)
  if noise is None:
    word = np.rint(size / 256).astype(np.int64)  # Rounds ties to even.
  else:
    word = (size + noise) // 256
  word = np.minimum(word, 0x7F7F * 256 + 127)
  word = np.where(size >= INFINITY, size // 256, word)
  word = np.where(size > INFINITY, 0x7FC0 * 256, word)
  high = np.floor(word / 256 + 0.5).astype(np.int64)
  low = word - 256 * high
  assert low.min() >= -128 and low.max() <= 127
  return (high + (bits >> 31 << 15)).astype(np.uint16), low.astype(np.int8)


def bits_of(weight):
  return np.asarray(weight.high).view(np.uint16), np.asarray(weight.low)


def as_f32(bits):
  return jnp.asarray(np.asarray(bits, np.uint32).view(np.float32))


split, join = jax.jit(weights.split), jax.jit(weights.join)


@pytest.mark.parametrize("noise", [None, 0, 1, 128, 255])
def test_split_matches_integer_arithmetic(noise):
  bits = every_end()
  words = None
  if noise is not None:
    # Only the high 8 bits of a random word count.
    words = jnp.full(bits.shape, (noise << 24) + 0xABCDEF, jnp.uint32)
  got = split(as_f32(bits), words)
  assert (got.high.dtype, got.low.dtype) == (jnp.bfloat16, jnp.int8)
  for a, b in zip(bits_of(got), oracle(bits, noise), strict=True):
    np.testing.assert_array_equal(a, b)
  high = np.asarray(got.high, np.float32)
  np.testing.assert_array_equal(
    np.isfinite(high), np.isfinite(bits.view(np.float32))
  )


def test_join_and_split_are_inverse():
  bits = every_end()
  ours = split(as_f32(bits))
  joined = np.asarray(join(ours)).view(np.uint32)
  want = np.minimum((bits & 0x7FFFFFFF) & 0xFFFFFF00, 0x7F7F7F00)
  exact = (bits & 0xFF == 0) & (bits & 0x7FFFFFFF < INFINITY)
  np.testing.assert_array_equal(joined[exact], (want | bits & SIGN)[exact])
  special = bits & 0x7FFFFFFF == INFINITY
  np.testing.assert_array_equal(joined[special], bits[special])
  nan = bits & 0x7FFFFFFF > INFINITY
  np.testing.assert_array_equal(
    joined[nan], np.uint32(0x7FC00000) | bits[nan] & SIGN
  )
  assert_same_bits(split(join(ours)), ours)


def test_high_is_the_nearest_bf16():
  bits = np.random.default_rng(1).integers(0, INFINITY, 4096, np.uint64)
  bits = np.minimum(bits.astype(np.uint32) & 0xFFFFFF00, 0x7F7F7F00)
  got = split(as_f32(bits))
  x = bits.view(np.float32).astype(np.float64)
  high = np.asarray(got.high).astype(np.float64)
  raw = np.asarray(got.high).view(np.uint16)
  for neighbour in (raw + 1, np.maximum(raw, 1) - 1):
    other = (neighbour.astype(np.uint32) << 16).view(np.float32)
    assert np.all(np.abs(x - high) <= np.abs(x - other))


def test_stochastic_rounding_is_exact_on_average():
  drawn = np.random.default_rng(2).integers(0, 0x7F7F7F00, 512, np.uint64)
  bits = drawn.astype(np.uint32)
  noise = jnp.arange(256, dtype=jnp.uint32)[:, None] << 24
  shape = (256, bits.size)
  got = split(
    jnp.broadcast_to(as_f32(bits), shape), jnp.broadcast_to(noise, shape)
  )
  joined = np.asarray(join(got)).view(np.uint32).astype(np.int64)
  np.testing.assert_array_equal(joined.sum(0), 256 * bits.astype(np.int64))


def test_low_byte_hardly_changes_zero_and_never_infinity():
  # If pruning sets a weight to zero, the low byte of its old value remains.
  high = jnp.array([0.0, -0.0, jnp.inf, -jnp.inf], jnp.bfloat16)
  for low in (-128, -1, 0, 1, 127):
    got = join(SplitWeight(high, jnp.full(4, low, jnp.int8)))
    assert_same_bits(got[2:], high[2:].astype(jnp.float32))
    if low <= 0:
      assert_same_bits(got[:2], high[:2].astype(jnp.float32))
    else:
      assert np.all(np.abs(got[:2]) < 2.0**-126)


def tree():
  x = jnp.linspace(-1, 1, 64).reshape(4, 16)
  return {
    "kernel": x,
    "norm": {"scale": jnp.ones((2, 16))},
    "half": x.astype(jnp.bfloat16),
    "complex": x.astype(jnp.complex64),
    "scalar": jnp.float32(0.3),
  }


def test_only_matrices_of_a_tree_are_split():
  params, low = split_weights(tree())
  dtypes = jax.tree.map(lambda x: x.dtype.name, params)
  assert dtypes == {
    "kernel": "bfloat16",
    "norm": {"scale": "float32"},
    "half": "bfloat16",
    "complex": "complex64",
    "scalar": "float32",
  }
  assert all(x.dtype == jnp.int8 for x in jax.tree.leaves(low))
  shapes = jax.tree.map(jnp.shape, low)
  assert shapes["kernel"] == shapes["half"] == (4, 16)
  assert shapes["norm"]["scale"] == shapes["complex"] == shapes["scalar"] == ()
  joined = join_weights(params, low)
  # A weight has 15 mantissa bits, rounded to nearest.
  np.testing.assert_allclose(joined["kernel"], tree()["kernel"], rtol=2**-16)
  np.testing.assert_array_equal(joined["half"], tree()["half"])
  assert joined["half"].dtype == jnp.float32


def test_nnx_parameters_are_split_in_their_boxes():
  state = nnx.state(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Param)
  params, low = split_weights(state)
  assert params["kernel"][...].dtype == jnp.bfloat16
  assert isinstance(low["kernel"], nnx.Param)
  assert low["kernel"][...].dtype == jnp.int8
  joined = join_weights(params, low)
  np.testing.assert_allclose(
    joined["kernel"][...], state["kernel"][...], rtol=2**-16
  )


def test_mismatches_are_refused():
  params, low = split_weights(tree())
  with pytest.raises(ValueError, match=r"must be a bfloat16.*float32\[4, 16\]"):
    join_weights(tree(), low)
  with pytest.raises(ValueError, match="got 1 for 5"):
    join_weights(params, {"kernel": low["kernel"]})


def test_weight_examples_run():
  assert not doctest.testmod(weights).failed
