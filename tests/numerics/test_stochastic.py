# SPDX-License-Identifier: Apache-2.0
"""Tests random words: the exact hash, its statistics, and rounding.

Statistical bounds are five standard deviations, or six if thousands of values
are tested at once. The words are fixed, so results are reproducible.
"""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from coat_jax.numerics import stochastic
from tests import oracles

ROWS, COLUMNS = 256, 512
random_words = jax.jit(
  stochastic.random_words, static_argnums=1, static_argnames="whole"
)


def words(seed=0, step=0, leaf=0, shape=(ROWS, COLUMNS), **part) -> np.ndarray:
  key = stochastic.leaf_key(seed, step, leaf)
  return np.asarray(random_words(key, shape, **part))


def of_element(x: np.ndarray) -> list[np.ndarray]:
  """Returns each element's words for its two moments and its parameter."""
  x = jnp.asarray(x)
  return [np.asarray(stochastic.next_words(x, i)) for i in (0, 1, 2)]


def uniforms(x: np.ndarray) -> list[np.ndarray]:
  """Returns the high 16 bits of `of_element`, as float64 in (-1/2, 1/2)."""
  return [((words >> 16) + 0.5) / 2**16 - 0.5 for words in of_element(x)]


def test_words_match_the_hash():
  for seed, step, leaf in [(0, 0, 0), (1, 2, 3), (2**31 + 5, 10**6, 700)]:
    key = oracles.leaf_key(seed, step, leaf)
    assert int(stochastic.leaf_key(seed, step, leaf)) == key
    got = words(seed, step, leaf, shape=(5, 7))
    want = [[oracles.word(key, r, c) for c in range(7)] for r in range(5)]
    np.testing.assert_array_equal(got, np.array(want, np.uint32))


@pytest.mark.parametrize("shape", [(), (6,), (2, 3, 5), (2, 3, 4, 5)])
def test_row_is_an_index_over_all_axes_except_the_last(shape):
  key = stochastic.leaf_key(3, 1, 4)
  got = stochastic.random_words(key, shape)
  assert got.shape == shape and got.dtype == jnp.uint32
  columns = shape[-1] if shape else 1
  flat = np.asarray(got).reshape(-1, columns)
  want = [
    [oracles.word(int(key), r, c) for c in range(columns)]
    for r in range(flat.shape[0])
  ]
  np.testing.assert_array_equal(flat, np.array(want, np.uint32))


def test_part_of_an_array_gets_the_words_of_the_whole():
  whole = words(7, 8, 9)
  start = jnp.uint32([40, 96])
  block = words(7, 8, 9, shape=(16, 32), start=start, whole=whole.shape)
  np.testing.assert_array_equal(block, whole[40:56, 96:128])
  stacked = words(7, 8, 9, shape=(4, 64, COLUMNS))
  np.testing.assert_array_equal(stacked.reshape(whole.shape), whole)
  part = words(
    7,
    8,
    9,
    shape=(2, 16, 32),
    start=jnp.uint32([1, 40, 96]),
    whole=stacked.shape,
  )
  np.testing.assert_array_equal(part, stacked[1:3, 40:56, 96:128])


@pytest.mark.parametrize("first", [2**31 - 2, 2**32 - 2])
def test_offsets_wrap_around_at_32_bits(first):
  # Start near row and column 2^31 or 2^32.
  key = stochastic.leaf_key(1, 1, 1)
  start = jnp.asarray(np.uint32([first, first]))
  got = stochastic.random_words(key, (4, 3), start=start)
  place = [(first + i) % 2**32 for i in range(4)]
  want = [[oracles.word(int(key), r, c) for c in place[:3]] for r in place]
  np.testing.assert_array_equal(got, np.array(want, np.uint32))


def test_jit_matches_eager():
  key = stochastic.leaf_key(1, 2, 3)
  eager = stochastic.random_words(key, (33, 65))
  np.testing.assert_array_equal(random_words(key, (33, 65)), eager)
  traced = jax.jit(stochastic.leaf_key)(1, jnp.int32(2), 3)
  assert int(traced) == int(key)


