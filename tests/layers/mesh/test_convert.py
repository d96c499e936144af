# SPDX-License-Identifier: Apache-2.0
"""Tests converted models on meshes of eight devices."""

import pytest
from flax import nnx
from jax.sharding import AxisType

from coat_jax import layers, recipes
from coat_jax.layers import convert
from tests.layers.mesh.test_rule import D, F, check
from tests.matrices import quick


class FeedForward(nnx.Module):
  """A gated MLP with separate gate and up."""

  def __init__(self, *, rngs):
    self.gate = nnx.Linear(D, F, rngs=rngs)
    self.up = nnx.Linear(D, F, rngs=rngs)
    self.down = nnx.Linear(F, D, rngs=rngs)

  def __call__(self, x):
    return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Model(nnx.Module):
  """A model with linear layers over one and two axes, and a gated MLP."""

  def __init__(self, *, rngs):
    self.norm = nnx.RMSNorm(D, rngs=rngs)
    self.heads = nnx.LinearGeneral(D, (4, D // 4), rngs=rngs)
    self.out = nnx.LinearGeneral((4, D // 4), D, axis=(-2, -1), rngs=rngs)
    self.mlp = FeedForward(rngs=rngs)

  def __call__(self, x):
    x = x + self.out(self.heads(self.norm(x)))
    return x + self.mlp(x)


@pytest.mark.parametrize(
  "sizes, kind",
  quick(
    1,
    [
      ((2, 2, 2), AxisType.Auto),
      ((2, 4, 1), AxisType.Auto),
      ((2, 2, 2), AxisType.Explicit),
    ],
  ),
)
def test_converted_model_on_a_mesh_matches_one_device(sizes, kind):
  def make(recipe):
    blocks = {FeedForward: layers.MLP}
    return convert(Model(rngs=nnx.Rngs(0)), recipe, blocks=blocks)[0]

  check(make, recipes.coat(), sizes, kind)
