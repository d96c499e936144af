# SPDX-License-Identifier: Apache-2.0
"""Compiles grouped matmuls for an H200: one kernel, and no copies."""

import collections
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType

from benchmarks.aot import h200_devices
from coat_jax import recipes
from coat_jax.layers import MoE
from coat_jax.pallas.mosaic import grouped_product
from coat_jax.recipes import MeshAxes
from tests.aot.compiling import (
  compile_for_h200,
  custom_calls,
  instructions,
  temporary_bytes,
)

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(
  "e, d, f, m",
  [
    (128, 2048, 1536, 65536),  # gate and up of Qwen3-30B-A3B
    (8, 256, 384, 128),
  ],
)
@pytest.mark.parametrize(
  "kernel, a, b", [("fwd", "x", "w"), ("dgrad", "g", "w"), ("wgrad", "x", "g")]
)
def test_grouped_matmul_is_one_kernel(kernel, a, b, e, d, f, m):
  shapes = {"x": (m, d), "g": (m, f), "w": (e, d, f)}
  specs = [jax.ShapeDtypeStruct(shapes[name], jnp.bfloat16) for name in (a, b)]
  product = getattr(grouped_product, f"grouped_{kernel}")
  compiled = compile_for_h200(
    product, *specs, jax.ShapeDtypeStruct((e,), jnp.int32)
  )
  assert custom_calls(compiled)["mosaic_gpu_v2"] == 1
  # Temporary memory holds only the table of tiles. XLA alone would expand x to
  # [m, e, d].
  assert temporary_bytes(compiled) < 2**17


def test_expert_gradients_are_scattered_without_a_transpose():
  e, d, f, devices = 8, 256, 384, 4
  mesh = jax.make_mesh(
    (devices,), ("fsdp",), (AxisType.Auto,), devices=h200_devices(devices)
  )
  recipe = dataclasses.replace(
    recipes.coat(), axes=MeshAxes(batch=("fsdp",), fsdp="fsdp")
  )
  make = lambda: MoE(d, f, e, 2, recipe=recipe, rngs=nnx.Rngs(0))  # noqa: E731
  graph, params = nnx.split(nnx.eval_shape(make))

  def spec(path, p):
    is_of_experts = path[0].key in ("gate_up", "down")
    where = P(None, "fsdp") if is_of_experts else P()
    sharding = jax.NamedSharding(mesh, where)
    return jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding)

  params = jax.tree.map_with_path(spec, nnx.to_pure_dict(params))
  x = jax.ShapeDtypeStruct(
    (devices, 256, d),
    jnp.bfloat16,
    sharding=jax.NamedSharding(mesh, P("fsdp")),
  )

  def gradients(params, x):
    run = lambda params: nnx.merge(graph, params)(x)[0]  # noqa: E731
    y, backward = jax.vjp(run, params)
    return backward(y)

  compiled = compile_for_h200(gradients, params, x, mesh=mesh)
  sizes = {e * d * 2 * f, e * d * f}
  found = collections.Counter(
    each.opcode
    for each in instructions(compiled)
    if (shape := re.match(r"f32\[([\d,]+)\]", each.shape))
    and math.prod(map(int, shape[1].split(","))) in sizes
  )
  # Only two kernels write whole gradients: one for gate_up, and one for down.
  assert found.pop("custom-call") == 2
  assert not found.keys() - {"bitcast", "parameter", "get-tuple-element"}
