# SPDX-License-Identifier: Apache-2.0
"""Tests matmuls with block scales, on meshes of eight devices."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import MLP
from tests.comparing import assert_close, jit
from tests.layers.mesh.test_rule import (
  build,
  make_mesh,
  on_mesh,
  place,
  value_and_gradients,
)

# Over a (4, 2, 1) mesh, these sizes split into whole tiles and blocks.
B, T, D, F = 8, 128, 256, 256
RECIPES = {
  cache: recipes.fp8_block(weight_cache=cache)
  for cache in ("scale", "codes", "none")
}


def make(recipe):
  how = dict(recipe=recipe, dtype=jnp.float32, rngs=nnx.Rngs(0))
  return MLP(D, F, **how)


@pytest.mark.slow
@pytest.mark.parametrize("cache", RECIPES)
def test_fsdp_matches_one_device(cache):
  recipe = RECIPES[cache]
  x, dy = jax.random.normal(jax.random.key(0), (2, B, T, D))
  f, params = build(make, recipe)
  wanted = jit(value_and_gradients(f))(params, x, dy)
  f, _ = build(make, on_mesh(recipe))
  mesh = make_mesh((4, 2, 1))
  with jax.set_mesh(mesh):
    found = jit(value_and_gradients(f))(*place(mesh, params, x, dy))
  # Only the summation order differs. A sum over 1024 tokens has a relative
  # error of up to 1024 * 2^-24 = 6e-5.
  assert_close(found, wanted, 6e-5)


@pytest.mark.parametrize(
  "sizes, words",
  [
    ((2, 2, 2), "needs one device along the tensor axis, got 2"),
    ((1, 8, 1), "whole tiles of 128 rows of a weight, got 32"),
  ],
)
def test_tensor_axis_and_split_tiles_are_refused(sizes, words):
  f, params = build(make, on_mesh(RECIPES["none"]))
  x = jax.ShapeDtypeStruct((B, T, D), jnp.float32)
  with jax.set_mesh(make_mesh(sizes)), pytest.raises(ValueError, match=words):
    jax.eval_shape(f, params, x)
