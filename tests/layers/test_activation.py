# SPDX-License-Identifier: Apache-2.0
"""Tests layers of activation functions, gated or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import recipes
from coat_jax.layers import activate
from tests.comparing import assert_close, jit
from tests.layers.straight_through import ACTIVATIONS, per_group


def case(rows, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  arrays = (jnp.float32(rng.normal(size=(*rows, 40))) for _ in range(3))
  return [(2 * x).astype(dtype) for x in arrays]


@functools.partial(jit, static_argnames="f")
def run(f, dy, *args):
  y, vjp = jax.vjp(f, *args)
  return y, vjp(dy.astype(y.dtype))


def oracle(x, *others, activation):
  y = ACTIVATIONS[activation](per_group(x))
  return y * per_group(others[0]) if others else y


def pair(activation):
  """Returns the layer and its oracle."""
  how = dict(activation=activation)
  return functools.partial(activate, **how), functools.partial(oracle, **how)


@pytest.mark.parametrize("rows", [(6,), (2, 2, 3)])
def test_gated_activation_matches_the_formula_at_the_saved_values(rows):
  gate, up, dy = case(rows)
  f, want = pair("silu")
  assert_close(run(f, dy, gate, up), run(want, dy, gate, up))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_matches_the_formula_at_the_saved_values(activation):
  x, _, dy = case((6,))
  f, want = pair(activation)
  assert_close(run(f, dy, x), run(want, dy, x))


def test_the_two_gelus_differ():
  x, _, _ = case((6,))
  off = activate(x, activation="gelu_tanh") - activate(x, activation="gelu")
  assert 1e-5 < jnp.max(jnp.abs(off)) < 1e-3


def test_bfloat16_inputs_give_bfloat16_results():
  gate, up, dy = case((6,), jnp.bfloat16)
  for activation, args in (("silu", (gate, up)), ("gelu_tanh", (gate,))):
    f, want = pair(activation)
    y, gradients = run(f, dy, *args)
    assert y.dtype == jnp.bfloat16
    assert all(x.dtype == jnp.bfloat16 for x in gradients)
    assert_close((y, gradients), run(want, dy, *args), 2.0**-8)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recipe", [recipes.bf16(), recipes.fp8_linear()])
def test_other_recipes_use_the_plain_functions(recipe, activation):
  gate, up, _ = case((6,))
  f = functools.partial(activate, activation=activation, recipe=recipe)
  want = ACTIVATIONS[activation](gate)
  assert_close(f(gate, up), want * up, 1e-6)
  assert_close(f(gate), want, 1e-6)


@pytest.mark.parametrize(
  "up", [jnp.ones((6, 41)), jnp.ones((6, 40), jnp.bfloat16)]
)
def test_gate_and_up_of_different_shapes_or_dtypes_are_refused(up):
  with pytest.raises(ValueError, match="activate: x and up must have the same"):
    activate(jnp.ones((6, 40)), up, activation="silu")
