# SPDX-License-Identifier: Apache-2.0
"""Compares the join of gathered columns with its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3
from coat_jax.pallas.mosaic.join import join_columns
from tests.pallas.kernels import assert_same_codes, refused


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


# The last tiles overlap others along both axes.
@pytest.mark.parametrize("shape", [(2, 160, 80), (3, 128, 64)], ids=str)
def test_joined_columns_match_the_definition(shape):
  check(shape, interpret=True)


def check(shape, **options):
  parts = parts_of(shape)
  found = join_columns(parts, **options)
  assert_same_codes(found, ops.join_columns.definition(parts))


def test_kernel_refuses_what_it_cannot_take():
  for shape in ((2, 96, 64), (2, 128, 48), (2, 128, 72)):
    with refused(r"f >= 128 and k >= 64 a multiple of 16, got \(2"):
      join_columns(parts_of(shape))
  with refused("copies FP8 codes, got float32"):
    join_columns(jnp.zeros((2, 128, 64)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 22016, 2048), (4, 4096, 2752)], ids=str)
def test_join_kernel_on_a_gpu(shape):
  check(shape)
