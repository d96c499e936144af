# SPDX-License-Identifier: Apache-2.0
"""Tests the MLP block without a gate."""

import collections
import functools
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import ops, recipes
from coat_jax.layers import (
  MLP,
  BlockWeights,
  Elementwise,
  LinearWeights,
  block,
)
from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.qtensor import num_groups
from tests.comparing import assert_close, assert_same_bits, jit
from tests.layers import straight_through
from tests.matrices import quick
from tests.pallas.kernels import lowered_for_h200

D, F, G = 24, 40, 16
GELU = dict(activation="gelu_tanh", gated=False)
RECIPES = {kept: recipes.coat(residuals=kept) for kept in ("coat", "minimal")}


OPERATIONS = {"activation_input", "activation_fwd", "activation_bwd_operands"}


def case(rows, has_biases=True, seed=0):
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.float32(rng.normal(size=shape))

  front = LinearWeights(normal(D, F), normal(F), normal(D), normal(D))
  back = LinearWeights(normal(F, D), normal(D))
  if not has_biases:
    front, back = front._replace(bias=None), back._replace(bias=None)
  return normal(*rows, D), BlockWeights(front, back), normal(*rows, D)


@functools.partial(jit, static_argnames=("activation", "recipe"))
def layer(x, weights, dy, activation, recipe):
  def f(x, weights):
    middle = Elementwise(activation, gated=False)
    return block(
      x, weights, middle=middle, kind="layer", eps=1e-5, recipe=recipe
    )

  y, vjp = jax.vjp(f, x, weights)
  return y, vjp(dy)


@functools.partial(jit, static_argnames="activation")
def oracle(x, weights, dy, activation):
  def f(x, weights):
    front, back, _ = weights
    y = straight_through.norm(x, front.gamma, front.beta, "layer", 1e-5)
    h, zero = straight_through.linear(
      y, front.w, front.bias, x.dtype, later=True
    )
    h = straight_through.rounded(h, x.dtype)

    def activated(h, _):
      h = straight_through.per_group(h)
      fixed = ops.activation_values(h, activation=activation)
      y = straight_through.ACTIVATIONS[activation](h)
      return straight_through.pin(y, jax.lax.stop_gradient(fixed))

    y = straight_through.activation(activated, 1, ops.Groups(16), h, zero)
    return x + straight_through.linear(y, back.w, back.bias, jnp.float32)

  y, vjp = jax.vjp(f, x, weights)
  return y, vjp(dy)


@pytest.mark.parametrize("residuals", RECIPES)
@pytest.mark.parametrize(
  "rows, activation, has_biases",
  quick(
    1,
    [
      ((2, 6), "gelu_tanh", True),
      ((6,), "gelu", True),
      ((2, 2, 3), "gelu_quick", False),
      ((2, 6), "silu", True),
    ],
  ),
)
def test_mlp_matches_its_parts(rows, activation, has_biases, residuals):
  x, weights, dy = case(rows, has_biases)
  found = layer(x, weights, dy, activation, RECIPES[residuals])
  wanted = oracle(x, weights, dy, activation)
  assert_same_bits(found[0], wanted[0])
  assert_close(found[1], wanted[1])


@pytest.mark.parametrize("recipe", [recipes.bf16(), recipes.fp8_linear()])
def test_mlp_with_other_recipes_matches_its_parts(recipe):
  options = dict(norm="layer", use_bias=True, rngs=nnx.Rngs(0))
  m = MLP(D, F, recipe=recipe, **GELU, **options)
  x = case((2, 6))[0].astype(jnp.bfloat16)

  @jit
  def by_hand(m, x):
    return x + m.down(jax.nn.gelu(m.up(m.norm(x))))

  assert_same_bits(jit(lambda m, x: m(x))(m, x), by_hand(m, x))


def make_mlp(recipe, features=D, hidden=F):
  """Returns (f, parameters), where f(parameters, x) runs an MLP."""
  m = nnx.eval_shape(
    lambda: MLP(
      features,
      hidden,
      norm="layer",
      use_norm_bias=True,
      recipe=recipe,
      rngs=nnx.Rngs(0),
      **GELU,
    )
  )
  graph, params = nnx.split(m, nnx.Param)
  return (lambda params, x: nnx.merge(graph, params)(x)), params


@pytest.mark.parametrize("residuals", RECIPES)
def test_mlp_saves_the_fp8_inputs_of_norm_and_gelu(residuals):
  f, params = make_mlp(RECIPES[residuals])
  x = jax.ShapeDtypeStruct((1, 34, D), jnp.bfloat16)

  def saved(params, x):
    return jax.tree.leaves(jax.vjp(f, params, x)[1])

  def kinds(arrays):
    return collections.Counter((a.shape, a.dtype) for a in arrays if a.ndim)

  found = kinds(jax.eval_shape(saved, params, x))
  want = {((1, 34), jnp.dtype("float32")): 2}  # Mean and rstd.
  for n in (D, F):
    scales = (1, 34, num_groups(n, G))
    want |= {
      ((1, 34, n), jnp.dtype(E4M3)): 1,
      (scales, jnp.dtype("bfloat16")): 1,
    }
  if residuals == "coat":
    want[(D, 34), jnp.dtype(E4M3)] = 1  # The norm's output, transposed.
  assert found - kinds(jax.tree.leaves(params)) == collections.Counter(want)


def test_mlp_runs_the_kernels():
  f, params = make_mlp(recipes.coat(), 128, 256)
  x = jax.ShapeDtypeStruct((1, 128, 128), jnp.bfloat16)

  def gradients(params, x, dy):
    y, vjp = jax.vjp(f, params, x)
    return y, vjp(dy)

  text = lowered_for_h200(gradients, params, x, x)
  # Each Mosaic GPU kernel is in a private function named after its operation.
  assert set(re.findall(r"func private @(\w+)", text)) >= OPERATIONS
  h = jnp.zeros((1, 128, 256), jnp.bfloat16)
  how = dict(gated=False, groups=ops.Groups(G))
  for activation in get_args(ops.Activation):
    said = ops.explain(ops.activation_input, h, activation=activation, **how)
    assert ("xla everywhere" if activation == "gelu" else "mosaic") in said
