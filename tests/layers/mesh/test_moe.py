# SPDX-License-Identifier: Apache-2.0
"""Tests MoE layers on meshes of eight devices."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType

from coat_jax import recipes
from coat_jax.layers import MoE
from coat_jax.recipes import MeshAxes
from tests.comparing import assert_close, jit
from tests.layers.mesh.mixtures import D, F, K, build
from tests.layers.mesh.placing import assert_sharded_like, place
from tests.matrices import quick

E, B, T = 5, 8, 8
CODES = recipes.coat(experts="fp8", weight_cache="codes")
NAMES = ("data", "fsdp", "tensor")
# Five experts cannot be split evenly, so weights' rows and columns are split.
SPECS = {
  "gate_up": P(None, "fsdp", None, "tensor"),
  "down": P(None, ("tensor", "fsdp")),
}


def spec_of(path, p):
  name = jax.tree_util.keystr(path, simple=True, separator="/")
  return next((s for end, s in SPECS.items() if name.endswith(end)), P())


def arrays(shape=(B, T, D)):
  return tuple(jax.random.normal(jax.random.key(i), shape) for i in (1, 2))


# As in test_rule, a different code would cause an error of 1e-3. The tolerance
# of 5e-5 allows only for a different summation order.
@pytest.mark.parametrize(
  "recipe, sizes, kind",
  quick(
    1,
    [
      (recipes.coat(experts="fp8"), (2, 2, 2), AxisType.Auto),
      (recipes.coat(), (2, 2, 2), AxisType.Auto),
      (recipes.coat(experts="fp8"), (1, 8, 1), AxisType.Auto),
      (recipes.coat(experts="fp8"), (2, 2, 2), AxisType.Explicit),
      (CODES, (2, 2, 2), AxisType.Auto),
      (CODES, (2, 2, 2), AxisType.Explicit),
      (recipes.coat(), (1, 8, 1), AxisType.Auto),
      (recipes.coat(), (2, 2, 2), AxisType.Explicit),
      (recipes.bf16(), (2, 2, 2), AxisType.Auto),
      (recipes.bf16(), (2, 2, 2), AxisType.Explicit),
      (recipes.fp8_linear(), (1, 8, 1), AxisType.Auto),
    ],
  ),
)
def test_moe_on_a_mesh_matches_one_device(recipe, sizes, kind):
  x, dy = arrays()
  f, params = build(recipe, E)
  wanted = jit(f)(params, x, dy)
  f, _ = build(dataclasses.replace(recipe, axes=MeshAxes(tensor="tensor")), E)
  mesh = jax.make_mesh(sizes, NAMES, axis_types=(kind,) * 3)
  with jax.set_mesh(mesh):
    params = place(mesh, spec_of, params)
    x, dy = place(mesh, lambda *_: P(("data", "fsdp")), (x, dy))
    found = jit(f)(params, x, dy)
  assert_close(found, wanted, 5e-5)
  assert_sharded_like(found[1][0], params)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [recipes.coat(), CODES, recipes.bf16()])
def test_moe_whose_recipe_has_no_axes_matches_one_device(recipe):
  x, dy = arrays()
  f, params = build(recipe, E)
  wanted = jit(f)(params, x, dy)
  mesh = jax.make_mesh((2, 4), NAMES[:2], axis_types=(AxisType.Explicit,) * 2)
  rows = {"gate_up": P(None, "fsdp"), "down": P(None, "fsdp")}
  with jax.set_mesh(mesh):
    params = place(mesh, lambda path, _: rows.get(path[-1].key, P()), params)
    x, dy = place(mesh, lambda *_: P(("data", "fsdp")), (x, dy))
    found = jit(f)(params, x, dy)
  assert_close(found, wanted, 5e-5)


def test_all_devices_together_save_each_code_once():
  recipe = dataclasses.replace(recipes.coat(), axes=MeshAxes(tensor="tensor"))
  mesh = jax.make_mesh((2, 2, 2), NAMES, axis_types=(AxisType.Auto,) * 3)
  m = nnx.eval_shape(lambda: MoE(D, F, E, K, recipe=recipe, rngs=nnx.Rngs(0)))
  graph, params = nnx.split(m)
  x = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
  with jax.set_mesh(mesh):
    leaves = jax.eval_shape(
      lambda p, x: jax.tree.leaves(
        jax.vjp(lambda p, x: nnx.merge(graph, p)(x), p, x)[1]
      ),
      params,
      x,
    )
  # The codes are the norm's input, and gate and up of K experts per token.
  codes = sum(a.size for a in leaves if a.dtype == recipe.formats.values)
  assert codes == B * T * (D + 2 * K * F)


@pytest.mark.parametrize("recipe", [recipes.coat(), recipes.bf16()])
def test_a_device_sorts_only_copies_of_its_own_tokens(recipe):
  f, params = build(
    dataclasses.replace(recipe, axes=MeshAxes(tensor="tensor")), E
  )
  mesh = jax.make_mesh((2, 2, 2), NAMES, axis_types=(AxisType.Auto,) * 3)
  with jax.set_mesh(mesh):
    program = str(jax.make_jaxpr(f)(params, *arrays()))
  sorted_ = set(re.findall(r"i32\[(\d+)\] = sort\[", program))
  assert sorted_ == {str(B * T * K // 4)}


def test_rows_without_a_sequence_axis_are_refused():
  f, params = build(
    dataclasses.replace(recipes.coat(), axes=MeshAxes(tensor="tensor")), E
  )
  with jax.set_mesh(jax.make_mesh((2, 2, 2), NAMES)):
    x = jnp.ones((B * T, D))
    with pytest.raises(ValueError, match=r"x must be \[B, T, D\], got rows"):
      jax.eval_shape(f, params, x, x)
