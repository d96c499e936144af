# SPDX-License-Identifier: Apache-2.0
"""The share of a step that a plan gives to each GPU of a mesh, in numbers."""

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
  # 16 sequences of two microbatches on the four GPUs of data and fsdp.
  tokens = 2 * 4096
  kept = saved_bytes(config.model, recipes.coat(), tensor=2)
  assert found.activations == pytest.approx(32 * kept * tokens, rel=1e-9)
  # 2^28 bytes of f32 logits of half the vocabulary are 2097 positions of two
  # sequences: two even chunks of 4096. Logits and the head's gradient in f32,
  # both in BF16 too; three copies of hidden states in BF16.
  logits, head = 2 * 2048 * 16000, 4096 * 16000
  assert found.temporary == (4 + 2) * (logits + head) + 3 * 2 * 4096 * tokens


def test_memory_is_decimal_unless_it_is_written_gib():
  assert plan.read_bytes("80GB") == plan.read_bytes("80") == 80 * 10**9
  assert plan.read_bytes("1.5GiB") == 1.5 * 2**30
