# SPDX-License-Identifier: Apache-2.0
"""Compares RoPE with rotations of complex numbers; checks what it saves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.layers import Rotary, YarnScaling, rope
from tests.comparing import assert_close

THETA = 1e4


def case(positions, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shape = (2, len(positions), 3, 8)
  x, dy = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
  return x, dy, jnp.asarray(positions, jnp.int32)


def turned(x, positions, sign=1):
  """Rotates pairs of channels j and j + H/2, as complex numbers in float64."""
  x = np.asarray(x, np.float64)
  half = x.shape[-1] // 2
  frequency = THETA ** (-2 * np.arange(half) / x.shape[-1])
  angle = sign * np.asarray(positions)[:, None] * frequency
  z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
  return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("positions", [range(6), [7, 0, 4095, 3, 3, 100]])
def test_rope_rotates_pairs_by_their_angles(positions):
  x, dy, positions = case(positions)
  y, vjp = jax.vjp(lambda x: rope(x, positions, theta=THETA), x)
  # An f32 angle of 4095 is off by up to 2^-13, and so are its sine and cosine.
  tolerance = max(1e-6, float(jnp.max(positions)) * 2.0**-24)
  assert_close(y, turned(x, positions), tolerance)
  # The transpose of a rotation is its inverse.
  assert_close(vjp(dy), (turned(dy, positions, sign=-1),), tolerance)


def test_each_sequence_can_have_its_own_positions():
  x, dy, _ = case(range(6))
  positions = jnp.int32([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0]])
  y, vjp = jax.vjp(lambda x: rope(x, positions, theta=THETA), x)

  def by_row(x, sign=1):
    rows = [
      turned(x[i : i + 1], positions[i], sign=sign) for i in range(len(x))
    ]
    return np.concatenate(rows)

  assert_close(y, by_row(x), 1e-6)
  assert_close(vjp(dy), (by_row(dy, -1),), 1e-6)


def test_partial_rope_rotates_the_first_channels():
  x, dy, positions = case(range(6))
  f = functools.partial(
    rope, positions=positions, theta=Rotary(THETA, rotary_dim=4)
  )
  y, vjp = jax.vjp(f, x)
  assert_close(y[..., :4], turned(x[..., :4], positions), 1e-6)
  np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
  (dx,) = vjp(dy)
  assert_close(dx[..., :4], turned(dy[..., :4], positions, sign=-1), 1e-6)
  np.testing.assert_array_equal(dx[..., 4:], dy[..., 4:])


def test_gradient_of_scaled_rope_is_its_transpose():
  x, dy, positions = case(range(6))
  scaling = YarnScaling(factor=4.0, original_max_position_embeddings=8)
  y, vjp = jax.vjp(
    lambda x: rope(x, positions, theta=Rotary(THETA, scaling)), x
  )
  assert jnp.linalg.norm(y) > 1.1 * jnp.linalg.norm(x)
  (dx,) = vjp(dy)
  # For a linear map A, <dy, A x> = <A^T dy, x>.
  assert_close(jnp.vdot(dy, y), jnp.vdot(dx, x), 1e-5)


def test_rope_uses_the_given_theta():
  x, _, positions = case(range(6))
  y = rope(x, positions, theta=5e5)
  assert jnp.max(jnp.abs(y - rope(x, positions, theta=THETA))) > 0.1


def test_bfloat16_is_rotated_in_f32():
  x, _, positions = case([2000, 2001], jnp.bfloat16)
  y = rope(x, positions, theta=THETA)
  assert y.dtype == jnp.bfloat16
  # In BF16, position 2001 would be rounded to 2000.
  assert_close(y, turned(x, positions), 2.0**-8)


def test_rope_saves_only_positions():
  x, _, positions = case(range(6))
  _, vjp = jax.vjp(lambda x: rope(x, positions, theta=THETA), x)
  leaves = jax.tree.leaves(vjp)
  assert [leaf.dtype for leaf in leaves] == [jnp.int32]
  assert leaves[0] is positions


def test_bad_shapes_are_refused():
  with pytest.raises(ValueError, match="rope: x must be .* an even H"):
    rope(jnp.ones((1, 2, 3, 5)), jnp.arange(2), theta=THETA)
  with pytest.raises(ValueError, match="rope: needs integer positions"):
    rope(jnp.ones((1, 2, 3, 4)), jnp.arange(3), theta=THETA)
  with pytest.raises(ValueError, match=r"positions \[T\] or \[B, T\] for"):
    rope(jnp.ones((2, 4, 3, 4)), jnp.ones((1, 4), jnp.int32), theta=THETA)
