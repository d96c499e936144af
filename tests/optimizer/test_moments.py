# SPDX-License-Identifier: Apache-2.0
"""Tests which codec and which random words encode the moments of a tree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from coat_jax import coat_lion, codecs
from coat_jax.codecs.group import Plain
from coat_jax.numerics import stochastic
from coat_jax.numerics.stochastic import LeafPart
from coat_jax.optax_coat import coat_adamw, scale_by_coat_adam
from coat_jax.optimizer.masks import is_encoded
from coat_jax.optimizer.state import moments_in
from coat_jax.optimizer.step import decode, encode, pair_key
from tests.comparing import assert_same_bits


def test_only_init_calls_quantize_mask():
  asked = []

  def mask(path, leaf):
    asked.append((path, leaf.shape))
    return path == "layer/bias"

  params = {"layer": {"bias": jnp.ones(20), "kernel": jnp.ones((64, 64))}}
  solver = scale_by_coat_adam(quantize_mask=mask)
  state = solver.init(params)
  assert state.mu.codes["layer"]["bias"].dtype == jnp.float8_e4m3fn
  assert state.mu.codes["layer"]["kernel"].dtype == jnp.float32
  assert asked == [("layer/bias", (20,)), ("layer/kernel", (64, 64))]
  _, state = solver.update(params, state)
  assert len(asked) == 2
  assert state.mu.codes["layer"]["kernel"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_])
def test_leaves_that_are_not_floating_are_refused(dtype):
  params = {"ok": jnp.ones(3), "deep": [jnp.ones((64, 64), dtype)]}
  with pytest.raises(
    TypeError, match=f"{jnp.dtype(dtype)} at 'deep/0'.*masked"
  ):
    coat_adamw(1e-3).init(params)
  # The remedy in the message works.
  mask = {"ok": True, "deep": [False]}
  optax.masked(coat_adamw(1e-3), mask).init(params)


def test_optimizer_refuses_wrong_arguments():
  params = {"w": jnp.ones((64, 128))}
  with pytest.raises(ValueError, match="scalar at 'x'"):
    scale_by_coat_adam(quantize_mask=lambda *_: True).init({"x": jnp.ones(())})
  state = scale_by_coat_adam().init(params)
  for codec in (
    codecs.log8(),
    codecs.coat(64),
    codecs.fp8(),
    codecs.bfloat16(),
  ):
    with pytest.raises(ValueError, match=f"codec '{codec.name}', which"):
      scale_by_coat_adam(codec=codec).update(params, state)
  with pytest.raises(ValueError, match=r"\(64, 32\) for \(64, 128\) at 'w'"):
    scale_by_coat_adam().update({"w": jnp.ones((64, 32))}, state)
  with pytest.raises(ValueError, match="got 0 leaves for 1"):
    scale_by_coat_adam().update({"w": None}, state)


def values(count, shape=(4, 256)):
  keys = jax.random.split(jax.random.key(0), count)
  return tuple(jnp.abs(jax.random.normal(key, shape)) for key in keys)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_moment_rounds_with_different_words(count):
  codec = codecs.coat().nu
  key = stochastic.leaf_key(1, 2, 3)
  x = values(count)
  stored = encode((codec,) * count, x, LeafPart(key))
  # A resumed run must use the same random words. The first two moments use
  # words from the leaf's key, and each further pair of moments another key.
  for i, encoded in enumerate(stored):
    pair = (
      key
      if i < 2
      else stochastic.mix(key ^ jnp.uint32(i // 2 * stochastic.GOLDEN % 2**32))
    )
    words = stochastic.random_words(pair, x[i].shape)
    words = stochastic.next_words(words) if i % 2 else words
    noise = stochastic.uniform(words)
    assert_same_bits(encoded, jax.jit(codec.encode)(x[i], noise))
  decoded = decode((codec,) * count, stored)
  assert len(decoded) == count
  for a, b in zip(decoded, x, strict=True):
    # The codec expands a group's smallest magnitude to 2.3 subnormal steps, so
    # rounding has a relative error of at most 1 / 2.3. For nearly all others,
    # the error is at most 1 / 8. Decoding decreases these errors, because k is
    # above 1.
    np.testing.assert_allclose(a, b, rtol=1 / 2.3)
    assert np.quantile(np.abs(a - b) / np.abs(b), 0.99) < 1 / 8


def test_keys_of_pairs_of_moments_are_all_different():
  key = stochastic.leaf_key(0, 1, 0)
  keys = {int(pair_key(key, pair)) for pair in range(1000)}
  assert len(keys) == 1000
  assert int(pair_key(key, 0)) == int(key)


def test_rounding_to_nearest_uses_no_random_words():
  nearest, stochastic_ = codecs.coat(rounding="nearest").nu, codecs.coat().nu
  x = values(3)
  groups = (nearest, stochastic_, Plain("bfloat16"))
  stored = encode(groups, x, LeafPart(jnp.uint32(7)))
  words = stochastic.random_words(jnp.uint32(7), x[0].shape)
  noise = (None, stochastic.uniform(stochastic.next_words(words)), None)
  for group, encoded, value, half in zip(groups, stored, x, noise, strict=True):
    assert_same_bits(encoded, jax.jit(group.encode)(value, half))
  text = str(
    jax.make_jaxpr(lambda x, key: encode((nearest,) * 3, x, LeafPart(key)))(
      x, jnp.uint32(7)
    )
  )
  assert "random_bits" not in text and "iota" not in text


@pytest.mark.parametrize("make", [coat_adamw, coat_lion])
def test_moments_are_found_in_any_tree(make):
  params = {"w": jnp.ones((64, 128)), "b": jnp.ones(3)}
  state = make(1e-3, codec=codecs.log8()).init(params)
  nested = {"x": [state, (jnp.ones(2), optax.adam(1e-3).init(params))]}
  found = moments_in(nested)
  assert all(a is b for a, b in zip(found, state[0][1:], strict=True))
  first, second = found[0].leaves()
  assert not is_encoded(first) and first.amax.shape == ()
  assert is_encoded(second) and second.amax.shape == (64, 1)
  assert found[0].codec_of(first) == Plain("float32")
  assert found[0].codec_of(second) == codecs.log8().mu
  again = found[0].replace(found[0].leaves())
  assert_same_bits(again, found[0])
  optimizer = nnx.Optimizer(
    nnx.Linear(64, 64, rngs=nnx.Rngs(0)), make(1e-3), wrt=nnx.Param
  )
  assert len(moments_in(optimizer.opt_state)) == len(found)
