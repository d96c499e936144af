# SPDX-License-Identifier: Apache-2.0
"""Checks that generating a token copies no weights and no caches."""

import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import Decoder, ModelConfig
from coat_jax.models import generate as generate_tokens
from coat_jax.models.cache import KVCache
from coat_jax.models.sampling import make_sampling
from tests.aot.compiling import compile_for_h200, instructions

pytestmark = pytest.mark.aot

# `coat_jax.models.generate` is a function, which hides the module.
MODULE = sys.modules[generate_tokens.__module__]
CONFIG = ModelConfig(
  family="llama",
  num_layers=2,
  d_model=512,
  d_ff=1024,
  num_heads=8,
  num_kv_heads=2,
  vocab_size=1024,
)
BATCH, ROOM = 8, 256


def test_generating_a_token_copies_no_weights_or_caches():
  model = nnx.eval_shape(
    lambda: Decoder(CONFIG, recipes.coat(), rngs=nnx.Rngs(0))
  )
  graph, params = nnx.split(model)
  array: Any = jax.ShapeDtypeStruct
  each = array((BATCH, ROOM, 2, 64), jnp.bfloat16)
  counts = array((BATCH,), jnp.int32)
  cache = KVCache((each,) * 2, (each,) * 2, counts, array((), jnp.int32))

  def decode(params, first, cache, keys, is_row, stops, most):
    sampling = make_sampling(0.0, None, None)
    options = MODULE._Options(sampling, keys, is_row, stops, most)
    return MODULE._decode.__wrapped__(graph, params, first, cache, options)

  compiled = compile_for_h200(
    decode,
    params,
    counts,
    cache,
    jax.eval_shape(lambda: MODULE._keys(0, BATCH)),
    array((BATCH,), jnp.bool),
    array((0,), jnp.int32),
    array((), jnp.int32),
    donate=(2,),
  )
  smallest = math.prod((CONFIG.d_model, CONFIG.d_model))
  found = [
    x
    for x in instructions(compiled)
    if "region" in x.computation
    and x.opcode in ("fusion", "copy", "slice", "dynamic-slice", "transpose")
    and elements(x.shape) >= smallest
    # Writing a token into its slot of a cache does not count as a copy.
    and "dynamic_update_slice" not in x.name
  ]
  assert not found, found


def elements(shape):
  """Returns the size of the largest array in an HLO shape or tuple."""
  sizes = re.findall(r"\[([\d,]+)\]", shape)
  return max((math.prod(map(int, x.split(","))) for x in sizes), default=1)
