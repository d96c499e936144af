# SPDX-License-Identifier: Apache-2.0
"""Tests layers in each number format that a recipe can select."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import MLP, Attention
from coat_jax.numerics.formats import E4M3, E5M2, INT8
from coat_jax.recipes import Formats
from tests.matrices import quick

BLOCKS = {
  "gated_mlp": lambda recipe, rngs: MLP(64, 96, recipe=recipe, rngs=rngs),
  "ungated_mlp": lambda recipe, rngs: MLP(
    64, 96, activation="gelu_tanh", gated=False, recipe=recipe, rngs=rngs
  ),
  "attention": lambda recipe, rngs: Attention(64, 2, recipe=recipe, rngs=rngs),
}


def in_formats(formats):
  recipe = recipes.coat(implementation="xla", attention="fp8")
  return dataclasses.replace(recipe, formats=formats)


def value_and_gradients(block, recipe):
  module = BLOCKS[block](recipe, nnx.Rngs(0))
  graph, params = nnx.split(module)
  x = jax.random.normal(jax.random.key(1), (2, 16, 64), jnp.bfloat16)
  g = jax.random.normal(jax.random.key(2), x.shape, jnp.bfloat16)
  y, vjp = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
  return y - x, vjp(g), {leaf.dtype for leaf in jax.tree.leaves(vjp)}


@pytest.mark.parametrize("block", quick(1, BLOCKS))
@pytest.mark.parametrize(
  "formats",
  quick(
    0,
    [
      Formats(values=INT8, gradients=INT8),
      Formats(values=E5M2),
      Formats(gradients=E4M3),
      Formats(),
    ],
  ),
  ids=["int8", "e5m2", "e4m3", "default"],
)
def test_block_in_each_format_is_close_to_bf16(block, formats):
  y, gradients, saved = value_and_gradients(block, in_formats(formats))
  assert jnp.dtype(formats.values) in saved
  one_byte = {dtype for dtype in saved if dtype.itemsize == 1}
  assert one_byte == {jnp.dtype(formats.values)}
  exact = value_and_gradients(block, recipes.bf16())[:2]
  # E5M2 has two mantissa bits, so each rounding has a relative error of up to
  # 1/8, and several roundings follow one another.
  most = 0.25 if formats.values == E5M2 else 0.12
  pairs = zip(*map(jax.tree.leaves, ((y, gradients), exact)), strict=True)
  for got, want in pairs:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert np.linalg.norm(got - want) < most * np.linalg.norm(want)
