# SPDX-License-Identifier: Apache-2.0
"""Presets train on as many tokens as the papers say."""

import pytest

from train.presets import PRESETS

TOKENS = {
  "llama_60m": 1.3e9,
  "llama_130m": 2.6e9,
  "olmo_1b": 2e12,
  "olmo_7b": 2.46e12,
  "gpt2": 3e11,
  "llama2_7b": 2e12,
  "llama2_13b": 2e12,
  "llama_30b": 1.4e12,
  "llama3_8b": 15e12,
  "gemma2_2b": 2e12,
  "gemma2_9b": 8e12,
  "qwen3_30b_a3b": 30e12,
}


@pytest.mark.parametrize("name", TOKENS)
def test_presets_train_on_the_published_tokens(name):
  config = PRESETS[name]()
  # Papers give two or three digits.
  tokens = config.steps * config.batch * config.seq
  assert tokens == pytest.approx(TOKENS[name], rel=0.01)


def test_no_published_preset_is_left_out():
  own = {"demo", "demo_gpu", "demo_moe", "finetune"}
  assert PRESETS.keys() - own == TOKENS.keys()
