# SPDX-License-Identifier: Apache-2.0
"""Compares factored second moments with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import codecs
from coat_jax.codecs import factored
from coat_jax.codecs.factored import Factored
from tests.codecs.oracles import rank_one_tiles

CODEC = Factored()


def second_moments(shape, seed=0):
  return np.square(np.random.default_rng(seed).normal(size=shape)).astype("f")


def roundtrip(v):
  encoded = jax.jit(CODEC.encode)(v, None)
  return encoded, np.asarray(jax.jit(CODEC.decode)(encoded))


@pytest.mark.parametrize(
  "shape, row",
  [
    ((64, 96), 0),
    ((96, 64), 0),
    ((3, 64, 96), 1),
    ((127, 64, 96), 1),  # Layers may be stacked along the first axis.
    ((500, 64, 96), 0),
    ((512, 2, 1376), 0),  # `layers.MLP.gate_up`.
    ((512, 8, 64), 0),  # q of `nnx.MultiHeadAttention`.
    ((8, 64, 512), 1),  # `out` of the same.
    ((3, 3, 256, 512), 2),  # A convolution.
    ((3, 64, 2, 96), 1),
    ((8, 96), 0),
    ((7, 96), None),
    ((96, 7), None),
    ((64, 2, 96), None),
    ((4096,), None),
    ((), None),
  ],
)
def test_rows_are_the_longest_axis_before_the_last_except_a_stacking_axis(
  shape, row
):
  assert factored.row_axis(shape) == row


@pytest.mark.parametrize(
  "rows, tiles",
  [
    (8, 1),
    (383, 1),
    (384, 2),  # Tiles have at least 192 rows.
    (392, 1),  # 196 is not a multiple of 8.
    (400, 2),
    (1376, 4),
    (4096, 16),
    (11008, 32),
    (32000, 32),
    (50257, 1),
    (50304, 16),
  ],
)
def test_number_of_tiles_is_a_power_of_two(rows, tiles):
  assert factored.row_tiles(rows) == tiles


@pytest.mark.parametrize(
  "shape, tiles",
  [
    ((40, 64), 1),
    ((2, 64, 40), 1),
    ((2, 64, 3, 40), 1),
    ((512, 256), 2),
    ((400, 2, 200), 2),  # The last tile of a row is short.
  ],
)
def test_codec_stores_means_of_rows_and_columns_of_tiles(shape, tiles):
  v = second_moments(shape)
  row = factored.row_axis(shape)
  encoded, decoded = roundtrip(v)
  assert encoded.codes.shape == ()
  height = shape[row] // tiles
  for got, axis, size in (
    (encoded.amax, -1, 128),
    (encoded.range, row, height),
  ):
    starts = range(0, shape[axis], size)
    parts = np.split(v.astype(float), starts[1:], axis)
    want = np.stack([x.mean(axis) for x in parts], axis)
    np.testing.assert_allclose(got, want, rtol=1e-6)
  want = rank_one_tiles(v, row, tiles)
  np.testing.assert_allclose(decoded, want, rtol=2e-6)
  # Encoding the decoded values again changes nothing.
  np.testing.assert_allclose(roundtrip(decoded)[1], decoded, rtol=2e-6)


def test_axis_of_rows_is_found_from_the_means_of_a_shard():
  # The whole leaf is [1024, 512, 128].
  means = factored.means(jnp.ones((256, 512, 128)), 0, 1)
  assert factored.row_of(*means) == 0 != factored.row_axis((256, 512, 128))
  assert factored.shape_of(*means) == (256, 512, 128)


def test_matrix_of_rank_one_is_reproduced_whatever_its_range():
  rng = np.random.default_rng(0)
  v = np.exp2(rng.uniform(-60, 50, (40, 1)) + rng.uniform(-60, 50, (1, 64)))
  np.testing.assert_allclose(roundtrip(v.astype("f"))[1], v, rtol=2e-6)


def test_huge_values_and_zeros_are_reproduced():
  v = np.zeros((3, 40, 64), "f")
  v[1] = 2.0**126
  v[2, 5, 7] = 2.0**126
  encoded, decoded = roundtrip(v)
  assert np.all(np.isfinite(encoded.amax)) and np.all(np.isfinite(decoded))
  np.testing.assert_allclose(decoded, v, rtol=2e-6)


def test_matrix_with_subnormal_means_decodes_to_tiny_values():
  v = np.zeros((16, 32), "f")
  v[3, 5] = 1e-39
  _, decoded = roundtrip(v)
  assert np.all(decoded >= 0) and np.max(decoded) <= 1e-38


def test_nan_affects_only_its_tile():
  v = second_moments((400, 200))
  v[290, 5] = np.nan
  _, decoded = roundtrip(v)
  want = np.zeros_like(v, bool)
  want[200:, :128] = True
  np.testing.assert_array_equal(np.isnan(decoded), want)


@pytest.mark.parametrize("shape", [(40,), (4, 64), ()])
def test_leaves_that_are_not_factored_are_stored_in_f32(shape):
  v = second_moments(shape)
  encoded, decoded = roundtrip(v)
  assert encoded.codes.shape == shape and encoded.amax.ndim == 0
  np.testing.assert_array_equal(decoded, v)


@pytest.mark.parametrize("shape", [(40, 64), (2, 64, 3, 40), (40,)])
def test_zeros_returns_the_encoding_of_a_zero_array(shape):
  got = CODEC.zeros(shape)
  want = CODEC.encode(jnp.zeros(shape), None)
  for a, b in zip(got, want, strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_array_equal(a, b)


def test_leaf_without_values_is_decoded():
  encoded = CODEC.encode(jnp.zeros((0, 64, 96)), None)
  assert CODEC.decode(encoded).shape == (0, 64, 96)


def test_coat_accepts_factored_second_moments():
  codec = codecs.build("coat", second="factored")
  assert codec.mu == codecs.coat().mu and codec.nu == CODEC
