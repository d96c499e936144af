# SPDX-License-Identifier: Apache-2.0
"""Compares the kernel that computes a scale from maxima with its definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.qtensor import amax_to_scale
from coat_jax.numerics.scaling import GRADIENTS, PerTensor
from coat_jax.pallas.mosaic import scales
from tests.comparing import jit

LIMITS = np.finfo(np.float32)


def scale_of(maxima, dtype) -> np.ndarray:
  """Runs the kernel in the interpreter."""
  bits = jnp.asarray(np.asarray(maxima, np.float32).view(np.int32))
  return np.asarray(scales.bits_to_scale(bits, PerTensor(dtype), True))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
  "shape", [(128,), (131,), (43, 24), (2**16 + 1,)], ids=str
)
def test_scale_kernel_matches_definition(shape, dtype):
  # The largest maximum is the last, which may be in an incomplete load.
  maxima = np.abs(np.random.default_rng(0).normal(size=shape))
  maxima.flat[-1] = 7.3
  expected = jit(lambda x: amax_to_scale(x, dtype))(jnp.float32(7.3))
  np.testing.assert_array_equal(scale_of(maxima, dtype), expected)


@pytest.mark.parametrize(
  "amax", [0.0, 1e-38, LIMITS.tiny, LIMITS.max, np.inf, np.nan]
)
def test_scale_kernel_matches_definition_on_degenerate_maxima(amax):
  maxima = np.zeros(200)
  maxima[3] = amax
  expected = jit(amax_to_scale)(jnp.float32(amax))
  np.testing.assert_array_equal(scale_of(maxima, E4M3), expected)


def test_shared_scale_matches_the_unshared_scale():
  bits = jnp.asarray(np.repeat(np.float32([1.5, 3.0]), 64).view(np.int32))
  scale, read = scales.bits_to_shared_scale(bits, GRADIENTS, True)
  expected = scales.bits_to_scale(bits, GRADIENTS, True)
  np.testing.assert_array_equal(scale, expected)
  np.testing.assert_array_equal(read, jnp.broadcast_to(expected, read.shape))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [128, 200, 5504, 2**16])
def test_scale_kernel_on_a_gpu(size):
  maxima = np.abs(np.random.default_rng(0).normal(size=size))
  maxima[-1] = 7.3
  bits = jnp.asarray(np.asarray(maxima, np.float32).view(np.int32))
  expected = jit(lambda x: amax_to_scale(x, E5M2))(jnp.float32(7.3))
  scale, read = scales.bits_to_shared_scale(bits, GRADIENTS, False)
  np.testing.assert_array_equal(scale, expected)
  np.testing.assert_array_equal(read, jnp.broadcast_to(expected, read.shape))
