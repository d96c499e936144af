# SPDX-License-Identifier: Apache-2.0
"""Tests constructors of codecs: dtypes, equality, and refused arguments."""

import doctest

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from coat_jax import codecs
from coat_jax.codecs.integers import LogUniform
from tests import cases


@pytest.mark.parametrize(
  "codec, mu, nu",
  [
    (codecs.coat(), ("float8_e4m3fn", "f4", "u1"), None),
    (
      codecs.coat(second="e5m2"),
      ("float8_e4m3fn", "f4", "u1"),
      ("float8_e5m2", "f4", "u1"),
    ),
    (codecs.coat_e8m0(), ("float8_e4m3fn", "u1", "u1"), None),
    (codecs.log8(), ("i1", "u1", "u1"), ("u1", "u1", "u1")),
    (codecs.fp8(), ("float8_e4m3fn", "f4", None), None),
    (codecs.int8(), ("i1", "f4", None), ("u1", "f4", None)),
    (codecs.bfloat16(), ("bfloat16", None, None), None),
    (codecs.float32(), ("f4", None, None), None),
  ],
  ids="coat coat_e5m2 coat_e8m0 log8 fp8 int8 bfloat16 float32".split(),
)
def test_encoded_moments_have_the_documented_dtypes_and_shapes(codec, mu, nu):
  for shape in ((3, 300), (2, 3, 128), (5,)):
    groups = (*shape[:-1], -(-shape[-1] // 128))
    for group, dtypes in ((codec.mu, mu), (codec.nu, nu or mu)):
      x = jax.ShapeDtypeStruct(shape, jnp.float32)
      encoded = jax.eval_shape(
        group.encode, x, x if group.needs_noise else None
      )
      assert encoded.codes.shape == shape
      assert encoded.codes.dtype == jnp.dtype(dtypes[0])
      for statistic, dtype in zip(encoded[1:], dtypes[1:], strict=True):
        # A statistic that the codec does not store is a scalar.
        assert statistic.shape == (() if dtype is None else groups)
        assert dtype is None or statistic.dtype == jnp.dtype(dtype)
      decoded = jax.eval_shape(group.decode, encoded)
      assert decoded.shape == shape and decoded.dtype == jnp.float32


def test_plain_codecs_only_round_to_their_dtype():
  x = jnp.asarray(cases.moments((4, 33))[0])
  for codec, dtype in (
    (codecs.float32(), jnp.float32),
    (codecs.bfloat16(), jnp.bfloat16),
  ):
    for group in (codec.mu, codec.nu):
      assert not group.needs_noise
      decoded = group.decode(group.encode(x, None))
      np.testing.assert_array_equal(decoded, x.astype(dtype).astype("f4"))


def test_codecs_are_frozen_hashable_and_comparable():
  for build in (
    codecs.coat,
    codecs.coat_e8m0,
    codecs.log8,
    codecs.fp8,
    codecs.int8,
  ):
    codec = build()
    assert codec.mu.rounding == codec.nu.rounding == "stochastic"
    assert codec == build() and hash(codec) == hash(build())
    assert codec != build(group_size=64)
    assert codec.name == build.__name__
    with pytest.raises(AttributeError):
      codec.mu = codec.nu
    with pytest.raises(AttributeError):
      codec.mu.group_size = 64
  assert codecs.coat() != codecs.coat(rounding="nearest")
  assert codecs.coat() != codecs.coat(second="e5m2")
  assert codecs.coat(second="e5m2").mu == codecs.coat().mu


def test_log8_refuses_nearest_but_its_group_codec_accepts_it():
  with pytest.raises(ValueError, match="'nearest', which freezes"):
    codecs.log8(rounding="nearest")
  x = jnp.asarray(np.geomspace(1e-6, 1, 64, dtype=np.float32)[None])
  codec = LogUniform(64, "nearest", signed=False)
  roundtrip = jax.jit(lambda x: codec.decode(codec.encode(x, None)))
  assert np.all(roundtrip(x) > 0)


@pytest.mark.parametrize(
  "build",
  [codecs.coat, codecs.coat_e8m0, codecs.log8, codecs.fp8, codecs.int8],
)
def test_constructors_refuse_invalid_arguments(build, monkeypatch):
  with pytest.raises(ValueError, match="codecs: group_size must be at least 1"):
    build(group_size=0)
  # In tests, jaxtyping would raise its own error first.
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
  with pytest.raises(ValueError, match="codecs: rounding must be .* 'up'"):
    build(rounding="up")
  if build.__name__ == "coat":
    with pytest.raises(ValueError, match="second must be .* got 'e3m4'"):
      build(second="e3m4")


def test_encode_takes_noise_only_for_stochastic_rounding():
  x = jnp.ones((1, 4))
  with pytest.raises(ValueError, match="'stochastic' needs noise, got None"):
    codecs.coat().mu.encode(x, None)
  with pytest.raises(ValueError, match="'nearest' takes no noise"):
    codecs.coat(rounding="nearest").mu.encode(x, x)


def test_codec_examples_run():
  for module in (codecs, codecs.registry):
    assert not doctest.testmod(module).failed
