# SPDX-License-Identifier: Apache-2.0
"""Compares group codecs with float64 versions, and tests their error bounds."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import codecs
from coat_jax.codecs.group import finite_amax, magnitude_of
from coat_jax.numerics import stochastic
from coat_jax.numerics.formats import E4M3, E5M2
from tests import cases, comparing, oracles
from tests.codecs import oracles as codec_oracles

# All group codecs with both roundings, by name.
GROUP_CODECS = {
  f"{name}-{rounding}": functools.partial(build, rounding=rounding)
  for rounding in ("nearest", "stochastic")
  for name, build in codec_oracles.GROUP_CODECS.items()
}


@functools.partial(jax.jit, static_argnums=0)
def encode(codec, x, noise=None):
  return codec.encode(x, noise)


@functools.partial(jax.jit, static_argnums=0)
def decode(codec, encoded):
  return codec.decode(encoded)


def noise_like(x, step=0):
  words = stochastic.random_words(stochastic.leaf_key(0, step, 0), x.shape)
  return stochastic.uniform(words)


def roundtrip(codec, x, step=0):
  noise = noise_like(x, step) if codec.needs_noise else None
  encoded = encode(codec, jnp.asarray(x), noise)
  return encoded, np.asarray(decode(codec, encoded))


def inputs(codec, shape=(64, 512), seed=0):
  """Returns a moment, which is signed if the codec stores signs."""
  mu, nu = cases.moments(shape, seed)
  return nu if codec_oracles.is_unsigned(codec) else mu


@functools.cache
def trained(name):
  """Returns (codec, moment, noise, encoded, decoded), cached by name."""
  codec = GROUP_CODECS[name](group_size=128)
  x = inputs(codec)
  noise = noise_like(x) if codec.needs_noise else None
  encoded = encode(codec, jnp.asarray(x), noise)
  return codec, x, noise, encoded, np.asarray(decode(codec, encoded))


@pytest.mark.parametrize("name", GROUP_CODECS)
def test_codes_and_statistics_match_the_oracle(name):
  codec, x, noise, encoded, _ = trained(name)
  want = codec_oracles.encode(codec, x, noise)
  # `amax` is exact, because it is a power of two or a maximum of f32 values.
  # `range` may be a power k, rounded down to sixteenths. It differs if the f32
  # error of log2 moves k across a multiple of a sixteenth.
  np.testing.assert_array_equal(np.asarray(encoded.amax), want.amax)
  same_range = np.asarray(encoded.range) == want.range
  assert np.mean(same_range) >= 0.9999
  # Because of exp2 and log2 in f32, the image that is rounded has a relative
  # error of up to 2^-18. In stochastic rounding, so do the value and its
  # neighbours. Such an error is up to 2^-14 of a step, so about 1 code in 2^14
  # may differ.
  apart = agreeing(codec, encoded.codes, want.codes, same_range)
  assert np.mean(apart == 0) >= 0.9999
  assert np.max(apart) <= 1


@pytest.mark.parametrize("name", GROUP_CODECS)
def test_decode_matches_the_oracle(name):
  codec, _, _, encoded, decoded = trained(name)
  want = codec_oracles.decode(codec, encoded)
  # 1 / k has a relative error of 2^-25 in f32. Multiplied by up to 60 octaves,
  # this is 2^-19.
  np.testing.assert_allclose(decoded, want, rtol=2**-19)


@pytest.mark.parametrize("name", GROUP_CODECS)
def test_error_is_within_the_bound(name):
  codec, x, _, encoded, decoded = trained(name)
  bound = codec_oracles.error_bound(codec, x, encoded)
  assert np.all(np.abs(decoded.astype(np.float64) - x) <= bound)


def agreeing(codec, a, b, same_range):
  """Returns how many codes apart a and b are, in groups with equal ranges."""
  groups = np.broadcast_to(same_range, (*a.shape[:-1], a.shape[-1] // 128))
  return codec_oracles.codes_apart(codec, a, b)[np.repeat(groups, 128, -1)]


POWERS = [
  # (ratio of the largest to the smallest magnitude, k in sixteenths). Here
  # k = log2(448^2 / 2) / log2(ratio), rounded down, and at most 255 sixteenths.
  (2.0**200, 1),  # 16.6147 / 200 is 1.33 sixteenths.
  (2.0**120, 2),
  (2.0**17, 15),
  (2.0**16, 16),
  (2.0**8, 33),
  (2.0**4.1, 64),
  (2.0**1.1, 241),
  (2.0**1.04, 255),
  (2.0**0.5, 255),  # k is capped from here on.
  (1 + 2.0**-23, 255),
  (1.0, 255),
]


@pytest.mark.parametrize("ratio, sixteenths", POWERS)
def test_encoding_is_correct_over_the_whole_range_of_powers(ratio, sixteenths):
  codec = codecs.coat(rounding="nearest").mu
  amax = 2.0**100 if ratio > 2.0**50 else 0.75
  x = np.geomspace(amax / ratio, amax, 128).astype(np.float32)[None]
  x[0, ::2] *= -1
  encoded, decoded = roundtrip(codec, x)
  assert int(encoded.range[0, 0]) == sixteenths
  assert float(encoded.amax[0, 0]) == np.max(np.abs(x))
  want = codec_oracles.encode(codec, x, None)
  apart = oracles.codes_apart(codec_oracles.bits(encoded.codes), want.codes)
  # k multiplies the error of log2 in f32 by up to 16, and an octave of images
  # has 8 codes. So up to 2 of the 128 values may get a neighbouring code.
  assert np.mean(apart == 0) >= 0.98 and np.max(apart) <= 1
  np.testing.assert_allclose(
    decoded,
    codec_oracles.decode(codec, encoded),
    rtol=2**-15,
    atol=amax * 2.0**-125,  # Smaller values may become zero.
  )


@pytest.mark.parametrize("dtype, second", [(E4M3, "e4m3"), (E5M2, "e5m2")])
def test_no_second_moment_becomes_zero(dtype, second):
  # The power of a group is such that its smallest image is at least 2 / qmax,
  # which is more than two steps above zero in both dtypes.
  codec = codecs.coat(rounding="stochastic", second=second).nu
  assert codec.dtype == dtype
  _, nu = cases.moments((64, 1024))
  for step in range(4):
    encoded, decoded = roundtrip(codec, nu, step)
    assert encoded.codes.dtype == dtype
    assert np.all(decoded > 0)


@pytest.mark.parametrize("name", GROUP_CODECS)
def test_degenerate_groups_decode_to_finite_values_within_the_bound(name):
  codec = GROUP_CODECS[name](group_size=16)
  names, x = degenerate(codec)
  encoded, decoded = roundtrip(codec, x)
  assert np.all(np.isfinite(decoded))
  bound = codec_oracles.error_bound(codec, x, encoded)
  error = np.abs(decoded.astype(np.float64) - x)
  assert not names[np.any(error > bound, -1)].size
  # Signs do not change, and zeros stay zeros.
  assert np.all((decoded == 0) | (np.sign(decoded) == np.sign(x)))


@pytest.mark.parametrize("name", GROUP_CODECS)
def test_nan_or_infinity_makes_only_its_group_nan(name):
  codec = GROUP_CODECS[name](group_size=16)
  _, x = degenerate(codec)
  clean, _ = roundtrip(codec, x)
  others = np.ones(x.shape, bool)
  for row, group in enumerate(cases.nonfinite_groups(16).values()):
    x[row, 16:32] = group
    others[row, 16:32] = False
  encoded, decoded = roundtrip(codec, x)
  np.testing.assert_array_equal(
    codec_oracles.bits(encoded.codes)[others],
    codec_oracles.bits(clean.codes)[others],
  )
  assert np.all(np.isnan(decoded[~others]))
  assert np.all(np.isfinite(decoded[others]))


def degenerate(codec, n=40):  # The last group of 16 has only 8 values.
  """Returns (names, values [names, n])."""
  groups = cases.finite_groups(n)
  x = np.stack(list(groups.values()))
  x = np.abs(x) if codec_oracles.is_unsigned(codec) else x
  return np.array(list(groups)), x


@pytest.mark.parametrize("name", GROUP_CODECS)
def test_short_groups_match_the_oracle(name):
  codec = GROUP_CODECS[name](group_size=16)
  x = inputs(codec, degenerate(codec)[1].shape)
  encoded, decoded = roundtrip(codec, x)
  want = codec_oracles.encode(
    codec, x, noise_like(x) if codec.needs_noise else None
  )
  np.testing.assert_array_equal(np.asarray(encoded.amax), want.amax)
  np.testing.assert_array_equal(np.asarray(encoded.range), want.range)
  assert np.all(
    codec_oracles.codes_apart(codec, encoded.codes, want.codes) <= 1
  )
  bound = codec_oracles.error_bound(codec, x, encoded)
  assert np.all(np.abs(decoded.astype(np.float64) - x) <= bound)


@pytest.mark.parametrize("name", codec_oracles.GROUP_CODECS)
def test_stochastic_rounding_is_unbiased(name):
  # A rounding error has a standard deviation of at most half a gap. The bounds
  # are six standard deviations of a value's mean error over all draws, and five
  # of the mean error over all values and draws.
  codec = codec_oracles.GROUP_CODECS[name](32, "stochastic")
  draws = 1024
  x = inputs(codec, (3, 96))
  x[0, :32] = codec_oracles.signed_like(codec, np.geomspace(1e-9, 1, 32))
  x[1, 32:64] = x[1, 32]
  x[2, 64:96] *= np.arange(32) == 5

  def mean_and_encoded(step):
    encoded = codec.encode(jnp.asarray(x), noise_like(x, step))
    return codec.decode(encoded)

  decoded = jax.lax.map(
    jax.jit(mean_and_encoded), jnp.arange(draws), batch_size=64
  )
  decoded = np.asarray(decoded, np.float64)
  gap = codec_oracles.gap(codec, x)
  error = np.divide(decoded - x, gap, out=np.zeros_like(decoded), where=gap > 0)
  error *= np.sign(x)
  assert np.max(np.abs(error)) < 1 + 1e-3
  # In f32, the value and its neighbours are off by up to 2^-17 of a gap,
  # and the image by up to 2^-14 of a step.
  rest = 2**-17 + 2**-14
  assert np.max(np.abs(error.mean(0))) < 6 * 0.5 / np.sqrt(draws) + rest
  assert abs(error.mean()) < 5 * 0.5 / np.sqrt(error.size) + rest


@pytest.mark.parametrize("name", GROUP_CODECS)
def test_repeated_encoding_of_the_same_values_does_not_drift(name):
  codec = GROUP_CODECS[name](group_size=128)
  x = inputs(codec, (4, 1024))

  @jax.jit
  def repeat(x):
    def again(x, step):
      noise = noise_like(x, step) if codec.needs_noise else None
      return codec.decode(codec.encode(x, noise)), None

    return jax.lax.scan(again, x, jnp.arange(100))[0]

  ratio = np.asarray(repeat(jnp.asarray(x))) / x
  # After the first encoding, a decoded value does not change, unless the power
  # of its group changes. So most errors are those of the first encoding, which
  # are at most 2^-4 of the value. Their median is close to zero.
  low, median, high = np.percentile(ratio, [10, 50, 90])
  assert abs(median - 1) < 2**-7
  assert 1 - 2**-4 < low and high < 1 + 2**-4


@pytest.mark.parametrize("name", GROUP_CODECS)
def test_codec_under_jit_agrees_with_eager(name):
  codec, x, noise, jitted, decoded = trained(name)
  eager = codec.encode(jnp.asarray(x), noise)
  np.testing.assert_array_equal(eager.amax, jitted.amax)
  same_range = np.asarray(eager.range) == np.asarray(jitted.range)
  assert np.mean(same_range) >= 0.9999
  apart = agreeing(codec, eager.codes, jitted.codes, same_range)
  assert np.mean(apart == 0) >= 0.99999 and np.max(apart) <= 1
  eagerly_decoded = codec.decode(jitted)
  if name.startswith("fp8"):  # This codec decodes by a multiplication.
    np.testing.assert_array_equal(eagerly_decoded, decoded)
  # XLA may merge log8's 1 / steps with the ln 2 of exp2, which changes an ulp.
  np.testing.assert_allclose(eagerly_decoded, decoded, rtol=2**-22)


@functools.partial(comparing.jit, static_argnames="group_size")
def all_roundtrips(x, noise, group_size):
  """Returns (encoded, decoded) by codec, from one program for all codecs."""
  out = {}
  for name, build in GROUP_CODECS.items():
    codec = build(group_size=group_size)
    moment = jnp.abs(x) if codec_oracles.is_unsigned(codec) else x
    encoded = codec.encode(moment, noise if codec.needs_noise else None)
    out[name] = encoded, codec.decode(encoded)
  return out


@hypothesis.given(
  x=hnp.arrays(
    np.float32,
    (2, 2, 9),
    elements=st.one_of(
      st.sampled_from([0.0, 1.0, 2.0**-126, 1e-38, 1e38]),
      st.floats(2.0**-126, 2.0**126, width=32),
    ),
  ),
  # Include a short last group, and a group longer than the row.
  group_size=st.sampled_from([4, 128]),
  signed=st.booleans(),
)
def test_error_of_any_finite_moment_is_within_the_bound(x, group_size, signed):
  if signed:
    x = (x * (-1.0) ** np.arange(x.shape[-1])).astype(np.float32)
  for name, (encoded, decoded) in all_roundtrips(
    jnp.asarray(x), noise_like(x), group_size
  ).items():
    codec = GROUP_CODECS[name](group_size=group_size)
    moment = np.abs(x) if codec_oracles.is_unsigned(codec) else x
    bound = codec_oracles.error_bound(codec, moment, encoded)
    decoded = np.asarray(decoded, np.float64)
    assert np.all(np.isfinite(decoded)), name
    assert np.all(np.abs(decoded - moment) <= bound), name


def test_negative_nan_makes_amax_nan():
  # XLA drops the abs() of a square, so the NaN keeps its sign.
  x = np.ones((2, 128), np.float32)
  x[0, 5] = np.uint32(0xFFC00000).view(np.float32)
  found = jax.jit(lambda x: finite_amax(magnitude_of(x * x)))(x)
  np.testing.assert_array_equal(found, [np.nan, 1])
