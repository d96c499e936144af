# SPDX-License-Identifier: Apache-2.0
"""Tests the optimizer's kernel on bf16 and 24-bit weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import codecs
from coat_jax.optimizer import adam, weights
from coat_jax.optimizer.weights import SplitWeight
from coat_jax.pallas.mosaic import weights as on_registers
from coat_jax.pallas.mosaic.registers import Instructions
from tests.matrices import quick
from tests.optimizer.test_weights import as_f32, every_end
from tests.pallas.mosaic.test_adam import (
  by_definition,
  by_kernel,
  differences,
  numbers,
  problem,
)

CODECS = {"coat": codecs.coat(), "log8": codecs.log8()}


def split_problem(codec, **options):
  p, g, stored = problem(codec, jnp.float32, jnp.bfloat16, **options)
  return jax.jit(weights.split)(p), g, stored


def units(weight):
  """Returns 24-bit weights as integers."""
  return np.asarray(weights.join(weight)).view(np.uint32).astype(np.int64) >> 8


def exact(weight):
  return np.asarray(weights.join(weight), np.float64)


def check_units(got, want, old):
  """Checks that weights after a step from `old` differ by at most one unit.

  A unit is the last of the 24 bits. Rounding errors of f32 may be added to it.
  """
  apart = np.abs(units(got) - units(want))
  # An ulp of f32, by which a parameter may be off, is only 1/256 of a unit.
  assert np.mean(apart != 0) < 0.02
  # Rounding errors of a GPU's quotient, root, three products and a sum are
  # proportional to the weight and its change, which may nearly cancel.
  rounded = 10 * 2.0**-24 * (np.abs(old) + np.abs(exact(want) - old))
  distance = np.abs(exact(got) - exact(want))
  unit = distance / np.maximum(apart, 1)
  assert np.all((apart <= 1) | (distance <= rounded + unit))


def check(name, steps, interpret, **options):
  codec = CODECS[name]
  p, g, stored = split_problem(codec, **options)
  for step in steps:
    args = (p, g, stored, *numbers(step, grad_scale=0.5))
    old = exact(p)
    (q, new) = by_kernel(codec, *args, interpret=interpret)
    (p, stored) = by_definition(codec, *args)
    assert isinstance(q, SplitWeight)
    assert [x.dtype for x in q] == [jnp.bfloat16, jnp.int8]
    check_units(q, p, old)
    # The low bytes must be those that `split` makes for the same weights.
    again = jax.jit(lambda w: weights.split(weights.join(w)))(q)
    np.testing.assert_array_equal(np.asarray(again.low), np.asarray(q.low))
    other, total, codes = differences(codec, stored, new)
    assert other <= 1e-3 * total and np.mean(codes != 0) <= 1e-3


@pytest.mark.parametrize("name", quick(1, CODECS))
def test_interpreted_kernel_updates_24_bit_weights(name):
  check(name, (1,), interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CODECS)
def test_kernel_updates_24_bit_weights_on_a_gpu(name):
  check(name, (1, 2, 3), interpret=False, shape=(512, 4096))


def check_zero_rate(interpret):
  codec = CODECS["coat"]
  p, g, stored = split_problem(codec)
  key, scalars, step = numbers(1)
  step = step._replace(learning_rate=jnp.float32(0))
  q, _ = by_kernel(codec, p, g, stored, key, scalars, step, interpret=interpret)
  for a, b in zip(p, q, strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_learning_rate_of_zero_keeps_every_bit():
  check_zero_rate(interpret=True)


@pytest.mark.gpu
def test_learning_rate_of_zero_keeps_every_bit_on_a_gpu():
  check_zero_rate(interpret=False)


@pytest.mark.slow
def test_kernel_supports_f32_gradients_of_bf16_weights():
  codec = CODECS["coat"]
  p, g, stored = problem(codec, jnp.bfloat16, jnp.float32)
  args = (p, g, stored, *numbers(2))
  q, new = by_kernel(codec, *args)
  want, stored = by_definition(codec, *args)
  assert q.dtype == jnp.bfloat16
  assert np.mean(np.asarray(q != want)) <= 1e-3
  other, _, apart = differences(codec, stored, new)
  assert other == 0 and np.mean(apart != 0) <= 1e-3


def test_kernel_splits_and_joins_like_the_definition():
  bits = every_end()
  # Only computed values are rounded, so their NaNs are quiet.
  quiet = (bits & 0x7FFFFFFF <= 0x7F800000) | (bits & 0x00400000 > 0)
  x = as_f32(bits[quiet])
  words = jnp.asarray(
    np.random.default_rng(0).integers(0, 2**32, x.shape, np.uint64).astype("u4")
  )
  refs = jnp.zeros(1, jnp.bfloat16), jnp.zeros(1, jnp.int8)
  got = jax.jit(
    lambda x, words: on_registers.round_like(
      refs, x, lambda: words, Instructions(interpret=True)
    )
  )(x, words)
  want = jax.jit(weights.split)(x, words)
  high, low = (np.asarray(a).view(f"u{a.dtype.itemsize}") for a in got)
  # Leave out subnormals, which a GPU may flush when it clips a tile.
  normal = np.abs(np.asarray(x)) >= 2.0**-126
  normal |= ~np.isfinite(np.asarray(x))
  np.testing.assert_array_equal(
    high[normal], np.asarray(want.high).view(np.uint16)[normal]
  )
  np.testing.assert_array_equal(
    low[normal], np.asarray(want.low).view(np.uint8)[normal]
  )
  joined = jax.jit(
    functools.partial(on_registers.in_f32, Instructions(interpret=True))
  )(*want)
  np.testing.assert_array_equal(
    np.asarray(joined).view(np.uint32)[normal],
    np.asarray(jax.jit(weights.join)(want)).view(np.uint32)[normal],
  )


def test_low_parts_hardly_change_zero_and_never_infinity():
  high = jnp.array([0.0, -0.0, jnp.inf, -jnp.inf], jnp.bfloat16)
  for low in (-128, -1, 127):
    weight = SplitWeight(high, jnp.full(4, low, jnp.int8))
    got = on_registers.in_f32(Instructions(interpret=True), *weight)
    np.testing.assert_array_equal(got[2:], high[2:].astype(jnp.float32))
    assert np.all(np.abs(got[:2]) < 2.0**-126)


@pytest.mark.parametrize("name", quick(1, CODECS))
def test_kernel_for_24_bit_weights_lowers_for_a_gpu(name):
  codec = CODECS[name]
  args = jax.eval_shape(lambda: (*split_problem(codec), *numbers(1)))
  step = functools.partial(
    adam.adamw_step, groups=codec.groups, implementation="mosaic"
  )
  text = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))
  assert text.as_text().count("mosaic_gpu_v2") == 1
