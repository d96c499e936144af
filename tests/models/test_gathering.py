# SPDX-License-Identifier: Apache-2.0
"""Tests gathering weights on meshes with one axis or unusual axis names."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import recipes
from coat_jax.layers import Linear
from coat_jax.models.remat import gather_weights
from coat_jax.recipes import MeshAxes
from tests.comparing import assert_close, jit
from tests.models.test_cache import CONFIGS, V, build

ONE = MeshAxes(batch=("fsdp",))
TWO = MeshAxes(batch=("rows",), fsdp="rows", tensor="parts")


def make_mesh(axes):
  names = axes.tokens
  sizes = (4, 2)[: len(names)]
  devices = jax.devices()[: math.prod(sizes)]
  types = (AxisType.Auto,) * len(names)
  return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


def logits_of(model):
  graph, params = nnx.split(model)

  @jit
  def run(params, tokens):
    return nnx.merge(graph, params).logits(tokens)

  return lambda tokens: run(params, tokens)


@pytest.mark.parametrize("axes", [ONE, TWO], ids=["one axis", "other names"])
def test_evaluation_in_bfloat16_matches_one_device(axes):
  tokens = np.random.default_rng(0).integers(0, V, (4, 8), np.int32)
  want = logits_of(build(CONFIGS["llama"], recipes.bf16()))(tokens)
  recipe = dataclasses.replace(recipes.coat(evaluation="bf16"), axes=axes)
  model = build(CONFIGS["llama"], recipe)
  model.eval()
  with jax.set_mesh(make_mesh(axes)):
    assert_close(logits_of(model)(tokens), want)


@pytest.mark.parametrize(
  "axes, split, whole",
  [
    (ONE, P("fsdp", None), P(None, None)),
    (TWO, P(("parts", "rows"), None), P("parts", None)),
  ],
  ids=["one axis", "other names"],
)
def test_kernels_are_gathered_and_gradients_stay_sharded(axes, split, whole):
  down = Linear(16, 8, recipe=recipes.bf16(), rngs=nnx.Rngs(0))
  kernel = down.kernel[...]

  @jax.jit
  def run(kernel, g):
    def gathered(kernel):
      layer = nnx.Dict(down=nnx.clone(down))
      layer.down.kernel.set_value(kernel)
      return gather_weights(layer, jnp.bfloat16, axes).down.kernel[...]

    out, pull = jax.vjp(gathered, kernel)
    return out, *pull(g)

  mesh = make_mesh(axes)
  with jax.set_mesh(mesh):
    out, dkernel = run(kernel, jnp.ones(kernel.shape, jnp.bfloat16))
  assert (out.dtype, dkernel.dtype) == (jnp.bfloat16, jnp.float32)
  assert out.sharding.is_equivalent_to(NamedSharding(mesh, whole), 2)
  assert dkernel.sharding.is_equivalent_to(NamedSharding(mesh, split), 2)
