# SPDX-License-Identifier: Apache-2.0
"""The parts of a plan: what is counted, how it is sharded, what fits.

tests/aot/test_plan.py compares the total with the compiler's.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from benchmarks import training_step
from coat_jax import recipes
from tests.matrices import quick
from tests.train.memory.runs import DEMO_MOE, Case
from train.memory.count import saved_bytes
from train.memory.step import (
  AbstractState,
  Memory,
  device_bytes,
  fullest,
  largest,
  plan,
)
from train.presets import PRESETS

ROWS = Path(__file__).parents[3] / "docs" / "rows"
SIZES = dict(d_model=256, d_ff=768, num_heads=8, num_kv_heads=2)
SMALL = Case("demo", 1_000_000, 2, 512, vocab_size=4096, **SIZES)
LAYERS = 4 * (256 * (384 + 256) + 3 * 256 * 768)


def test_device_bytes_count_one_shard():
  mesh = AbstractMesh((2, 4), ("data", "fsdp"))
  where = NamedSharding(mesh, jax.P(None, "fsdp"))
  split = jax.ShapeDtypeStruct((3, 8), jnp.bfloat16, sharding=where)
  whole = jax.ShapeDtypeStruct((3, 8), jnp.float32)
  assert device_bytes({"a": split, "b": [whole]}) == 3 * 2 * 2 + 3 * 8 * 4
  assert device_bytes(jnp.zeros((5, 2), jnp.uint8)) == 10


def test_gradients_grow_during_the_backward_pass():
  found = SMALL.plan("minimal")
  assert {memory.weights for memory in found.values()} == {4_000_000}
  assert found["loss"].gradients == 0
  assert found["backward"].gradients == 4 * LAYERS
  assert found["embedding"].gradients == 4_000_000
  # Sums over microbatches stay allocated during the whole step.
  for name, memory in SMALL.plan("minimal", accumulate=2).items():
    assert memory.gradients == found[name].gradients + 4_000_000


def test_activations_of_all_layers_are_counted():
  found = SMALL.plan("minimal")
  want = 4 * SMALL.kept("minimal")
  assert found["loss"].activations == found["backward"].activations == want
  assert found["embedding"].activations == 0
  halved = SMALL.plan("minimal", 4, tensor=2)["loss"].activations
  assert halved == want / 2


def test_bf16_casts_of_weights_are_kept_unless_gathered():
  alone, others = (
    SMALL.plan("bf16", gpus)["loss"].activations for gpus in (1, 4)
  )
  assert alone - others == 2 * LAYERS


def test_tensor_axis_does_not_split_the_residual_stream_in_bf16():
  whole, half = (
    saved_bytes(SMALL.model, recipes.bf16(), tensor=n) for n in (1, 2)
  )
  # A layer saves two norms' inputs and normalized values in f32, and the
  # operands of two matmuls in BF16.
  stream = (4 * 4 + 2 * 2) * 256
  assert half == stream + (whole - stream) / 2


@pytest.mark.parametrize("gpus, accumulate", [(1, 1), (4, 1), (4, 2)])
def test_cached_codes_are_split_like_weights(gpus, accumulate):
  scale, codes = (
    SMALL.plan("minimal", gpus, accumulate=accumulate, weight_cache=cache)
    for cache in ("scale", "codes")
  )
  # The codes have two layouts. With only one microbatch, one of them is freed
  # after the forward pass.
  want = accumulate * LAYERS / gpus
  assert abs(codes["backward"].total - scale["backward"].total - want) <= 1


@pytest.mark.parametrize("experts, accumulate", [(1, 1), (1, 2), (2, 1)])
def test_cached_codes_of_experts_are_counted(experts, accumulate):
  scale, codes = (
    plan(
      dataclasses.replace(
        DEMO_MOE.config,
        mesh=f"expert={experts}" if experts > 1 else "",
        accumulate=accumulate,
        experts="fp8",
        weight_cache=cache,
      ),
      AbstractState(*[jax.ShapeDtypeStruct((1000,), jnp.float32)] * 2),
    )
    for cache in ("scale", "codes")
  )
  model, d = DEMO_MOE.model, DEMO_MOE.model.d_model
  gate_up = DEMO_MOE.gate_up / experts
  want = accumulate * (DEMO_MOE.qkv + d * d + 1.5 * gate_up)
  if experts > 1:  # The backward pass also reads the columns of gate_up.
    want += gate_up
  found = codes["backward"].total - scale["backward"].total
  assert abs(found - model.num_layers * want) <= 1


def test_checkpoints_save_less_and_recompute_a_layer():
  none, full = (SMALL.plan("minimal", remat=x) for x in ("none", "full"))
  assert full["loss"].activations == 4 * 2 * 512 * 2 * 256
  # Recomputation adds the arrays of one layer.
  assert full["backward"].temporary > none["backward"].temporary
  # remat="dots" saves x, q, k, v, the attention's output, gate and up.
  dots = saved_bytes(SMALL.model, recipes.bf16(), remat="dots")
  assert dots == 2 * (256 + 384 + 256 + 2 * 768)


@pytest.mark.parametrize("is_layer_norm", [False, True])
@pytest.mark.parametrize("group_size", quick(1, [100, 16]))
def test_fp8_checkpoints_save_codes_of_inputs(is_layer_norm, group_size):
  r = recipes.coat(group_size=group_size)
  family = "olmo" if is_layer_norm else "llama"
  model = dataclasses.replace(SMALL.model, family=family)
  codes = 256 + 2 * {16: 16, 100: 3}[group_size]
  layer = saved_bytes(model, r, remat="fp8_layer")
  assert layer == codes
  # remat="fp8" saves codes of two norms' inputs, and f32 statistics.
  blocks = saved_bytes(model, r, remat="fp8")
  assert blocks == 2 * (codes + (8 if is_layer_norm else 4))
  for remat, whole in (("fp8_layer", layer), ("fp8", blocks)):
    assert saved_bytes(model, r, remat=remat, tensor=2) == whole / 2
  # In BF16 layers too, each GPU saves only its own positions.
  bf16 = saved_bytes(model, recipes.bf16(), remat="fp8_layer", tensor=2)
  assert bf16 == (256 + 2 * 16) / 2


@pytest.mark.parametrize(
  "remat, ratio", [("full", 1), ("fp8_layer", 0.57), ("fp8", 1.14)]
)
def test_checkpoint_has_the_given_ratio_to_the_residual_stream(remat, ratio):
  model = PRESETS["llama2_7b"]().model
  kept = saved_bytes(model, recipes.coat(), remat=remat)
  assert 0.98 * ratio <= kept / (2 * 4096) <= ratio


def test_loss_allocates_logits_of_one_chunk():
  # The loss allocates logits of 64 positions of 2 sequences, the head, its
  # gradient and hidden states.
  found = Case("demo", 1_000_000, 2, 64, vocab_size=4096, **SIZES)
  whole = found.plan("minimal")["loss"].temporary
  assert whole == 6 * 2 * 64 * 4096 + 6 * 256 * 4096 + 3 * 2 * 128 * 256


def test_fullest_point_has_the_largest_total():
  few, many = Memory(1, 2, 3, 4, 5), Memory(5, 4, 3, 2, 2)
  assert few.total == 15
  assert fullest({"a": few, "b": many}) == ("b", many)


@pytest.mark.parametrize("megabytes", [1, 20, 33, 200])
def test_largest_batch_fits_and_one_more_does_not(megabytes):
  config = PRESETS["demo"]()
  most = largest(config, megabytes * 10**6)

  def peak(batch):
    return fullest(plan(dataclasses.replace(config, batch=batch)))[1].total

  assert most == 0 or peak(most) <= megabytes * 1e6
  assert peak(most + 1) > megabytes * 1e6


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, most", [("plan", 0.046), ("plan_remat", 0.117), ("lean", 0.04)]
)
def test_plans_are_near_the_rows_of_compiled_steps(name, most):
  for line in (ROWS / f"{name}.jsonl").read_text().splitlines():
    row = json.loads(line)
    case = dict(row["case"])
    preset, variant = case.pop("preset"), case.pop("variant")
    gpus, _ = case.pop("gpus"), case.pop("compiled_for")
    mesh = f"fsdp={gpus}" if gpus > 1 else ""
    config = training_step.configure(preset, variant, mesh=mesh, **case)
    planned = fullest(plan(config))[1].total
    assert planned == pytest.approx(row["peak_bytes"], rel=most), row
