# SPDX-License-Identifier: Apache-2.0
"""Tests the `fp8_block` recipe: operands, matmuls, gradients and modules."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from coat_jax import ops, recipes
from coat_jax.layers import (
  MLP,
  Attention,
  NormLinear,
  linear,
  with_weight_cache,
)
from coat_jax.numerics import qtensor
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.scaling import Blocks, PerTensor, Tiles
from coat_jax.recipes import CoatRecipe, Formats
from tests import oracles
from tests.comparing import assert_close, assert_same_bits, jit
from tests.matrices import quick

# No size is a multiple of the block size.
T, D, F, BLOCK = 150, 200, 300, 128


def scaled_case(shape, seed=0):
  """Returns random values; each row and each column has another magnitude."""
  rng = np.random.default_rng(seed)
  rows, columns = (np.exp2(rng.integers(-9, 9, size=n)) for n in shape)
  x = rng.normal(size=shape) * rows[:, None] * columns
  return x.astype(np.float32)


def quantized(x, height, width, dtype=ml_dtypes.float8_e4m3fn):
  """Quantizes per block in NumPy; returns codes, values and scales."""
  m, n = x.shape
  padded = np.pad(np.float64(x), ((0, -m % height), (0, -n % width)))
  blocks = padded.reshape(-1, height, padded.shape[1] // width, width)
  amax = np.abs(blocks).max((1, 3), keepdims=True)
  # amax / qmax = mantissa * 2^exponent, with the mantissa in [1/2, 1).
  mantissa, exponent = np.frexp(np.where(amax, amax, 1) / oracles.QMAX[dtype])
  scale = np.exp2(exponent - (mantissa == 0.5))
  scale = np.where(amax, scale, 1)
  codes = oracles.fp8_cast(blocks / scale, dtype)
  values = codes.view(dtype).astype(np.float64) * scale
  whole = lambda x: x.reshape(padded.shape)[:m, :n]  # noqa: E731
  return whole(codes), whole(values), scale[:, 0, :, 0]


def assert_is(codes, scale, x, height, width, dtype=ml_dtypes.float8_e4m3fn):
  want_codes, _, want_scale = quantized(x, height, width, dtype)
  np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), want_codes)
  np.testing.assert_array_equal(np.asarray(scale, np.float64), want_scale)


def test_operands_match_numpy():
  x, w = scaled_case((T, D)), scaled_case((D, F), seed=1)
  x[3, :BLOCK] = 0
  # With scale 2^-3, the largest E4M3 code represents 448 * 2^-3 = 56. The next
  # larger f32 value needs the scale 2^-2.
  x[4, :BLOCK] = 448 * 2.0**-3 * (np.arange(BLOCK) == 5)
  x[5, :BLOCK] = np.nextafter(np.float32(56), np.float32(99))
  operand = jit(lambda x: Blocks().quantize(x, layout="both"))(x)
  assert_is(operand.rows, operand.scale.rows, x, 1, BLOCK)
  assert_is(operand.columns, operand.scale.columns, x.T, 1, BLOCK)
  assert float(operand.scale.rows[4, 0]) == 2.0**-3
  assert float(operand.scale.rows[5, 0]) == 2.0**-2
  tiles = jit(lambda w: Tiles(E5M2).quantize(w, layout="both"))(w)
  of_tiles = BLOCK, BLOCK, ml_dtypes.float8_e5m2
  assert_is(tiles.rows, tiles.scale.rows, w, *of_tiles)
  assert_is(tiles.columns, tiles.scale.columns, w.T, *of_tiles)


def test_columns_from_saved_rows_are_quantized_from_their_values():
  x = scaled_case((T, D))
  rows = jit(Blocks().quantize)(x)
  turned = jit(Blocks().turn)(rows)
  _, values, _ = quantized(x, 1, BLOCK)
  assert_is(
    turned.columns, turned.scale.columns, np.float32(values.T), 1, BLOCK
  )
  # Quantizing again changes only values far below the largest of their block.
  _, again, scale = quantized(np.float32(values.T), 1, BLOCK)
  again, scale = again.T, np.repeat(scale, BLOCK, axis=1)[:, :T].T
  near = np.abs(values) >= 2.0**-6 * scale
  np.testing.assert_array_equal(again[near], values[near])
  assert near.mean() > 0.3


@pytest.mark.parametrize(
  "amax, scale",
  [
    (0.0, 1.0),
    (448.0, 1.0),
    (np.nextafter(np.float32(448), np.float32(449)), 2.0),
    (2.0**-126, 2.0**-126),
    (3e38, 2.0**120),
    (np.inf, np.inf),
    (np.nan, np.nan),
  ],
)
def test_scale_of_a_block_is_rounded_up_to_a_power_of_two(amax, scale):
  found = qtensor.power_of_two_scale(jnp.float32(amax), E4M3)
  np.testing.assert_array_equal(np.float32(found), np.float32(scale))


def test_matmul_refuses_operands_with_different_scaling():
  def product(x, w):
    tiles = Tiles().quantize(w, layout="columns")
    return ops.linear_fwd(ops.quantize_tensor(x), tiles)

  with pytest.raises(ValueError, match="both have one scale"):
    jax.eval_shape(product, jnp.ones((8, D)), jnp.ones((D, F)))


@pytest.mark.parametrize("nonlinear", quick(1, ["fp8", "bf16"]))
def test_linear_matches_the_matmuls_of_quantized_operands(nonlinear):
  x, w, dy = (scaled_case(s, i) for i, s in enumerate(((T, D), (D, F), (T, F))))
  recipe = dataclasses.replace(recipes.fp8_block(), nonlinear=nonlinear)

  @jit
  def layer(x, w, dy):
    y, vjp = jax.vjp(lambda x, w: linear(x, w, recipe=recipe), x, w)
    return y, vjp(dy), jax.tree.leaves(vjp)

  y, (dx, dw), saved = layer(x, w, dy)
  _, x_rows, _ = quantized(x, 1, BLOCK)
  _, w_q, _ = quantized(w, BLOCK, BLOCK)
  # dw is computed from the codes that the forward pass read, not from x.
  _, x_columns, _ = quantized(np.float32(x_rows.T), 1, BLOCK)
  _, g_rows, _ = quantized(dy, 1, BLOCK)
  _, g_columns, _ = quantized(dy.T, 1, BLOCK)
  assert_close(y, x_rows @ w_q, 1e-6)
  assert_close(dx, g_rows @ w_q.T, 1e-6)
  assert_close(dw, x_columns @ g_columns.T, 1e-6)
  shapes = {(a.shape, a.dtype.name) for a in saved}
  assert shapes == {
    ((T, D), "float8_e4m3fn"),
    ((T, 2), "float32"),
    ((D, F), "float32"),
  }


RECIPES = {
  "block": recipes.fp8_block(),
  "coat": recipes.fp8_block(residuals="coat", weight_cache="none"),
  "attention": recipes.fp8_block(attention="fp8", weight_cache="codes"),
  "plain": dataclasses.replace(recipes.fp8_block(), nonlinear="bf16"),
}
BLOCKS = {
  "gated": lambda **how: MLP(D, F, **how),
  "ungated": lambda **how: MLP(
    D, F, activation="gelu_tanh", gated=False, use_bias=True, **how
  ),
  "attention": lambda **how: Attention(D, 4, use_bias=True, **how),
  "normless": lambda **how: MLP(D, F, norm=None, post_norm="rms", **how),
}


def value_and_gradients(build, recipe):
  module = build(recipe=recipe, rngs=nnx.Rngs(0))
  graph, params = nnx.split(module)
  x = jax.random.normal(jax.random.key(1), (1, T, D), jnp.bfloat16)

  def run(params, x):
    layer = nnx.merge(graph, params)
    return with_weight_cache(layer)(x)

  @jit
  def both(params, x):
    y, vjp = jax.vjp(run, params, x)
    return y, vjp(jax.random.normal(jax.random.key(2), y.shape, y.dtype))

  return both(params, x)


@pytest.mark.slow
@pytest.mark.parametrize(
  "block, recipe",
  [
    ("gated", "block"),
    ("ungated", "block"),
    ("gated", "coat"),
    ("attention", "attention"),
    ("normless", "coat"),
    ("normless", "plain"),
  ],
)
def test_results_of_blocks_are_close_to_bf16(block, recipe):
  got = value_and_gradients(BLOCKS[block], RECIPES[recipe])
  exact = value_and_gradients(BLOCKS[block], recipes.bf16())
  for a, e in zip(*map(jax.tree.leaves, (got, exact)), strict=True):
    a, e = (np.asarray(x, np.float64) for x in (a, e))
    assert np.linalg.norm(a - e) <= 0.11 * np.linalg.norm(e)


@pytest.mark.slow
def test_weight_caches_change_no_result():
  got = [
    value_and_gradients(
      lambda **how: NormLinear(D, D, **how),
      recipes.fp8_block(weight_cache=cache),
    )
    for cache in ("none", "scale", "codes")
  ]
  assert_same_bits(got[1], got[0])
  assert_same_bits(got[2], got[0])


def test_recipe_differs_from_coat_only_in_matmuls():
  block, coat = recipes.fp8_block(), recipes.coat()
  assert (block.name, block.scaling) == ("fp8_block", Blocks)
  assert block.formats == Formats(gradients=E4M3)
  as_coat = dataclasses.replace(block, scaling=PerTensor, formats=Formats())
  assert as_coat == coat
  with pytest.raises(ValueError, match="scaling=Blocks is for FP8 matmuls"):
    CoatRecipe(linear="bf16", nonlinear="bf16", scaling=Blocks)
