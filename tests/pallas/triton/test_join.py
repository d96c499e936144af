# SPDX-License-Identifier: Apache-2.0
"""Compares Triton's join of gathered columns with its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3
from coat_jax.pallas.triton import join
from tests.pallas.kernels import assert_same_codes


def parts_of(shape, dtype=E4M3):
  """Makes codes that differ from their neighbours."""
  codes = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
  return jax.lax.bitcast_convert_type(jnp.asarray(codes), dtype)


def test_join_columns_has_values_of_every_device():
  # Of each of three columns the first device has two values, then the second.
  parts = jnp.asarray([[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]])
  np.testing.assert_array_equal(
    ops.join_columns.definition(parts), np.arange(12).reshape(3, 4)
  )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 22016, 2048), (4, 4096, 2752)], ids=str)
def test_join_kernel_on_a_gpu(shape):
  parts = parts_of(shape)
  actual = jax.jit(join.join_columns)(parts)
  assert_same_codes(actual, ops.join_columns.definition(parts))
