# SPDX-License-Identifier: Apache-2.0
"""Tests that `state_shardings` finds the codec of the optimizer."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P
from jax.sharding import NamedSharding

from coat_jax import coat_adamw, codecs
from coat_jax.optimizer import abstract_state, state_shardings
from tests.optimizer.test_sharding import make_mesh


def test_state_shardings_finds_the_codec_of_the_optimizer():
  params = {"w": jax.ShapeDtypeStruct((16, 1000), jnp.float32)}
  whole = {"w": NamedSharding(make_mesh(), P("fsdp"))}
  split = {"w": NamedSharding(make_mesh(), P(None, "fsdp"))}

  def make(codec):
    return coat_adamw(1e-2, codec=codec)

  def refused(init, size):
    with pytest.raises(
      ValueError, match=f"groups of {size} values, got 250 values.*'w'"
    ):
      state_shardings(init, params, split)

  state_shardings(make(codecs.log8(64)).init, params, whole)
  # 1000 values form eight groups of 125 or of 128. Only 125 divides the 250
  # values of a device.
  fits, jitted = make(codecs.log8(125)), jax.jit(make(codecs.log8()).init)
  state = abstract_state(lambda p: [fits.init(p)], params, split)[0][0]
  assert state.mu.amax["w"].sharding.spec == P(None, "fsdp")
  for _ in range(2):  # The second trace must not come from a cache.
    refused(jitted, 128)
  two = {"a": make(codecs.fp8(100)), "b": make(codecs.log8(64))}
  refused(optax.partition(two, {"w": "a"}).init, 100)
  # A state that was made without the optimizer also contains its codec.
  made = jax.eval_shape(fits.init, params)

  def elsewhere(p):
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
    like = jax.tree.map(lambda x, y: y.astype(x.dtype), zeros[0].mu.codes, p)
    return zeros[0]._replace(mu=dataclasses.replace(zeros[0].mu, codes=like))

  state_shardings(elsewhere, params, whole)
  state_shardings(elsewhere, params, split)
