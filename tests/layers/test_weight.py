# SPDX-License-Identifier: Apache-2.0
"""Tests weight caches: they change no result, and contain current weights."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import (
  MLP,
  Attention,
  Linear,
  MoE,
  cache_weight,
  with_weight_cache,
)
from tests.comparing import assert_same_bits, jit
from tests.matrices import quick

CACHES = ("none", "scale", "codes")


class Layer(nnx.Module):
  def __init__(self, recipe, *, rngs):
    self.attention = Attention(32, 2, recipe=recipe, rngs=rngs)
    self.mlp = MLP(32, 48, recipe=recipe, rngs=rngs)
    self.moe = MoE(32, 16, 4, 2, recipe=recipe, rngs=rngs)

  def __call__(self, x):
    return self.moe(self.mlp(self.attention(x)))[0]


fp8_experts = functools.partial(recipes.coat, experts="fp8")


def stack(recipe, depth=2):
  """Returns (run, params), where run(params, x) scans over layers."""

  @nnx.jit
  @nnx.split_rngs(splits=depth)
  @nnx.vmap
  def build(rngs):
    return Layer(recipe, rngs=rngs)

  graph, params = nnx.split(build(nnx.Rngs(0)))

  def run(params, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
      return layer(x)

    return forward(x, with_weight_cache(nnx.merge(graph, params)))

  return run, params


@pytest.mark.parametrize(
  "preset, cached",
  quick(
    1,
    itertools.product(
      [fp8_experts, recipes.coat, recipes.fp8_linear], ["codes", "scale"]
    ),
  ),
)
def test_results_with_a_cache_match_bit_for_bit(preset, cached):
  x = jax.random.normal(jax.random.key(1), (2, 8, 32), jnp.bfloat16)
  results = []
  for cache in ("none", cached):
    run, params = stack(preset(weight_cache=cache))

    def loss(params, x, run=run):
      return jnp.sum(run(params, x).astype(jnp.float32) ** 2)

    results.append(jit(jax.value_and_grad(loss, (0, 1)))(params, x))
  assert_same_bits(*results)


def test_each_cache_contains_the_expected_arrays():
  w = jax.random.normal(jax.random.key(0), (16, 2, 24))
  assert cache_weight(w, recipes.coat(weight_cache="none")) is None
  scale = cache_weight(w, recipes.coat(weight_cache="scale"))
  assert scale.rows is None and scale.columns is None
  codes = cache_weight(w, recipes.coat(weight_cache="codes"))
  assert codes.rows.shape == (16, 48) and codes.columns.shape == (48, 16)
  assert_same_bits(codes.scale, scale.scale)


@pytest.mark.parametrize("cached", ["scale", "codes"])
def test_each_layer_of_a_stack_has_its_own_scale(cached):
  recipe = recipes.coat(weight_cache=cached)

  @nnx.split_rngs(splits=3)
  @nnx.vmap
  def build(rngs):
    return Linear(16, 24, recipe=recipe, rngs=rngs)

  linear = build(nnx.Rngs(0))
  sizes = jnp.array([1e-3, 1.0, 50.0])
  linear.kernel[...] = linear.kernel[...] * sizes[:, None, None]
  cache = with_weight_cache(linear).cache
  amax = np.max(np.abs(np.asarray(linear.kernel[...])), axis=(1, 2))
  # The scale maps the largest weight to E4M3's largest value, and is rounded
  # once.
  np.testing.assert_allclose(np.ravel(cache.scale), amax / 448, rtol=2**-22)
  if cached == "codes":
    codes = np.abs(np.asarray(cache.rows, "float32")).reshape(3, -1)
    np.testing.assert_array_equal(codes.max(axis=1), 448)


@pytest.mark.parametrize("cached", ["scale", "codes"])
def test_each_expert_of_each_layer_has_its_own_scale(cached):
  recipe = fp8_experts(weight_cache=cached)

  @nnx.split_rngs(splits=2)
  @nnx.vmap
  def build(rngs):
    return MoE(16, 24, 3, 1, recipe=recipe, rngs=rngs)

  experts = build(nnx.Rngs(0))
  sizes = jnp.array([[1e-3, 1.0, 50.0], [2.0, 1e-2, 7.0]])
  experts.down[...] = experts.down[...] * sizes[..., None, None]
  cache = with_weight_cache(experts).down_cache
  amax = np.max(np.abs(np.asarray(experts.down[...])), axis=(2, 3))
  np.testing.assert_allclose(cache.scale, amax / 448, rtol=2**-22)
  if cached == "codes":
    assert_same_bits(cache.columns, jnp.swapaxes(cache.rows, 2, 3))
    codes = np.abs(np.asarray(cache.rows, "float32"))
    np.testing.assert_array_equal(codes.max(axis=(2, 3)), 448)


def test_each_layer_caches_what_its_own_recipe_selects():
  """Mixes recipes that would misread each other's scales."""
  layers = nnx.List(
    Linear(32, 32, recipe=recipe, rngs=nnx.Rngs(i))
    for i, recipe in enumerate(
      (
        recipes.int8(),
        recipes.coat(weight_cache="codes"),
        recipes.fp8_block(),
        recipes.bf16(),
        recipes.coat(weight_cache="none"),
      )
    )
  )
  x = jax.random.normal(jax.random.key(1), (4, 32), jnp.bfloat16)
  cached = with_weight_cache(layers)
  assert [layer.cache is None for layer in cached] == 3 * [False] + 2 * [True]

  @nnx.jit
  def outputs(layers, x):
    return [layer(x) for layer in layers]

  assert_same_bits(outputs(cached, x), outputs(layers, x))


@pytest.mark.parametrize(
  "layer, sizes", [(Linear, (32, 32)), (MoE, (32, 16, 4, 2))]
)
def test_matmuls_read_cached_codes_instead_of_the_weights(layer, sizes):
  recipe = fp8_experts(weight_cache="codes")
  layer = layer(*sizes, recipe=recipe, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (4, 32), jnp.bfloat16)
  cached = with_weight_cache(layer)
  run = nnx.jit(lambda layer, x: layer(x))
  want = run(cached, x)
  for name in ("kernel", "gate_up", "down"):
    if hasattr(layer, name):
      param = getattr(cached, name)
      param[...] = jnp.full_like(param[...], jnp.nan)
  assert_same_bits(run(cached, x), want)


def test_original_module_gets_no_cache():
  for cache in CACHES:
    recipe = recipes.coat(weight_cache=cache)
    module = Linear(16, 24, recipe=recipe, rngs=nnx.Rngs(0))
    copy = with_weight_cache(module)
    assert module.cache is None
    assert (copy.cache is None) == (cache == "none")
    # The weight is the parameter itself, not a copy.
    assert copy.kernel[...] is module.kernel[...]
  module = Linear(16, 24, recipe=recipes.bf16(), rngs=nnx.Rngs(0))
  assert with_weight_cache(module).cache is None


@pytest.mark.slow
def test_new_cache_follows_a_changed_weight():
  recipe = recipes.coat(weight_cache="codes")
  module = Linear(16, 24, recipe=recipe, use_bias=False, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (4, 16), jnp.bfloat16)
  before = with_weight_cache(module)(x)
  module.kernel[...] = 2 * module.kernel[...]
  assert_same_bits(with_weight_cache(module)(x), 2 * before)