@pytest.mark.parametrize("spec", [("x",), (None, "x"), (("x", "y"),), "xy"])
def test_sharded_words_match_unsharded_words(spec):
  mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  sharding = NamedSharding(mesh, PartitionSpec(*spec))
  draw = jax.jit(
    lambda key: stochastic.random_words(key, (64, 128)), out_shardings=sharding
  )
  got = draw(stochastic.leaf_key(5, 6, 7))
  assert got.sharding == sharding and len(got.addressable_shards) == 8
  np.testing.assert_array_equal(got, words(5, 6, 7, shape=(64, 128)))


@pytest.mark.parametrize("where", [(0, 0, 0), (1, 1000, 5)])
def test_every_byte_is_uniform(where):
  x = words(*where)
  for shift in (0, 8, 16, 24):
    counts = np.bincount((x >> shift & 0xFF).ravel(), minlength=256)
    expected = x.size / 256
    chi_square = np.sum((counts - expected) ** 2) / expected
    # With 255 degrees of freedom, the mean is 255 and the variance 510.
    assert abs(chi_square - 255) < 5 * np.sqrt(510), (shift, chi_square)


def test_every_row_and_column_is_uniform():
  # A mean of n uniform numbers has a variance of 1 / (12 * n).
  for uniform in uniforms(words(0, 1, 0)):
    assert np.max(np.abs(uniform.mean(0))) < 6 / np.sqrt(12 * ROWS)
    assert np.max(np.abs(uniform.mean(1))) < 6 / np.sqrt(12 * COLUMNS)
    assert abs(uniform.mean()) < 5 / np.sqrt(12 * uniform.size)


def correlations(a: np.ndarray, b: np.ndarray):
  """Returns correlations of a's uniforms with b's, in standard deviations.

  The product of two independent uniforms on [-1/2, 1/2] has a variance of
  1/144. So the mean of n products, times 12 * sqrt(n), is standard normal.
  """
  for x in uniforms(a):
    for y in uniforms(b):
      yield 12 * np.mean(x * y) * np.sqrt(a.size)


NEIGHBOURS = {
  "row": lambda: (words()[:-1], words()[1:]),
  "far row": lambda: (words()[:-64], words()[64:]),
  "column": lambda: (words()[:, :-1], words()[:, 1:]),
  "next run": lambda: (words()[:, :-8], words()[:, 8:]),
  "far column": lambda: (words()[:, :-128], words()[:, 128:]),
  "diagonal": lambda: (words()[:-1, :-1], words()[1:, 1:]),
  "transposed": lambda: (
    words(shape=(ROWS, ROWS)),
    words(shape=(ROWS, ROWS)).T,
  ),
  "step": lambda: (words(step=100), words(step=101)),
  "leaf": lambda: (words(leaf=1), words(leaf=2)),
  "seed": lambda: (words(seed=0), words(seed=1)),
  "seed for step": lambda: (words(seed=1, step=0), words(seed=0, step=1)),
  "step for leaf": lambda: (words(step=1, leaf=0), words(step=0, leaf=1)),
}


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_neighbours_are_uncorrelated(neighbour):
  a, b = NEIGHBOURS[neighbour]()
  assert np.mean(a == b) < 0.01
  assert max(map(abs, correlations(a, b))) < 5


def test_words_of_an_element_are_uncorrelated():
  for step in range(3):
    for a, b in itertools.combinations(uniforms(words(step=step)), 2):
      assert abs(12 * np.mean(a * b) * np.sqrt(a.size)) < 5


def test_one_element_over_many_steps_is_uniform_and_uncorrelated():
  # In training, an element has the same row and column in each step.
  steps = jnp.arange(2**14)
  draw = jax.vmap(lambda s: random_words(stochastic.leaf_key(0, s, 0), (4, 2)))
  x = np.asarray(draw(steps)).reshape(len(steps), -1)
  for uniform in uniforms(x):
    assert np.max(np.abs(uniform.mean(0))) < 6 / np.sqrt(12 * len(steps))
    product = np.mean(uniform[1:] * uniform[:-1], axis=0)
    assert np.max(np.abs(12 * product * np.sqrt(len(steps)))) < 5


