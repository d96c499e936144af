# SPDX-License-Identifier: Apache-2.0
"""Tests the gated MLP block, with its norm and residual add."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import (
  MLP,
  BlockWeights,
  Elementwise,
  LinearWeights,
  block,
)
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers import straight_through
from tests.matrices import quick

RECIPES = {kept: recipes.coat(residuals=kept) for kept in ("coat", "minimal")}


def case(rows, has_biases=True, seed=0):
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.float32(rng.normal(size=shape))

  front = LinearWeights(
    gamma=normal(24), beta=normal(24), w=normal(24, 2, 40), bias=normal(2, 40)
  )
  back = LinearWeights(w=normal(40, 24), bias=normal(24))
  if not has_biases:
    front = front._replace(beta=None, bias=None)
    back = back._replace(bias=None)
  return normal(*rows, 24), BlockWeights(front, back), normal(*rows, 24)


@functools.partial(
  jit, static_argnames=("kind", "eps", "recipe", "activation", "post_norm")
)
def layer(x, weights, dy, kind, eps, recipe, activation="silu", post_norm=None):
  def f(x, weights):
    return block(
      x,
      weights,
      middle=Elementwise(activation),
      kind=kind,
      eps=eps,
      post_norm=post_norm,
      recipe=recipe,
    )

  y, vjp = jax.vjp(f, x, weights)
  return y, vjp(dy)


@functools.partial(
  jit, static_argnames=("kind", "eps", "residuals", "activation", "post_norm")
)
def oracle(
  x, weights, dy, kind, eps, residuals, activation="silu", post_norm=None
):
  def f(x, weights):
    return straight_through.gated_mlp(
      x,
      weights,
      kind,
      eps,
      residuals,
      name=activation,
      post_norm=post_norm,
    )

  y, vjp = jax.vjp(f, x, weights)
  return y, vjp(dy.astype(jnp.float32))


@pytest.mark.parametrize("residuals", RECIPES)
@pytest.mark.parametrize(
  "kind, rows, eps, has_biases",
  quick(
    1,
    [
      ("layer", (6,), 1e-1, True),
      ("rms", (2, 6), 1e-5, False),
      ("rms", (2, 2, 3), 1e-5, True),
    ],
  ),
)
def test_gated_mlp_matches_its_parts(kind, rows, eps, has_biases, residuals):
  x, weights, dy = case(rows, has_biases)
  y, gradients = layer(x, weights, dy, kind, eps, RECIPES[residuals])
  want, want_gradients = oracle(x, weights, dy, kind, eps, residuals)
  assert_same_bits(y, want)
  assert_close(gradients, want_gradients)


@pytest.mark.parametrize(
  "activation, residuals, has_biases",
  quick(
    2,
    [
      ("gelu_tanh", "minimal", True),
      ("gelu", "coat", False),
      ("gelu_tanh", "coat", False),
      ("gelu", "minimal", True),
    ],
  ),
)
def test_gated_mlp_with_gelu_matches_its_parts(
  activation, residuals, has_biases
):
  x, weights, dy = case((2, 6), has_biases)
  found = layer(x, weights, dy, "rms", 1e-5, RECIPES[residuals], activation)
  wanted = oracle(x, weights, dy, "rms", 1e-5, residuals, activation)
  assert_same_bits(found[0], wanted[0])
  assert_close(found[1], wanted[1])


def with_post_norm(weights, kind, seed=1):
  """Adds post-norm weights; if kind is None, removes the first norm's."""
  gamma, beta = jax.random.normal(jax.random.key(seed), (2, 24)) / 2 + 1
  front, back, _ = weights
  if kind is None:
    front = front._replace(gamma=None, beta=None)
  return BlockWeights(front, back._replace(gamma=gamma, beta=beta))


@pytest.mark.parametrize(
  "kind, post_norm, residuals, has_biases",
  quick(
    2,
    [
      (None, "rms", "minimal", True),
      ("rms", "layer", "coat", False),
      ("rms", "rms", "minimal", False),
      (None, "layer", "coat", True),
    ],
  ),
)
def test_gated_mlp_with_a_post_norm_matches_its_parts(
  kind, post_norm, residuals, has_biases
):
  x, weights, dy = case((2, 6), has_biases)
  weights = with_post_norm(weights, kind)
  how = dict(post_norm=post_norm)
  found = layer(x, weights, dy, kind, 1e-1, RECIPES[residuals], **how)
  wanted = oracle(x, weights, dy, kind, 1e-1, residuals, **how)
  assert_same_bits(found[0], wanted[0])
  assert_close(found[1], wanted[1])


