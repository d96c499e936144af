# SPDX-License-Identifier: Apache-2.0
"""Tests norms: their formula, gradients, epsilon and dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import LayerNorm, RMSNorm, norm
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers import straight_through

COAT = recipes.coat()


def case(rows, width=24, seed=0):
  rng = np.random.default_rng(seed)
  x, dy = (jnp.float32(rng.normal(size=(*rows, width))) for _ in range(2))
  gamma, beta = (jnp.float32(rng.normal(size=width)) for _ in range(2))
  return 3 * x, gamma, beta, dy


@functools.partial(jit, static_argnames=("kind", "eps", "recipe"))
def layer(x, gamma, beta, dy, kind, eps, recipe=COAT):
  def f(*args):
    return norm(*args, kind=kind, eps=eps, recipe=recipe)

  y, vjp = jax.vjp(f, x, gamma, beta)
  return y, vjp(dy)


@functools.partial(jit, static_argnames=("kind", "eps", "group_size"))
def oracle(x, gamma, beta, dy, kind, eps, group_size=16):
  def f(*args):
    return straight_through.norm(*args, kind, eps, group_size)

  y, vjp = jax.vjp(f, x, gamma, beta)
  return y, vjp(dy.astype(jnp.float32))


@pytest.mark.parametrize(
  "kind, rows, has_gamma, has_beta, eps",
  [
    ("rms", (2, 6), True, False, 1e-5),
    ("rms", (6,), True, True, 1e-1),
    ("layer", (2, 2, 3), False, False, 1e-5),
    ("layer", (6,), True, True, 1.0),
  ],
)
def test_norm_matches_the_formula_at_the_saved_values(
  kind, rows, has_gamma, has_beta, eps
):
  x, gamma, beta, dy = case(rows)
  gamma, beta = gamma if has_gamma else None, beta if has_beta else None
  y, gradients = layer(x, gamma, beta, dy, kind, eps)
  want, want_gradients = oracle(x, gamma, beta, dy, kind, eps)
  assert_same_bits(y, want)
  assert_close(gradients, want_gradients)


def test_norm_uses_the_group_size_of_the_recipe():
  x, gamma, beta, dy = case((2, 6))
  recipe = recipes.coat(group_size=5)
  got = layer(x, gamma, beta, dy, "rms", 1e-5, recipe)
  assert_close(got, oracle(x, gamma, beta, dy, "rms", 1e-5, group_size=5))


def test_bfloat16_input_gives_bfloat16_output():
  x, gamma, beta, dy = case((2, 6))
  x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
  y, (dx, dgamma, dbeta) = layer(x, gamma, beta, dy, "layer", 1e-5)
  want, want_gradients = oracle(x, gamma, beta, dy, "layer", 1e-5)
  assert_same_bits(y, want.astype(jnp.bfloat16))
  assert dx.dtype == jnp.bfloat16
  assert dgamma.dtype == dbeta.dtype == jnp.float32
  assert_close(dx, want_gradients[0], 2.0**-8)
  assert_close((dgamma, dbeta), want_gradients[1:])


@pytest.mark.parametrize("recipe", [COAT, recipes.bf16()])
@pytest.mark.parametrize("rows", [(0, 6), (2, 0), (0,)])
def test_weight_gradients_of_an_empty_batch_are_zero(rows, recipe):
  x, gamma, beta, dy = case(rows)
  y, (dx, *rest) = layer(x, gamma, beta, dy, "layer", 1e-5, recipe)
  assert y.shape == dx.shape == x.shape
  assert_same_bits(rest, [jnp.zeros_like(gamma)] * 2)


@pytest.mark.parametrize("module", [RMSNorm, LayerNorm])
def test_norm_uses_the_given_epsilon(module):
  # All magnitudes are 1.75 = 448 * 2^-8, which is exact in FP8.
  value = 1.75
  x = jnp.full((1, 16), value).at[0, ::2].multiply(-1)
  for epsilon in (1e-5, 1e-1, 3.0):
    m = module(16, epsilon=epsilon, dtype=jnp.float32, rngs=nnx.Rngs(0))
    want = value / (value**2 + epsilon) ** 0.5
    np.testing.assert_allclose(jnp.abs(m(x)), want, rtol=1e-6)


def test_modules_match_nnx_norms():
  x = case((2, 6))[0]
  for ours, theirs in (
    (RMSNorm(24, rngs=nnx.Rngs(0)), nnx.RMSNorm(24, rngs=nnx.Rngs(0))),
    (LayerNorm(24, rngs=nnx.Rngs(0)), nnx.LayerNorm(24, rngs=nnx.Rngs(0))),
  ):
    state, want = nnx.state(ours), nnx.state(theirs)
    assert jax.tree.structure(state) == jax.tree.structure(want)
    assert_same_bits(state, want)
    y = ours(x)
    assert y.dtype == jnp.bfloat16
    # The input is rounded to FP8 (an RMS error of 2.6 %), the output to BF16.
    error = jnp.linalg.norm(y.astype(jnp.float32) - theirs(x))
    assert error < 0.04 * jnp.linalg.norm(theirs(x))
  olmo = LayerNorm(24, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
  assert olmo.scale is None and olmo.bias is None
  assert not jax.tree.leaves(nnx.state(olmo))
  assert abs(float(jnp.mean(olmo(x)))) < 1e-2


@pytest.mark.parametrize(
  "kind, module", [("rms", RMSNorm), ("layer", LayerNorm)]
)
def test_scale_plus_one_is_summed_in_float32(kind, module):
  x, scale, beta, dy = case((2, 6))
  # BF16 rounds 1 + 2^-9 to 1.
  scale = (scale / 8).at[:4].set(2.0**-9).astype(jnp.bfloat16)
  options = dict(use_bias=True, scale_plus_one=True, epsilon=1e-5)
  dtypes = dict(dtype=jnp.float32, param_dtype=jnp.bfloat16)
  m = module(24, **options, **dtypes, rngs=nnx.Rngs(0))
  assert_same_bits(m.scale[...], jnp.zeros(24, jnp.bfloat16))
  m.scale[...], m.bias[...] = scale, beta.astype(jnp.bfloat16)
  graph, params = nnx.split(m)

  @jit
  def run(x, params, dy):
    y, vjp = jax.vjp(lambda x, params: nnx.merge(graph, params)(x), x, params)
    return y, vjp(dy)

  y, (dx, grads) = run(x, params, dy)
  gamma = 1 + scale.astype(jnp.float32)
  beta = m.bias[...].astype(jnp.float32)
  want, (want_dx, *want_grads) = oracle(x, gamma, beta, dy, kind, 1e-5)
  assert_same_bits(y, want)
  assert_close(dx, want_dx)
  # Gradients are BF16, like the parameters.
  assert_close((grads.scale[...], grads.bias[...]), want_grads, 2.0**-8)


def test_scale_plus_one_needs_a_scale():
  with pytest.raises(
    ValueError, match="RMSNorm: scale_plus_one must come with"
  ):
    RMSNorm(24, scale_plus_one=True, use_scale=False, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("recipe", [recipes.bf16(), recipes.fp8_linear()])
def test_other_recipes_match_the_plain_norm(recipe):
  x, gamma, beta, dy = case((2, 6))
  mean, var = jnp.mean(x, -1), jnp.var(x, -1)
  want = (x - mean[..., None]) / jnp.sqrt(var + 1e-5)[..., None]
  want = want * gamma[None, None] + beta[None, None]
  y, _ = layer(x, gamma, beta, dy, "layer", 1e-5, recipe)
  assert_close(y, want, 1e-6)
