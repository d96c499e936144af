# SPDX-License-Identifier: Apache-2.0
"""Tests the NormLinear block: a norm, then a linear layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import LinearWeights, NormLinear, norm_linear
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers import straight_through
from tests.matrices import quick

RECIPES = {kept: recipes.coat(residuals=kept) for kept in ("coat", "minimal")}


def case(rows, seed=0):
  rng = np.random.default_rng(seed)
  shapes = (*rows, 24), (24,), (24,), (24, 40), (40,), (*rows, 40)
  return [jnp.float32(rng.normal(size=s)) for s in shapes]


@functools.partial(jit, static_argnames=("kind", "eps", "recipe"))
def layer(args, dy, kind, eps, recipe):
  def f(x, gamma, beta, w, bias):
    weights = LinearWeights(w, bias, gamma, beta)
    return norm_linear(x, weights, kind=kind, eps=eps, recipe=recipe)

  y, vjp = jax.vjp(f, *args)
  return y, vjp(dy)


@functools.partial(jit, static_argnames=("kind", "eps"))
def oracle(args, dy, kind, eps):
  def f(x, gamma, beta, w, bias):
    y = straight_through.norm(x, gamma, beta, kind, eps)
    return straight_through.linear(y, w, bias, x.dtype)

  y, vjp = jax.vjp(f, *args)
  return y, vjp(dy.astype(jnp.float32))


@pytest.mark.parametrize("residuals", RECIPES)
@pytest.mark.parametrize(
  "kind, rows, eps, present",
  quick(
    1,
    [
      ("layer", (6,), 1e-1, "x gamma beta w bias"),
      ("rms", (2, 6), 1e-5, "x gamma w"),
      ("layer", (2, 2, 3), 1e-5, "x w bias"),
    ],
  ),
)
def test_norm_linear_matches_norm_then_linear(
  kind, rows, eps, present, residuals
):
  *args, dy = case(rows)
  names = "x gamma beta w bias".split()
  args = [
    arg if name in present.split() else None
    for name, arg in zip(names, args, strict=True)
  ]
  y, gradients = layer(args, dy, kind, eps, RECIPES[residuals])
  want, want_gradients = oracle(args, dy, kind, eps)
  assert_same_bits(y, want)
  assert_close(gradients, want_gradients)


def test_recomputed_operand_gives_the_same_results_as_a_saved_one():
  *args, dy = case((2, 6))
  for dtype in (jnp.float32, jnp.bfloat16):
    args[0], dy = args[0].astype(dtype), dy.astype(dtype)
    results = [layer(args, dy, "rms", 1e-5, r) for r in RECIPES.values()]
    assert_same_bits(*results)


def test_bfloat16_input_gives_bfloat16_output():
  *args, dy = case((2, 6))
  args[0], dy = args[0].astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
  y, gradients = layer(args, dy, "rms", 1e-5, RECIPES["minimal"])
  want, want_gradients = oracle(args, dy, "rms", 1e-5)
  assert_same_bits(y, want.astype(jnp.bfloat16))
  assert [x.dtype for x in gradients] == [arg.dtype for arg in args]
  # dy and dx are rounded to BF16, each by up to 2^-9 of its largest value.
  assert_close(gradients[:3], want_gradients[:3], 2.0**-7)
  assert_close(gradients[3:], want_gradients[3:])


@pytest.mark.parametrize("recipe", [recipes.bf16(), recipes.fp8_linear()])
def test_module_with_other_recipes_matches_norm_then_linear(recipe):
  m = NormLinear(24, 40, norm="layer", recipe=recipe, rngs=nnx.Rngs(0))
  x = case((2, 6))[0].astype(jnp.bfloat16)
  by_hand = jit(lambda m, x: m.linear(m.norm(x)))(m, x)
  assert_same_bits(jit(lambda m, x: m(x))(m, x), by_hand)


def test_epsilon_reaches_the_norm():
  # Values of a row have the same magnitude, so they are exact in FP8, and
  # y = x / sqrt(x^2 + epsilon).
  x = jnp.full((4, 16), 1.75).at[::2, ::3].multiply(-1)
  w = jnp.eye(16)
  for eps in (1e-5, 1e-1):
    weights = LinearWeights(w)
    y = norm_linear(x, weights, kind="rms", eps=eps, recipe=RECIPES["minimal"])
    want = x * (1.75**2 + eps) ** -0.5
    np.testing.assert_allclose(y, want, rtol=1e-6)


def test_inconsistent_shapes_are_refused():
  x, w = jnp.ones((2, 24)), jnp.ones((25, 40))
  with pytest.raises(ValueError, match=r"linear: x \[..., D\] needs a weight"):
    weights = LinearWeights(w)
    norm_linear(x, weights, kind="rms", eps=1e-5, recipe=RECIPES["minimal"])