def test_gated_mlp_with_a_post_norm_in_bfloat16_is_close_to_f32():
  x, weights, dy = case((2, 6))
  x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
  weights, how = with_post_norm(weights, "rms"), dict(post_norm="rms")
  y, (dx, dw) = layer(x, weights, dy, "rms", 1e-5, RECIPES["minimal"], **how)
  want, (want_dx, want_dw) = oracle(
    x, weights, dy, "rms", 1e-5, "minimal", **how
  )
  # The layer computes y in f32 and rounds it to BF16 once.
  assert_same_bits(y, want.astype(jnp.bfloat16))
  assert_close((dw.back.gamma, dw.back.beta), want_dw.back[2:4])
  assert_close(dw.back.bias, want_dw.back.bias, 2.0**-8)
  # The gradients of the down matmul's output and input are rounded to BF16
  # before E5M2. Each BF16 rounding changes about 2^-9 / 2^-3 of the codes by at
  # most 2^-2 of their value. Relative to the norm, the error is at most
  # sqrt(2^-6) * 2^-2 = 2^-5, and two such errors are sqrt(2) * 2^-5 = 4.4 %.
  for got, exact in zip(
    jax.tree.leaves((dx, dw)), jax.tree.leaves((want_dx, want_dw)), strict=True
  ):
    error = jnp.linalg.norm(got.astype(jnp.float32) - exact)
    assert error < 0.044 * jnp.linalg.norm(exact)


@pytest.mark.parametrize("residuals", RECIPES)
def test_gated_mlp_in_bfloat16_is_close_to_f32(residuals):
  x, weights, dy = case((2, 6))
  x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
  y, (dx, dw) = layer(x, weights, dy, "rms", 1e-5, RECIPES[residuals])
  want, want_gradients = oracle(x, weights, dy, "rms", 1e-5, residuals)
  assert_same_bits(y, want.astype(jnp.bfloat16))
  assert dx.dtype == jnp.bfloat16
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(dw))
  want_dx, want_dw = want_gradients
  # The gradient of the down matmul's input is rounded to BF16, which changes
  # about 2^-9 / 2^-3 of the E5M2 codes of dgate and dup by at most 2^-2 of
  # their value, so the error is at most 2^-5 (with "coat", it is below 2 %).
  # This affects dx and the front's gradients, but not the back's.
  most = 0.02 if residuals == "coat" else 2.0**-5
  assert_close(dw.back, want_dw.back)
  for got, exact in zip(
    jax.tree.leaves((dx, dw)), jax.tree.leaves((want_dx, want_dw)), strict=True
  ):
    error = jnp.linalg.norm(got.astype(jnp.float32) - exact)
    assert error < most * jnp.linalg.norm(exact)


def test_coat_and_minimal_residuals_differ_only_in_rounding_silu():
  # silu(30) = 30 in f32, so if all gates are 30, SiLU is exact in FP8 too.
  x, weights, dy = case((2, 6), has_biases=True)
  front = weights.front
  front = front._replace(
    w=front.w.at[:, 0].set(0.0), bias=front.bias.at[0].set(30.0)
  )
  weights = weights._replace(front=front)
  kept, recomputed = (
    layer(x, weights, dy, "rms", 1e-5, recipe) for recipe in RECIPES.values()
  )
  assert_close(kept, recomputed, 1e-6)
  # Otherwise only "coat" rounds SiLU, which changes the product by 2.6 %.
  x, weights, dy = case((2, 6))
  kept, recomputed = (
    layer(x, weights, dy, "rms", 1e-5, recipe)[0] for recipe in RECIPES.values()
  )
  off = jnp.linalg.norm(kept - recomputed)
  assert 0 < off < 0.05 * jnp.linalg.norm(recomputed - x)


def test_gated_mlp_with_a_zero_down_weight_returns_its_input():
  x, weights, dy = case((2, 6), has_biases=False)
  weights = weights._replace(back=LinearWeights(jnp.zeros((40, 24))))
  y, (dx, _) = layer(x, weights, dy, "rms", 1e-5, RECIPES["minimal"])
  assert_same_bits((y, dx), (x, dy))


@pytest.mark.parametrize(
  "recipe, activation",
  [
    (recipes.bf16(), "silu"),
    (recipes.bf16(), "gelu"),
    (recipes.fp8_linear(), "gelu_tanh"),
  ],
)
def test_gated_mlp_with_other_recipes_matches_its_parts(recipe, activation):
  options = dict(activation=activation, use_bias=True, rngs=nnx.Rngs(0))
  m = MLP(24, 40, recipe=recipe, **options)
  f = straight_through.ACTIVATIONS[activation]
  x = case((2, 6))[0].astype(jnp.bfloat16)

  @jit
  def by_hand(m, x):
    gate_up = m.gate_up(m.norm(x))
    product = f(gate_up[..., 0, :]) * gate_up[..., 1, :]
    return x + m.down(product)

  assert_same_bits(jit(lambda m, x: m(x))(m, x), by_hand(m, x))


def test_mlp_refuses_an_unknown_activation():
  # Test the error that a caller without runtime type checks gets.
  init = inspect.unwrap(Elementwise.__init__)
  with pytest.raises(ValueError, match="one of .*'gelu'.*, got 'swish'"):
    init(object.__new__(Elementwise), "swish")


def test_gated_mlp_refuses_weights_of_wrong_shapes():
  x, (front, back, _), _ = case((2, 6))
  for bad in (
    BlockWeights(front._replace(w=jnp.ones((24, 80))), back),
    BlockWeights(front, back._replace(w=jnp.ones((41, 24)))),
  ):
    with pytest.raises(ValueError, match=r"front.w must be \[D, 2"):
      block(
        x,
        bad,
        middle=Elementwise(),
        kind="rms",
        eps=1e-5,
        recipe=RECIPES["minimal"],
      )
