# SPDX-License-Identifier: Apache-2.0
"""Tests a user's own scalings in operations, a recipe and a layer."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import CoatRecipe, ops, recipes
from coat_jax.layers import MLP
from coat_jax.numerics.qtensor import power_of_two_scale, tensor_amax
from tests.comparing import jit


@dataclasses.dataclass(frozen=True)
class PowersOfTwo(ops.PerTensor):
  """One scale per tensor, a power of two."""

  description: ClassVar[str] = "a power of two per tensor"

  def find_scale(self, x):
    amax = tensor_amax(x, axis_names=self.axis_names)
    return power_of_two_scale(amax, self.dtype)


OWN = CoatRecipe(scaling=PowersOfTwo)
X = jax.random.normal(jax.random.key(0), (2, 16, 64))


def test_operand_has_a_power_of_two_scale():
  q = ops.quantize_tensor(X, scaling=PowersOfTwo(), layout="both")
  mantissa, _ = np.frexp(q.scale)
  assert mantissa == 0.5
  # The scale is in [amax / 448, 2 * amax / 448).
  assert 1 <= q.scale * 448 / np.abs(X).max() < 2
  np.testing.assert_array_equal(
    q.columns.astype("f4"), q.rows.astype("f4").reshape(-1, 64).T
  )


class FromRms(ops.PerTensor):
  """One scale per tensor, from its root mean square."""

  def find_scale(self, x):
    return 4 * jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))) / 448


def test_scale_of_an_activation_is_computed_from_its_values():
  parts = (ops.quantize_groups(X, groups=ops.Groups(16)),)
  y = ops.activation_values(parts[0].dequantize(), activation="silu")
  operand = ops.activation_fwd(parts, activation="silu", output=FromRms())
  expected = 4 * np.sqrt(np.mean(np.square(np.asarray(y, np.float64)))) / 448
  np.testing.assert_allclose(operand.scale, expected, rtol=1e-5)


def test_descriptions_name_the_scaling():
  assert OWN.name == "coat" and OWN != recipes.coat()
  assert "float8_e5m2; a power of two per tensor" in OWN.describe()
  said = ops.explain(ops.quantize_tensor, X, scaling=PowersOfTwo())
  assert "xla everywhere" in said and "PowersOfTwo" in said


@pytest.mark.parametrize("cache", ["none", "scale", "codes"])
def test_gradients_are_as_accurate_as_with_ordinary_scales(cache):
  def run(recipe):
    mlp = MLP(64, 96, recipe=recipe, rngs=nnx.Rngs(0))

    def loss(mlp, x):
      return jnp.mean(mlp(x).astype(jnp.float32) ** 2)

    return jit(nnx.grad(loss, argnums=(0, 1)))(mlp, X)

  own = run(dataclasses.replace(OWN, weight_cache=cache))
  ours, plain = run(recipes.coat(weight_cache=cache)), run(recipes.bf16())
  leaves = map(jax.tree.leaves, (own, ours, plain))
  for got, want, exact in zip(*leaves, strict=True):
    got, want, exact = (np.asarray(x, np.float64) for x in (got, want, exact))
    size = np.linalg.norm(exact)
    # Steps of E4M3 and E5M2 are relative to the values, so errors hardly depend
    # on the scale.
    error, usual = (np.linalg.norm(x - exact) / size for x in (got, want))
    assert error < 1.5 * usual + 1e-3
