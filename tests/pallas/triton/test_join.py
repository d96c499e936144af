# SPDX-License-Identifier: Apache-2.0
"""Triton's join of gathered columns against the definition's: a copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.formats import E4M3, E5M2
from coat_jax.pallas.triton import join
from tests.pallas.kernels import assert_same_codes, lowered_for_h200, refused


def parts_of(shape, dtype=E4M3):
  """Codes that differ from their neighbours."""
  codes = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
  return jax.lax.bitcast_convert_type(jnp.asarray(codes), dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
  "shape", [(2, 16, 16), (4, 48, 176), (3, 32, 1024), (1, 64, 48)], ids=str
)
def test_is_the_definitions(shape, dtype):
  parts = parts_of(shape, dtype)
  actual = join.join_columns(parts, interpret=True)
  assert_same_codes(actual, ops.join_columns.definition(parts))


def test_a_device_has_values_of_every_column():
  # Of each of three columns the first device has two values, then the second.
  parts = jnp.asarray([[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]])
  np.testing.assert_array_equal(
    ops.join_columns.definition(parts), np.arange(12).reshape(3, 4)
  )


@pytest.mark.parametrize(
  "shape, dtype, reason",
  [
    ((2, 40, 16), E4M3, "multiples of 16"),
    ((2, 16, 40), E4M3, "multiples of 16"),
    ((16, 16), E4M3, r"\[P, f, k\]"),
    ((2, 16, 16), jnp.bfloat16, "bfloat16"),
  ],
)
def test_join_kernel_refuses(shape, dtype, reason):
  with refused(reason):
    join.join_columns(jnp.zeros(shape, dtype))


def test_lowers_to_triton():
  parts = jax.ShapeDtypeStruct((2, 11008, 2048), E4M3)
  text = lowered_for_h200(join.join_columns, parts)
  assert '"join_columns' in text and "triton" in text


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 22016, 2048), (4, 4096, 2752)], ids=str)
def test_on_a_gpu(shape):
  parts = parts_of(shape)
  actual = jax.jit(join.join_columns)(parts)
  assert_same_codes(actual, ops.join_columns.definition(parts))
