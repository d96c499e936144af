# SPDX-License-Identifier: Apache-2.0
"""Compares the kernels that join and transpose codes with their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.pallas.mosaic.codes import join_columns, turn_codes
from tests.pallas.kernels import assert_same_codes, refused


def parts_of(shape, dtype=E4M3):
  """Makes an array of random codes."""
  codes = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
  return jax.lax.bitcast_convert_type(jnp.asarray(codes), dtype)


def test_join_columns_concatenates_the_values_of_devices():
  # Each of two devices has two values of each of three columns.
  parts = jnp.asarray([[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]])
  np.testing.assert_array_equal(
    ops.join_columns.definition(parts), np.arange(12).reshape(3, 4)
  )


# In the first shape, the last tile overlaps another one along each axis.
@pytest.mark.parametrize("shape", [(2, 160, 80), (3, 128, 64)], ids=str)
def test_joined_columns_match_the_definition(shape):
  check_joined(shape, interpret=True)


def check_joined(shape, **options):
  parts = parts_of(shape)
  found = join_columns(parts, **options)
  assert_same_codes(found, ops.join_columns.definition(parts))


@pytest.mark.parametrize("shape", [(2, 80, 144), (48, 128)], ids=str)
def test_transposed_codes_match_the_definition(shape):
  check_turned(shape, interpret=True)


def check_turned(shape, **options):
  codes = parts_of(shape, E5M2)
  found = turn_codes(codes, **options)
  assert_same_codes(found, ops.turn_codes.definition(codes))


def test_kernels_refuse_unsupported_arguments():
  for shape in ((2, 96, 64), (2, 128, 48), (2, 128, 72)):
    with refused(r"f >= 128, k >= 64 and k a multiple of 16, got \(2"):
      join_columns(parts_of(shape))
  for kernel in (join_columns, turn_codes):
    with refused("moves FP8 codes, got float32"):
      kernel(jnp.zeros((2, 128, 64)))
  with refused("a multiple of 16, got 40"):
    turn_codes(parts_of((2, 40, 128)))
  with refused(r"at least 32 x 128, got \[128, 64\]"):
    turn_codes(parts_of((2, 128, 64)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 22016, 2048), (4, 4096, 2752)], ids=str)
def test_joined_and_transposed_codes_on_a_gpu(shape):
  check_joined(shape)
  check_turned(shape)
