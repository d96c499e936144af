# SPDX-License-Identifier: Apache-2.0
"""Compiles decoder layers and their gradients for an H200."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.layers import with_weight_cache
from coat_jax.models.config import ModelConfig, Remat
from coat_jax.models.layer import TransformerLayer
from coat_jax.models.remat import checkpointed
from tests.aot.compiling import (
  compile_for_h200,
  custom_calls,
  fp8_matmul_calls,
  fp8_moves,
  instructions,
  launches,
  temporary_bytes,
)

pytestmark = pytest.mark.aot

# All matrices have different shapes, two query heads share a key head, and d_ff
# is 11 * 64.
SMALL = ModelConfig(
  family="llama",
  num_layers=1,
  d_model=512,
  d_ff=704,
  num_heads=8,
  num_kv_heads=4,
  vocab_size=256,
)
LLAMA2_7B = ModelConfig(
  family="llama",
  num_layers=1,
  d_model=4096,
  d_ff=11008,
  num_heads=32,
  num_kv_heads=32,
  vocab_size=32000,
)


def compiled_layers(*args, **kwargs):
  """Compiles `layer_program` for an H200."""
  return compile_for_h200(*layer_program(*args, **kwargs))


def layer_program(
  config,
  recipe,
  shape,
  depth=None,
  param_dtype=jnp.float32,
  remat: Remat = "none",
):
  """Returns a function and the shapes of its arguments.

  The function computes the output and the gradients of one layer, or of a scan
  over `depth` layers.
  """

  def build(rngs):
    return TransformerLayer(config, recipe, rngs=rngs)

  if depth is not None:
    build = nnx.split_rngs(splits=depth)(nnx.vmap(build))
  layers = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
  graph, params = nnx.split(layers, nnx.Param)
  params = jax.tree.map(
    lambda p: jax.ShapeDtypeStruct(p.shape, param_dtype),
    nnx.to_pure_dict(params),
  )
  x = jax.ShapeDtypeStruct((*shape, config.d_model), jnp.bfloat16)

  def forward(params, x):
    layers = with_weight_cache(nnx.merge(graph, params))
    if depth is None:
      return layers(x)

    run = lambda x, layer: layer(x)  # noqa: E731
    run = checkpointed(run, remat, recipe, is_gathering=False)
    return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)

  def gradients(params, x, g):
    y, vjp = jax.vjp(forward, params, x)
    return y, vjp(g)

  return gradients, params, x, x


RECIPES = {
  "minimal": recipes.coat(),
  "fp8 attention": recipes.coat(attention="fp8"),
  "coat": recipes.coat(residuals="coat"),
  "codes": recipes.coat(weight_cache="codes"),
  "fp8_linear": recipes.fp8_linear(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_each_matmul_is_one_fp8_call_without_a_transpose(name):
  compiled = compiled_layers(SMALL, RECIPES[name], (2, 256))
  # qkv, out, gate_up and down have three matmuls each: forward, dgrad, wgrad.
  assert len(fp8_matmul_calls(compiled)) == 4 * 3
  # With residuals="coat", XLA multiplies two saved FP8 values, and transposes
  # the result, because no kernel writes it transposed.
  assert len(fp8_moves(compiled)) == (1 if name == "coat" else 0)
  assert not [x for x in instructions(compiled) if x.opcode == "dot"]
  calls = custom_calls(compiled)
  assert calls["__cudnn$fmhaSoftmax"] == 1
  assert calls["__cudnn$fmhaSoftmaxBackward"] == 1


def test_layer_has_few_fusions_and_launches():
  recipe = recipes.coat(weight_cache="none")
  found = compiled_layers(
    LLAMA2_7B, recipe, (4, 2048), param_dtype=jnp.bfloat16
  )
  # XLA's fusions compute the codes of four weights (4), the scales of 12
  # matmuls (8, because four fusions compute two scales each), RoPE's angles
  # (2), heads (2), and sums of the gradients of two norms (2).
  assert launches(found).count("fusion") <= 18
  assert len(launches(found)) <= 74


def test_layer_compiles_with_xla_alone():
  recipe = recipes.coat(implementation="xla")
  calls = custom_calls(compiled_layers(SMALL, recipe, (2, 256)))
  assert not re.search("mosaic|fmha", " ".join(calls))


@pytest.mark.parametrize("cache", ["none", "scale", "codes"])
def test_scan_stores_codes_of_all_weights_only_with_the_codes_cache(cache):
  depth = 3
  recipe = recipes.coat(weight_cache=cache)
  compiled = compiled_layers(SMALL, recipe, (2, 256), depth)
  d, f = SMALL.d_model, SMALL.d_ff
  stacked = {
    match[0]
    for x in instructions(compiled)
    for match in re.findall(r"((?:f8e\w+|bf16)\[([\d,]+)\])", x.shape)
    if sorted(map(int, match[1].split(",")))
    == sorted([depth, d, 2 * f])  # gate_up
  }
  assert bool(stacked) == (cache == "codes"), stacked


U = 4 * 2048 * 4096 * 2  # Bytes of BF16 [B, T, D] with B = 4 and T = 2048.


@pytest.mark.slow
@pytest.mark.parametrize("attention, limit", [("bf16", 8.9), ("fp8", 7.4)])
def test_memory_of_a_scan_grows_little_per_layer(attention, limit):
  recipe = recipes.coat(attention=attention)
  few, many = (
    temporary_bytes(compiled_layers(LLAMA2_7B, recipe, (4, 2048), depth))
    for depth in (8, 16)
  )
  assert (many - few) / 8 <= limit * U


@pytest.mark.parametrize(
  "remat, again", [("full", 3), ("fp8_layer", 3), ("fp8", 2)]
)
def test_second_forward_has_no_unused_matmul(remat, again):
  compiled = compiled_layers(SMALL, recipes.coat(), (2, 256), 3, remat=remat)
  # The second forward pass repeats qkv, out and gate_up. If the inputs of both
  # norms are saved, it repeats only qkv and gate_up.
  assert len(fp8_matmul_calls(compiled)) == 4 * 3 + again
  assert custom_calls(compiled)["__cudnn$fmhaSoftmax"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
  "remat, limit", [("full", 1.01), ("fp8_layer", 0.57), ("fp8", 1.14)]
)
def test_memory_of_a_scan_with_remat_grows_little_per_layer(remat, limit):
  few, many = (
    temporary_bytes(
      compiled_layers(LLAMA2_7B, recipes.coat(), (4, 2048), depth, remat=remat)
    )
    for depth in (8, 24)
  )
  assert (many - few) / 16 <= limit * U
