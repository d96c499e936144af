# SPDX-License-Identifier: Apache-2.0
"""Checks what H200s exchange if a mixture's experts are spread over them."""

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
from coat_jax.recipes import MeshAxes
from tests.aot.compiling import compile_for_h200, instructions

pytestmark = pytest.mark.aot

# Each device has one sequence. No array of tokens has as many values as the
# weights of all experts, so the test recognizes these weights by their size.
D, F, E, K, B, T, DEVICES = 256, 384, 8, 2, 4, 640, 4


def compiled_gradients(recipe):
  axes = MeshAxes(batch=("expert",), fsdp=None, expert="expert")
  recipe = dataclasses.replace(recipe, axes=axes)
  mesh = jax.make_mesh(
    (DEVICES,), ("expert",), (AxisType.Auto,), devices=h200_devices(DEVICES)
  )
  make = lambda: MoE(D, F, E, K, recipe=recipe, rngs=nnx.Rngs(0))  # noqa: E731
  graph, params = nnx.split(nnx.eval_shape(make))

  def placed(path, p):
    is_of_experts = path[0].key in ("gate_up", "down")
    where = jax.NamedSharding(mesh, P("expert") if is_of_experts else P())
    return jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=where)

  params = jax.tree.map_with_path(placed, nnx.to_pure_dict(params))
  where = jax.NamedSharding(mesh, P("expert"))
  x = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16, sharding=where)

  def gradients(params, x):
    run = lambda params, x: nnx.merge(graph, params)(x)[0]  # noqa: E731
    y, backward = jax.vjp(run, params, x)
    return y, backward(y)

  return compile_for_h200(gradients, params, x, mesh=mesh)


def exchanged(compiled):
  """Counts ragged all-to-alls by dtype and row width."""
  found = collections.Counter()
  for each in instructions(compiled):
    if each.opcode.removesuffix("-start") == "ragged-all-to-all":
      dtype, _, width = re.findall(r"(\w+)\[(\d+),(\d+)\]", each.shape)[0]
      found[dtype, int(width)] += 1
  return found


# Tokens are sent in both passes; outputs, their gradients and the gradients of
# tokens are sent once. Tokens for BF16 experts have one scale per 16 values.
WANTED = {
  "fp8": {("f8e4m3fn", D): 2, ("f8e5m2", D): 1, ("bf16", D): 2},
  "bf16": {("f8e4m3fn", D): 2, ("bf16", D // 16): 2, ("bf16", D): 3},
}


@pytest.mark.parametrize("experts", ["fp8", "bf16"])
def test_tokens_are_sent_as_codes_and_experts_stay(experts):
  compiled = compiled_gradients(recipes.coat(experts=experts))
  # Both passes also send the tokens' routing weights in f32, and the backward
  # pass sends the gradients of routing weights.
  assert exchanged(compiled) == {**WANTED[experts], ("f32", 1): 3}
  # No device has all experts' weights or gradients, in any format.
  whole = {E * D * 2 * F, E * D * F}
  for each in instructions(compiled):
    for sizes in re.findall(r"\[([\d,]+)\]", each.shape):
      assert math.prod(map(int, sizes.split(","))) not in whole, each.text
