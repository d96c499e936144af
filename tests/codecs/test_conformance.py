# SPDX-License-Identifier: Apache-2.0
"""Checks properties that every codec must have, including users' own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import codecs
from coat_jax.codecs.factored import Factored
from coat_jax.codecs.group import GroupCodec
from coat_jax.numerics import stochastic
from tests import cases
from tests.comparing import assert_same_bits

NAMES = (
  *codecs.names(),
  "tests.codecs.own_codec:make",
  *(f"studies.race_codecs:{name}" for name in ("companded", "log4", "e2m1")),
)
SIZE = 16


def build(name, options):
  """Builds a variant of a codec, with groups of 16 if it has groups."""
  sizes = {"group_size": SIZE} if "group_size" in codecs.options(name) else {}
  return codecs.build(name, **options, **sizes)


VARIANTS = {
  "-".join([name.rpartition(":")[2], *map(str, options.values())]): (
    name,
    options,
  )
  for name in NAMES
  for options in codecs.variants(name)
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def noise_like(x, step=0):
  words = stochastic.random_words(stochastic.leaf_key(0, step, 0), x.shape)
  return stochastic.uniform(words)


def roundtrip(group, x, step=0):
  noise = noise_like(x, step) if group.needs_noise else None
  encoded = jax.jit(group.encode)(x, noise)
  return encoded, np.asarray(jax.jit(group.decode)(encoded))


def moments():
  """Returns (mu, nu) with degenerate groups; rows end in half a group."""
  mu, nu = cases.moments((4, 2 * SIZE + SIZE // 2))
  finite = np.stack(list(cases.finite_groups(mu.shape[-1]).values()))
  return np.concatenate([mu, finite]), np.concatenate([nu, np.abs(finite)])


@every_variant
def test_codec_is_frozen_hashable_and_follows_the_protocol(variant):
  codec = build(*VARIANTS[variant])
  assert codec == build(*VARIANTS[variant])
  assert hash(codec) == hash(build(*VARIANTS[variant]))
  assert codec.groups == (codec.mu, codec.nu)
  for group in codec.groups:
    assert isinstance(group, GroupCodec)
    with pytest.raises(AttributeError):
      group.needs_noise = True


@every_variant
def test_encoded_and_decoded_moments_have_the_expected_shapes(variant):
  for group in build(*VARIANTS[variant]).groups:
    for shape in ((3, 40), (2, 3, 16), (5,)):
      x = jax.ShapeDtypeStruct(shape, jnp.float32)
      noise = x if group.needs_noise else None
      encoded = jax.eval_shape(group.encode, x, noise)
      assert encoded.codes.shape == shape
      groups = (*shape[:-1], -(-shape[-1] // SIZE))
      for statistic in encoded[1:]:
        assert statistic.shape in ((), groups)
      decoded = jax.eval_shape(group.decode, encoded)
      assert decoded.shape == shape and decoded.dtype == jnp.float32


@every_variant
def test_decoded_values_are_finite_and_keep_signs_and_zeros(variant):
  codec = build(*VARIANTS[variant])
  for group, x in zip(codec.groups, moments(), strict=True):
    _, decoded = roundtrip(group, jnp.asarray(x))
    assert np.all(np.isfinite(decoded))
    assert np.all((x == 0) | (decoded == 0) | (np.sign(decoded) == np.sign(x)))
    # A factored codec decodes means, so a zero may become another value.
    assert group == Factored() or not np.any(decoded[x == 0])


@every_variant
def test_zeros_have_the_same_codes_in_all_groups_whatever_the_noise(variant):
  zeros = jnp.zeros((4, 3 * SIZE))
  for group in build(*VARIANTS[variant]).groups:
    encoded, _ = roundtrip(group, zeros)
    for stored in encoded:
      if stored.ndim:
        first = stored[:1, : stored.shape[-1] // 3]
        assert_same_bits(stored, jnp.tile(first, (4, 3)))


@every_variant
def test_nan_or_infinity_makes_only_its_group_nan(variant):
  codec = build(*VARIANTS[variant])
  for group, x in zip(codec.groups, moments(), strict=True):
    if not hasattr(group, "group_size"):
      continue
    clean, _ = roundtrip(group, jnp.asarray(x))
    bad = np.zeros(x.shape, bool)
    bad[:3, SIZE : 2 * SIZE] = True
    x = x.copy()
    x[:3, SIZE + 3] = (np.nan, np.inf, np.inf)
    encoded, decoded = roundtrip(group, jnp.asarray(x))
    assert np.all(np.isnan(decoded[bad]))
    same = np.asarray(encoded.codes).view(np.uint8)[~bad]
    np.testing.assert_array_equal(
      same, np.asarray(clean.codes).view(np.uint8)[~bad]
    )


@every_variant
def test_mean_error_of_stochastic_rounding_is_zero(variant):
  codec = build(*VARIANTS[variant])
  draws = 64
  for group, x in zip(codec.groups, cases.moments((8, 64)), strict=True):
    if not group.needs_noise:
      continue

    @jax.jit
    def error(step, group=group, x=x):
      return group.decode(group.encode(jnp.asarray(x), noise_like(x, step))) - x

    errors = np.stack([np.asarray(error(step)) for step in range(draws)])
    # Errors are shares of each group's largest value. The bound is 5 standard
    # deviations of a mean of 32768 independent errors.
    amax = np.abs(x.reshape(8, -1, SIZE)).max(-1).repeat(SIZE, -1)
    errors = np.float64(errors) * np.sign(x) / amax
    assert errors.std() > 1e-3
    assert abs(errors.mean()) < 5 * errors.std() / np.sqrt(errors.size)
