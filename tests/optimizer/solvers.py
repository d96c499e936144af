# SPDX-License-Identifier: Apache-2.0
"""Provides one optimizer per codec; even leaves of a few values are encoded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import codecs
from coat_jax.optax_coat import coat_adamw
from studies import race_codecs
from tests.matrices import quick

CODECS = {
  "coat": codecs.coat(4),
  "coat_e5m2": codecs.coat(4, second="e5m2"),
  "coat_nearest": codecs.coat(4, rounding="nearest"),
  "coat_e8m0": codecs.coat_e8m0(4),
  "log8": codecs.log8(4),
  "fp8": codecs.fp8(4),
  "log4": race_codecs.log4(4),
  "bfloat16": codecs.bfloat16(),
  "float32": codecs.float32(),
}

# One codec for each layout of a state: with f32 and uint8 statistics, with only
# uint8 statistics, with one statistic, with none, and with 4-bit codes.
LAYOUTS = ("coat", "log8", "fp8", "float32", "log4")
every_codec = pytest.mark.parametrize(
  "name", quick(2, [*LAYOUTS, *sorted(CODECS.keys() - {*LAYOUTS})])
)


def quantize_mask(path, leaf):
  return leaf.ndim > 0 and "f32" not in path


@functools.cache  # With the same object, jit compiles only once.
def make(name, learning_rate=1e-2, **kwargs):
  kwargs = {"codec": CODECS[name], "quantize_mask": quantize_mask} | kwargs
  return coat_adamw(learning_rate, **kwargs)


def types(state):
  return jax.tree.map(jax.typeof, state)


def tree(seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), dtype)

  return {"layer": {"w": normal(2, 3, 10), "f32": normal(6)}, "x": normal()}
