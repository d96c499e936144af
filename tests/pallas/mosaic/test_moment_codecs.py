# SPDX-License-Identifier: Apache-2.0
"""Tests how the optimizer's kernels encode moments in registers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.codecs.group import Encoded
from coat_jax.pallas.mosaic import moment_codecs, ptx
from coat_jax.pallas.mosaic.registers import Instructions
from tests import cases
from tests.codecs import oracles as codec_oracles
from tests.pallas.mosaic.test_adam import CODECS

ON = Instructions(interpret=True)
DRAWS = 512


@pytest.mark.parametrize(
  "name", ["coat", "coat_e5m2", "coat_e8m0", "log8", "fp8"]
)
def test_mean_over_evenly_spaced_noise_is_the_value(name):
  # Rounding with n evenly spaced noise values gives the value on average, up to
  # 1 / (2 * n) of the gap between the neighbouring codes. The mean error of
  # 1024 values is about 2^-10 / 500 of a gap. A gap is at most 0.3 of a value
  # (E5M2).
  codec = CODECS[name]
  moments = cases.moments(ptx.TILE)
  for i, (group, x) in enumerate(zip(codec.groups, moments, strict=True)):

    @jax.jit
    def decoded(noise, group=group, x=x, is_signed=i == 0):
      noise = jnp.full(ptx.TILE, noise)
      codes, *found = moment_codecs.on_registers(group).encode(
        jnp.asarray(x), noise, is_signed, ON
      )
      found = [jnp.uint8(0) if f is None else f[:, None] for f in found]
      return group.decode(Encoded(codes, *found))

    noise = 1 + (np.arange(DRAWS, dtype=np.float32) + 0.5) / DRAWS
    means = np.mean([np.float64(decoded(n)) for n in noise], axis=0)
    gap, size = codec_oracles.gap(group, x), np.abs(x)
    error = (means - x) * np.sign(x)
    # f32 adds an error of 2^-13 of a gap, as in `test_adam.check_unbiased`. The
    # largest value of a group has no gap, but it has the error of decoding.
    limit = (0.5 / DRAWS + 2**-13) * gap + 2**-19 * size
    assert np.all(np.abs(error) < limit)
    assert abs(np.mean(error / (size + gap))) < 5e-6


@pytest.mark.parametrize("name", ["coat", "coat_e8m0", "log8", "fp8"])
def test_encoding_both_moments_together_matches_encoding_each(name):
  groups = CODECS[name].groups
  register_codecs = [moment_codecs.on_registers(group) for group in groups]
  assert register_codecs[0].fits_as(register_codecs[1])
  xs = [jnp.asarray(x) for x in cases.moments(ptx.TILE)]
  # Include a group of zeros, a single zero, and an infinite second moment.
  xs = [x.at[1].set(0).at[2, 5].set(0) for x in xs]
  xs[1] = xs[1].at[3, 7].set(jnp.inf)
  rng = np.random.default_rng(0)
  noises = [jnp.asarray(rng.uniform(1, 2, ptx.TILE), jnp.float32)] * 2
  got = jax.jit(
    lambda xs: moment_codecs.encode_moments(register_codecs, xs, noises, ON)
  )(xs)
  for i, codec in enumerate(register_codecs):
    want = jax.jit(
      lambda x, codec=codec, i=i: codec.encode(x, noises[i], i == 0, ON)
    )(xs[i])
    pairs = zip(jax.tree.leaves(got[i]), jax.tree.leaves(want), strict=True)
    for a, b in pairs:
      assert a.dtype == b.dtype
      # The codes of a NaN group are arbitrary, because all decode to NaN.
      clean = [np.delete(codec_oracles.bits(x), 3, axis=0) for x in (a, b)]
      np.testing.assert_array_equal(*clean)
