# SPDX-License-Identifier: Apache-2.0
"""The share of a step that a plan assigns to each GPU of a mesh."""

import dataclasses

import pytest

from coat_jax import recipes
from train import plan
from train.memory.count import saved_bytes
from train.memory.step import plan as plan_run
from train.presets import PRESETS


def test_each_gpu_plans_its_share_of_sequences_and_vocabulary():
  config = dataclasses.replace(
    PRESETS["llama2_7b"](),
    mesh="data=2,fsdp=2,tensor=2",
    batch=16,
    accumulate=2,
    seq=4096,
  )
  found = plan_run(config)["loss"]
  # 16 sequences / (2 microbatches * 4 GPUs along data and fsdp) = 2.
  tokens = 2 * 4096
  kept = saved_bytes(config.model, recipes.coat(), tensor=2)
  assert found.activations == pytest.approx(32 * kept * tokens, rel=1e-9)
  # With two sequences and half the vocabulary, 2^28 bytes hold the f32 logits
  # of 2097 positions, so 4096 positions are two equal chunks. Logits and the
  # head's gradient are each allocated in f32 and in BF16, and hidden states
  # three times in BF16.
  logits, head = 2 * 2048 * 16000, 4096 * 16000
  assert found.temporary == (4 + 2) * (logits + head) + 3 * 2 * 4096 * tokens


def test_plan_with_an_expert_axis_counts_own_experts_and_no_copies():
  config = dataclasses.replace(
    PRESETS["demo_moe"](), mesh="expert=4,fsdp=2", batch=16, seq=512
  )
  model, tokens = config.model, 2 * 512
  found = plan_run(config)["loss"]
  copies = 2 * model.experts_per_token * model.d_ff * (1 + 2 / 16)
  kept = saved_bytes(model, recipes.coat()) - copies
  wanted = model.num_layers * kept * tokens
  assert found.activations == pytest.approx(wanted, rel=1e-9)
  # Three quarters of the experts are on other GPUs; fsdp halves all weights.
  of_one = dataclasses.replace(config, mesh="fsdp=2", batch=4)
  d, f = model.d_model, model.d_ff
  others = 3 * model.num_experts * d * f * model.num_layers * 4 * 3 // 4 // 2
  assert plan_run(of_one)["loss"].weights - found.weights == others


def test_memory_sizes_are_decimal_unless_written_in_gib():
  assert plan.read_bytes("80GB") == plan.read_bytes("80") == 80 * 10**9
  assert plan.read_bytes("1.5GiB") == 1.5 * 2**30
