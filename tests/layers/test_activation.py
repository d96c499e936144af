# SPDX-License-Identifier: Apache-2.0
"""SiLU·mul and GELU that save FP8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import recipes
from coat_jax.layers import gelu, silu_mul
from tests.comparing import assert_close, jit
from tests.layers.straight_through import per_group


def case(rows, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  arrays = (jnp.float32(rng.normal(size=(*rows, 40))) for _ in range(3))
  return [(2 * x).astype(dtype) for x in arrays]


@functools.partial(jit, static_argnames="f")
def run(f, dy, *args):
  y, vjp = jax.vjp(f, *args)
  return y, vjp(dy.astype(y.dtype))


def silu_mul_oracle(gate, up):
  return jax.nn.silu(per_group(gate)) * per_group(up)


def gelu_exact(x):
  return gelu(x, approximate=False)


def gelu_quick(x):
  return gelu(x, approximate="sigmoid")


def by_sigmoid(x):
  return x * jax.nn.sigmoid(1.702 * x)


GELUS = {
  gelu: lambda x: jax.nn.gelu(per_group(x), approximate=True),
  gelu_exact: lambda x: jax.nn.gelu(per_group(x), approximate=False),
  gelu_quick: lambda x: by_sigmoid(per_group(x)),
}


@pytest.mark.parametrize("rows", [(6,), (2, 2, 3)])
def test_silu_mul_equals_the_formula_at_the_saved_values(rows):
  gate, up, dy = case(rows)
  got, want = run(silu_mul, dy, gate, up), run(silu_mul_oracle, dy, gate, up)
  assert_close(got, want)


@pytest.mark.parametrize("function", GELUS)
def test_gelu_equals_the_formula_at_the_saved_values(function):
  x, _, dy = case((6,))
  assert_close(run(function, dy, x), run(GELUS[function], dy, x))


def test_the_two_gelus_differ():
  x, _, dy = case((6,))
  off = run(gelu, dy, x)[0] - run(gelu_exact, dy, x)[0]
  assert 1e-5 < jnp.max(jnp.abs(off)) < 1e-3


def test_bfloat16_in_and_out():
  gate, up, dy = case((6,), jnp.bfloat16)
  for f, oracle, args in (
    (silu_mul, silu_mul_oracle, (gate, up)),
    (gelu, GELUS[gelu], (gate,)),
  ):
    y, gradients = run(f, dy, *args)
    assert y.dtype == jnp.bfloat16
    assert all(x.dtype == jnp.bfloat16 for x in gradients)
    assert_close((y, gradients), run(oracle, dy, *args), 2.0**-8)


@pytest.mark.parametrize("recipe", [recipes.bf16(), recipes.fp8_linear()])
def test_other_recipes_are_the_ordinary_functions(recipe):
  gate, up, _ = case((6,))
  assert_close(silu_mul(gate, up, recipe=recipe), jax.nn.silu(gate) * up, 1e-6)
  assert_close(gelu(gate, recipe=recipe), jax.nn.gelu(gate), 1e-6)


@pytest.mark.parametrize(
  "up", [jnp.ones((6, 41)), jnp.ones((6, 40), jnp.bfloat16)]
)
def test_gate_and_up_that_differ_are_refused(up):
  with pytest.raises(ValueError, match="silu_mul: gate and up must have one"):
    silu_mul(jnp.ones((6, 40)), up)
