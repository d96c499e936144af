# SPDX-License-Identifier: Apache-2.0
"""Whole experts on different devices: values of one device, bytes exchanged."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType

from coat_jax import recipes
from coat_jax.layers import MoE, load_balancing_loss
from coat_jax.numerics.recipes import MeshAxes
from tests.comparing import assert_close, jit
from tests.layers.mesh.placing import assert_sharded_like, place
from tests.matrices import quick

D, F, E, K, B, T = 64, 96, 8, 2, 8, 8
NAMES = ("data", "fsdp", "expert", "tensor")
AXES = MeshAxes(batch=NAMES[:3], tensor="tensor", expert="expert")
SPECS = {
  "gate_up": P("expert", "fsdp", None, "tensor"),
  "down": P("expert", ("tensor", "fsdp")),
}
FP8 = recipes.coat(experts="fp8")


def spec_of(path, p):
  return SPECS.get(path[-1].key, P())


def build(recipe, dtype=jnp.float32):
  """The loss with its gradients and all results, and the parameters."""

  def make(recipe):
    options = dict(normalize=True, norm="layer", use_norm_bias=True)
    options |= dict(dtype=dtype, recipe=recipe, rngs=nnx.Rngs(0))
    return MoE(D, F, E, K, **options)

  graph = nnx.split(nnx.eval_shape(lambda: make(recipe)), nnx.Param)[0]
  single = dataclasses.replace(recipe, axes=None)
  params = nnx.to_pure_dict(nnx.split(make(single), nnx.Param)[1])

  def loss(params, x, dy):
    y, stats = nnx.merge(graph, params)(x)
    return jnp.sum(y * dy) + 3 * load_balancing_loss(stats), (y, stats)

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), params


def arrays():
  return tuple(jax.random.normal(jax.random.key(i), (B, T, D)) for i in (1, 2))


def make_mesh(sizes, kind=AxisType.Auto):
  return jax.make_mesh(sizes, NAMES, axis_types=(kind,) * len(NAMES))


def on_mesh(recipe, sizes, params, x, dy, kind=AxisType.Auto):
  f, _ = build(dataclasses.replace(recipe, axes=AXES))
  mesh = make_mesh(sizes, kind)
  with jax.set_mesh(mesh):
    params = place(mesh, spec_of, params)
    x, dy = place(mesh, lambda *_: P(AXES.batch), (x, dy))
    found = jit(f)(params, x, dy)
  assert_sharded_like(found[1][0], params)
  return found


# As in test_moe: other codes would be seen as 1e-3; what is left is the order
# of sums.
@pytest.mark.parametrize(
  "recipe, sizes, kind",
  quick(
    1,
    [
      (FP8, (1, 2, 2, 2), AxisType.Auto),
      (recipes.coat(), (1, 2, 2, 2), AxisType.Auto),
      (recipes.bf16(), (1, 2, 2, 2), AxisType.Auto),
      (FP8, (2, 1, 4, 1), AxisType.Auto),
      (recipes.coat(), (2, 1, 4, 1), AxisType.Auto),
      (recipes.bf16(), (1, 2, 4, 1), AxisType.Auto),
      (recipes.fp8_linear(), (1, 1, 8, 1), AxisType.Auto),
      (FP8, (2, 1, 2, 2), AxisType.Explicit),
    ],
  ),
)
def test_experts_on_several_devices_match_one_device(recipe, sizes, kind):
  x, dy = arrays()
  f, params = build(recipe)
  wanted = jit(f)(params, x, dy)
  assert_close(on_mesh(recipe, sizes, params, x, dy, kind), wanted, 5e-5)
