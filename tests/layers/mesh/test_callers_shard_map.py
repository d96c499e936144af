# SPDX-License-Identifier: Apache-2.0
"""Layers inside a `jax.shard_map` that the caller wrote."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import NamedSharding

from coat_jax import recipe as recipes
from coat_jax.layers import linear


def test_replicated_weights_in_a_callers_shard_map_get_the_sum_of_gradients():
  keys = jax.random.split(jax.random.key(0), 2)
  x = jax.random.normal(keys[0], (8, 16, 64), jnp.bfloat16)
  w = jax.random.normal(keys[1], (64, 128))
  mesh = jax.make_mesh((8,), ("data",))

  def loss(w, x):
    return jnp.sum(linear(x, w, recipe=recipes.coat()).astype(jnp.float32))

  on_devices = jax.shard_map(
    jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
  )
  got = jax.jit(on_devices)(
    w, jax.device_put(x, NamedSharding(mesh, P("data")))
  )
  # Scales are those of whole arrays, so only the order of f32 sums differs.
  wanted = jax.jit(jax.grad(loss))(w, x)
  np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