def test_uniform_uses_the_high_bits():
  x = jnp.asarray([0, 0x1FF, 0xFFFFFE00, 0x80400200], jnp.uint32)
  got = stochastic.uniform(x)
  want = np.array([0, 0, 2**23 - 1, 0x402001], np.float32) * 2.0**-23
  np.testing.assert_array_equal(got, want)
  assert got.dtype == jnp.float32


def test_next_words_multiply_by_a_power_of_the_multiplier():
  x = words(3, 2, 1, shape=(4, 16))
  for count in (1, 2):
    got = np.asarray(stochastic.next_words(jnp.asarray(x), count))
    want = [[int(w) * 0x915F77F5 ** (8 * count) % 2**32 for w in r] for r in x]
    np.testing.assert_array_equal(got, np.array(want, np.uint32))


@pytest.mark.parametrize("bits", [4, 6])
def test_pairs_of_words_in_a_run_are_uniform(bits):
  # All words of a run (8 columns) are multiples of one word. Any two of them
  # must look independent, not only uncorrelated.
  x = words(2, 3, 4, shape=(2**11, 128)).reshape(-1, stochastic.RUN)
  states = np.concatenate(of_element(x), axis=1) >> (32 - bits)
  cells = 4**bits
  for i, j in itertools.combinations(range(states.shape[1]), 2):
    pair = states[:, i].astype(np.int64) * 2**bits + states[:, j]
    counts = np.bincount(pair, minlength=cells)
    expected = len(x) / cells
    chi_square = np.sum((counts - expected) ** 2) / expected
    # Allow six standard deviations, because there are 276 pairs.
    assert abs(chi_square - (cells - 1)) < 6 * np.sqrt(2 * cells), (i, j)


def test_bfloat16_rounding_is_unbiased_and_between_neighbours():
  rng = np.random.default_rng(0)
  x = (rng.normal(size=256) * 10.0 ** rng.uniform(-30, 30, 256)).astype("f4")
  repeats = 4096
  noise = words(shape=(repeats, x.size))
  many = jnp.broadcast_to(jnp.asarray(x), noise.shape)
  got = stochastic.round_to_bfloat16(many, jnp.asarray(noise))
  assert got.dtype == jnp.bfloat16
  got = np.asarray(got).astype(np.float64)
  bits = x.view(np.uint32) & np.uint32(0xFFFF0000)
  toward_zero = bits.view(np.float32).astype(np.float64)
  away = (bits + np.uint32(0x10000)).view(np.float32).astype(np.float64)
  assert np.all((got == toward_zero) | (got == away))
  # In units of the gap between neighbours, each result has a variance of at
  # most 1/4. The resolution of 16-bit noise adds a bias of up to 2^-17.
  error = (got - x) / (away - toward_zero)
  assert np.max(np.abs(error.mean(0))) < 6 * 0.5 / np.sqrt(repeats) + 2**-17
  assert abs(error.mean()) < 5 * 0.5 / np.sqrt(error.size) + 2**-17


def test_bfloat16_rounding_keeps_exact_and_nonfinite_values():
  x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  for noise in (0, 0xFFFF, 0xFFFFFFFF):
    noise = jnp.full(x.shape, noise, jnp.uint32)
    got = stochastic.round_to_bfloat16(jnp.asarray(x.astype(np.float32)), noise)
    got = np.asarray(got)
    nan = np.isnan(x.astype(np.float32))
    assert np.all(np.isnan(got[nan].astype(np.float32)))
    np.testing.assert_array_equal(
      got[~nan].view(np.uint16), x[~nan].view(np.uint16)
    )
  # NaN stays NaN even if its payload is only in the lower half.
  low_nan = np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)
  got = stochastic.round_to_bfloat16(
    jnp.asarray(low_nan), jnp.zeros(2, jnp.uint32)
  )
  assert np.all(np.isnan(np.asarray(got).astype(np.float32)))


def test_bfloat16_rounding_keeps_the_largest_bfloat16():
  largest = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
  noise = jnp.full(1, 0xFFFF, jnp.uint32)
  got = stochastic.round_to_bfloat16(jnp.full(1, largest), noise)
  assert float(got[0]) == largest
