# SPDX-License-Identifier: Apache-2.0
"""Compares Adam's kernel with its definition for factored second moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import codecs
from coat_jax.codecs.factored import Factored
from coat_jax.pallas.mosaic import square_means
from coat_jax.pallas.mosaic.factors import Sizes
from tests.matrices import quick
from tests.pallas.mosaic import test_adam

CODEC = codecs.coat(second="factored")
NEAREST = codecs.coat(second="factored", rounding="nearest")
# Rows of the first shape have 3 groups, so they begin and end inside tiles; its
# strips have 200 rows. The second shape has two matrices whose columns have two
# axes. The third has two strips in each matrix, and its rows have one group.
SHAPES = (400, 384), (2, 64, 2, 128), (2, 512, 128)


@pytest.fixture(autouse=True, params=[32, 6])
def many_tiles(monkeypatch, request):
  """Makes each program process many tiles, as it does for large arrays.

  With at most 6 tiles, several programs share a strip; the last one may have
  fewer tiles.
  """
  monkeypatch.setattr(square_means, "_LEAST_PROGRAMS", 1)
  monkeypatch.setattr(square_means, "_MOST_TILES", request.param)


def compare(codec, dtype, shape, *, interpret, **part):
  """Returns the shares of parameters and codes that differ."""
  g_shape = shape
  if "layer" in part:
    g_shape = (1, *shape[1:])
  p, g, stored = test_adam.problem(codec, dtype, shape=shape)
  args = p, g[: g_shape[0]], stored, *test_adam.numbers(3, **part)
  want = test_adam.by_definition(codec, *args)
  got = test_adam.by_kernel(codec, *args, interpret=interpret)
  for a, b in zip(got[1][1], want[1][1], strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)
  other, total, apart = test_adam.differences(
    codecs.MomentCodec(name="mu", mu=codec.mu, nu=codec.mu),
    (want[1][0],) * 2,
    (got[1][0],) * 2,
  )
  assert other <= 1e-3 * total
  a, b = (np.asarray(x[0], np.float32) for x in (got, want))
  tolerance = 2.0**-7 if dtype == jnp.bfloat16 else 1e-5
  np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-2 * tolerance)
  return np.mean(a != b), np.mean(apart != 0)


@pytest.mark.parametrize(("shape",), quick(1, [(x,) for x in SHAPES]))
@pytest.mark.parametrize(
  "codec, dtype", quick(1, [(CODEC, jnp.bfloat16), (NEAREST, jnp.float32)])
)
def test_interpreted_kernel_matches_definition(codec, dtype, shape):
  different, apart = compare(codec, dtype, shape, interpret=True)
  assert apart <= 1e-3
  assert different <= (1e-3 if dtype == jnp.bfloat16 else 1)


def test_interpreted_kernel_updates_one_layer():
  part = dict(layer=jnp.int32(1), grad_scale=0.5)
  compare(NEAREST, jnp.float32, SHAPES[2], interpret=True, **part)


def test_factors_of_huge_moments_stay_finite():
  shape = (64, 384)
  p, _, stored = test_adam.problem(NEAREST, jnp.float32, shape=shape)
  stored = stored[0], NEAREST.nu.encode(jnp.full(shape, 3e38), None)
  args = p, jnp.full(shape, 1.8e19), stored, *test_adam.numbers(3)
  got = test_adam.by_kernel(NEAREST, *args)
  want = test_adam.by_definition(NEAREST, *args)
  for a, b in zip(got[1][1], want[1][1], strict=True):
    assert np.all(np.isfinite(a))
    np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
  "codec, dtype", [(CODEC, jnp.bfloat16), (NEAREST, jnp.float32)]
)
def test_kernel_matches_definition_on_a_gpu(codec, dtype, shape):
  different, apart = compare(codec, dtype, shape, interpret=False)
  assert apart <= 1e-3
  assert different <= (1e-3 if dtype == jnp.bfloat16 else 1)


def test_why_not_gives_the_reason_for_unsupported_rows():
  def why_not(shape):
    nu = jax.eval_shape(lambda: Factored().zeros(shape))
    return Sizes.of(nu).why_not()

  assert "multiple of 8, got 33" in why_not((3, 33, 128))
  assert "multiple of 8, got 12" in why_not((2, 12, 384))
  assert why_not((64, 384)) is None
