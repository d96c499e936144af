# SPDX-License-Identifier: Apache-2.0
"""The planner's parts: what is counted, how it is sharded, what fits.

That the sum is the compiler's is tests/aot/test_plan.py.
"""

import dataclasses
import doctest

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from coat_jax import plan, recipe
from coat_jax.plan import DecoderShape, Load, Memory, step

SHAPE = DecoderShape(
  num_layers=4,
  d_model=256,
  d_ff=768,
  num_heads=8,
  num_kv_heads=2,
  vocab_size=4096,
)
PARAMS = {"w": jax.ShapeDtypeStruct((4, 1000, 250), jnp.float32)}
STATE = {"codes": jax.ShapeDtypeStruct((4, 1000, 250), jnp.uint8)}


def moments(recipe, shape=SHAPE, **load):
  load = {"batch": 2, "seq": 512} | load
  return plan.plan_step(
    shape, recipe, Load(**load), params=PARAMS, optimizer_state=STATE
  )


def test_device_bytes_are_of_a_shard():
  mesh = AbstractMesh((2, 4), ("data", "fsdp"))
  where = NamedSharding(mesh, jax.P(None, "fsdp"))
  split = jax.ShapeDtypeStruct((3, 8), jnp.bfloat16, sharding=where)
  whole = jax.ShapeDtypeStruct((3, 8), jnp.float32)
  assert plan.device_bytes({"a": split, "b": [whole]}) == 3 * 2 * 2 + 3 * 8 * 4
  assert plan.device_bytes(jnp.zeros((5, 2), jnp.uint8)) == 10


def test_state_and_weights_are_counted_as_they_are():
  for memory in moments(recipe.coat()).values():
    assert memory.weights == 4_000_000 and memory.optimizer == 1_000_000


def test_gradients_come_layer_by_layer():
  found = moments(recipe.coat())
  layers = 4 * 4 * (256 * (384 + 256) + 3 * 256 * 768)
  assert found["loss"].gradients == 0
  assert found["backward"].gradients == layers
  assert found["embedding"].gradients == 4_000_000
  # Sums over microbatches are there all the time.
  for name, memory in moments(recipe.coat(), accumulate=2).items():
    assert memory.gradients == found[name].gradients + 4_000_000


def test_activations_are_those_of_all_layers():
  r = recipe.coat()
  found = moments(r)
  want = 4 * 2 * 512 * plan.kept_bytes(SHAPE, r)
  assert found["loss"].activations == found["backward"].activations == want
  assert found["embedding"].activations == 0
  halved = moments(r, tensor=2, is_on_mesh=True)["loss"].activations
  assert halved == want / 2


def test_bf16_casts_of_weights_are_kept_where_they_are_not_gathered():
  alone, others = (
    moments(recipe.bf16(), is_on_mesh=is_on_mesh)["loss"].activations
    for is_on_mesh in (False, True)
  )
  assert alone - others == 2 * 4 * sum(SHAPE.matrices.values())


@pytest.mark.parametrize("fsdp, accumulate", [(1, 1), (4, 1), (4, 2)])
def test_cached_codes_are_split_like_weights(fsdp, accumulate):
  load = dict(fsdp=fsdp, accumulate=accumulate, is_on_mesh=True)
  scale, codes = (
    moments(recipe.coat(weight_cache=cache), **load)["backward"].total
    for cache in ("scale", "codes")
  )
  # After the only microbatch's forward one of two layouts is left.
  want = accumulate * 4 * sum(SHAPE.matrices.values()) / fsdp
  assert abs(codes - scale - want) <= 1


def test_checkpoints_keep_less_and_compute_a_layer_again():
  r = recipe.coat()
  none, full = moments(r), moments(r, remat="full")
  assert full["loss"].activations == 4 * 2 * 512 * 2 * 256
  # A layer's own arrays are there once more.
  assert full["backward"].temporary > none["backward"].temporary
  # x, q with k and v, the attention's output, gate and up.
  dots = plan.kept_bytes(SHAPE, recipe.bf16(), remat="dots")
  assert dots == 2 * (256 + 384 + 256 + 2 * 768)


@pytest.mark.parametrize("is_layer_norm", [False, True])
@pytest.mark.parametrize("group_size", [16, 100])
def test_codes_in_front_of_a_second_forward(is_layer_norm, group_size):
  r = recipe.coat(group_size=group_size)
  shape = dataclasses.replace(SHAPE, is_layer_norm=is_layer_norm)
  codes = 256 + 2 * {16: 16, 100: 3}[group_size]
  layer = plan.kept_bytes(shape, r, remat="fp8_layer")
  assert layer == codes
  # Two norms, with f32 statistics.
  blocks = plan.kept_bytes(shape, r, remat="fp8")
  assert blocks == 2 * (codes + (8 if is_layer_norm else 4))
  for remat, whole in (("fp8_layer", layer), ("fp8", blocks)):
    assert plan.kept_bytes(shape, r, remat=remat, tensor=2) == whole / 2
  # Of BF16 layers too each GPU keeps its own positions.
  bf16 = plan.kept_bytes(shape, recipe.bf16(), remat="fp8_layer", tensor=2)
  assert bf16 == (256 + 2 * 16) / 2


@pytest.mark.parametrize(
  "remat, units", [("full", 1), ("fp8_layer", 0.57), ("fp8", 1.14)]
)
def test_units_of_llama2_7b(remat, units):
  shape = dataclasses.replace(SHAPE, d_model=4096, d_ff=11008, num_heads=32)
  kept = plan.kept_bytes(shape, recipe.coat(), remat=remat)
  assert 0.98 * units <= kept / (2 * 4096) <= units


def test_the_loss_grows_with_the_logits_that_are_held():
  r = recipe.coat()
  some, more = (
    moments(r, loss_positions=positions)["loss"].temporary
    for positions in (128, 256)
  )
  assert more - some == (4 + 2) * 2 * 128 * 4096
  whole = moments(r, seq=64)["loss"].temporary
  # With 64 positions; weights and their gradient; hidden states of the tokens.
  assert whole == 6 * 2 * 64 * 4096 + 6 * 256 * 4096 + 3 * 2 * 128 * 256


def test_the_fullest_moment_is_the_peak():
  few, many = Memory(1, 2, 3, 4, 5), Memory(5, 4, 3, 2, 2)
  assert few.total == 15
  assert plan.fullest({"a": few, "b": many}) == ("b", many)


@pytest.mark.parametrize(
  "memory, most", [(9, 0), (10, 1), (61, 6), (1000, 100)]
)
def test_largest_batch(memory, most):
  assert (
    plan.largest_batch(lambda n: Memory(0, 0, 0, 10 * n, 0), memory) == most
  )


def test_examples():
  assert doctest.testmod(step).failed == 0
