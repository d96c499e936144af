# SPDX-License-Identifier: Apache-2.0
"""A model with three stacked layers of width 4, which compiles quickly."""

import jax
import jax.numpy as jnp

LAYERS, WIDTH = 3, 4


def initial():
  keys = jax.random.split(jax.random.key(0), 2)
  return {
    "embedding": jax.random.normal(keys[0], (WIDTH,)),
    "layers": {"w": jax.random.normal(keys[1], (LAYERS, WIDTH))},
  }


def layer(params, x):
  return x + jnp.tanh(x * params["w"])


def after(outer, x):
  return jnp.sum((x - 2) ** 2)


def loss_fn(params, after=after):
  x = params["embedding"]
  for i in range(LAYERS):
    x = layer({"w": params["layers"]["w"][i]}, x)
  return after(None, x)
