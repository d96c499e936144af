# SPDX-License-Identifier: Apache-2.0
"""Tests linear layers: FP8 matmuls, shapes, and the match with nnx.Linear."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import Linear, linear
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers import straight_through

COAT = recipes.coat()


def case(rows, out=(40,), dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  shapes = (*rows, 24), (24, *out), out, (*rows, *out)
  x, w, bias, dy = (jnp.float32(rng.normal(size=s)) for s in shapes)
  return x.astype(dtype), w, bias, dy.astype(dtype)


@jit
def layer(x, w, bias, dy):
  y, vjp = jax.vjp(lambda *args: linear(*args, recipe=COAT), x, w, bias)
  return y, vjp(dy)


@jit
def oracle(x, w, bias, dy):
  f = functools.partial(straight_through.linear, dtype=x.dtype)
  y, vjp = jax.vjp(f, x, w, bias)
  return y, vjp(dy.reshape(y.shape).astype(jnp.float32))


@pytest.mark.parametrize(
  "rows, out, has_bias",
  [
    ((2, 6), (40,), True),
    ((6,), (40,), False),
    ((2, 2, 3), (2, 20), True),
    ((), (40,), True),
  ],
)
def test_linear_matches_the_matmuls_of_the_codes(rows, out, has_bias):
  x, w, bias, dy = case(rows, out)
  bias = bias if has_bias else None
  y, gradients = layer(x, w, bias, dy)
  want, want_gradients = oracle(x, w, bias, dy)
  assert y.shape == (*rows, *out)
  assert_same_bits(y.reshape(want.shape), want)
  assert_close(gradients, want_gradients)


def test_bfloat16_input_and_f32_parameters_keep_their_dtypes():
  x, w, bias, dy = case((2, 6), dtype=jnp.bfloat16)
  y, (dx, dw, dbias) = layer(x, w, bias, dy)
  assert y.dtype == dx.dtype == jnp.bfloat16
  assert dw.dtype == dbias.dtype == jnp.float32
  want, want_gradients = oracle(x, w, bias, dy)
  assert_same_bits(y, want.astype(jnp.bfloat16))
  assert_close(dx, want_gradients[0], 2.0**-8)
  assert_close((dw, dbias), want_gradients[1:])


def test_bfloat16_parameters_get_bfloat16_gradients():
  x, w, bias, dy = case((2, 6))
  w, bias = w.astype(jnp.bfloat16), bias.astype(jnp.bfloat16)
  y, gradients = layer(x, w, bias, dy)
  assert y.dtype == jnp.float32
  assert gradients[1].dtype == gradients[2].dtype == jnp.bfloat16
  w, bias = w.astype(jnp.float32), bias.astype(jnp.float32)
  assert_close(gradients, oracle(x, w, bias, dy)[1], 2.0**-8)


def test_gradients_below_the_range_of_e4m3_survive():
  # E5M2 resolves values down to 2^-32 of the largest gradient.
  x, w, bias, dy = case((6,))
  dy = dy.at[0].multiply(2.0**-14)
  dx = layer(x, w, bias, dy)[1][0]
  exact = dy @ w.T
  cosine = jnp.vdot(dx[0], exact[0]) / (
    jnp.linalg.norm(dx[0]) * jnp.linalg.norm(exact[0])
  )
  assert cosine > 0.99


def test_vmap_gives_each_example_its_own_scales():
  x, w, bias, dy = case((3, 6))
  x = x * jnp.float32([1, 1e3, 1e-3])[:, None, None]
  stacked = jnp.stack([w, 2 * w, -w])
  run = lambda x, w: linear(x, w, recipe=COAT)  # noqa: E731
  got, alone = jit(jax.vmap(run))(x, stacked), jit(run)
  one_by_one = jnp.stack([alone(x[i], stacked[i]) for i in range(3)])
  assert_close(got, one_by_one, 1e-6)
  # With one scale for all examples, the smallest example, which is 1e-6 of the
  # largest, would become 0.
  assert_close(got[2], one_by_one[2], 1e-6)


def test_bf16_recipe_matches_the_plain_layer():
  x, w, bias, dy = case((2, 6))
  y, vjp = jax.vjp(
    lambda *args: linear(*args, recipe=recipes.bf16()), x, w, bias
  )
  want, want_vjp = jax.vjp(lambda x, w, b: x @ w + b[None, None], x, w, bias)
  assert_close((y, vjp(dy)), (want, want_vjp(dy)), 1e-6)


def test_linear_replaces_nnx_linear():
  ours = Linear(24, 40, rngs=nnx.Rngs(3))
  theirs = nnx.Linear(24, 40, rngs=nnx.Rngs(3))
  state, want = nnx.state(ours), nnx.state(theirs)
  assert jax.tree.structure(state) == jax.tree.structure(want)
  assert_same_bits(state, want)
  x = case((2, 6))[0].astype(jnp.bfloat16)
  y = ours(x)
  assert y.dtype == jnp.bfloat16
  # Rounding to E4M3 has an RMS error of 2.6 % in each of the two operands, so
  # the product has an error of sqrt(2) * 2.6 % = 4 %.
  error = jnp.linalg.norm(y.astype(jnp.float32) - theirs(x))
  assert error < 0.06 * jnp.linalg.norm(theirs(x))
  without = Linear(24, (2, 20), use_bias=False, rngs=nnx.Rngs(3))
  assert without.bias is None and without(x).shape == (2, 6, 2, 20)
  assert_same_bits(without.kernel[...].reshape(24, 40), ours.kernel[...])


@pytest.mark.parametrize("recipe", [COAT, recipes.bf16()])
@pytest.mark.parametrize("rows", [(0, 6), (2, 0), (0,)])
def test_weight_gradients_of_an_empty_batch_are_zero(rows, recipe):
  x, w, bias, dy = case(rows, (2, 20), jnp.bfloat16)

  @jit
  def run(x, w, bias, dy):
    y, vjp = jax.vjp(lambda *args: linear(*args, recipe=recipe), x, w, bias)
    return y, vjp(dy)

  y, (dx, dw, dbias) = run(x, w, bias, dy)
  assert y.shape == (*rows, 2, 20) and dx.shape == x.shape
  assert_same_bits((dw, dbias), (jnp.zeros_like(w), jnp.zeros_like(bias)))


def test_inconsistent_shapes_are_refused():
  with pytest.raises(ValueError, match=r"linear: x \[..., D\] needs a weight"):
    linear(jnp.ones((2, 3)), jnp.ones((4, 5)), recipe=COAT)
