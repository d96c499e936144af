# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding that remembers nothing but the positions.

The rotation is linear and its transpose is the opposite rotation, so the
backward needs no activation. Pairs are (i, i + H/2), as in Hugging Face
Transformers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from coat_jax.layers.residuals import remember


@functools.partial(jax.custom_vjp, nondiff_argnames=("theta",))
def _rope(x, positions, theta):
  return _rotate(x, positions, theta)


def _rope_fwd(x, positions, theta):
  return _rotate(x, positions, theta), remember("rope", positions)


def _rope_bwd(theta, positions, g):
  return _rotate(g, -positions, theta), None


_rope.defvjp(_rope_fwd, _rope_bwd)


def _rotate(x, positions, theta):
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions.astype(jnp.float32)[:, None] * frequency[None]
  # [1, T, 1, H / 2], one angle for all sequences and heads.
  cos, sin = (f(angle)[None, :, None] for f in (jnp.cos, jnp.sin))
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x.dtype)


def rope(x: Array, positions: Array, *, theta: float) -> Array:
  """Rotates each pair of channels by position * theta^(-2 i / H).

  Args:
    x: [B, T, N, H], H even.
    positions: int32 [T].
    theta: base of the frequencies, 1e4 for Llama 2.

  Returns:
    Array of x's shape and dtype; angles and rotation are f32.

  Raises:
    ValueError: an odd H, or positions of another length.
  """
  if x.shape[-1] % 2 or positions.shape != (x.shape[1],):
    raise ValueError(
      "rope: needs x [B, T, N, H] with an even H and positions [T], got x "
      f"{x.shape} and positions {positions.shape}"
    )
  return _rope(x, positions, theta)
