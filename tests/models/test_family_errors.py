# SPDX-License-Identifier: Apache-2.0
"""Compares what FP8 changes in each family with what it changes in Llama."""

import functools

import pytest

from coat_jax import ops, recipes
from coat_jax.models import VISION_FAMILIES
from coat_jax.models.config import FAMILIES
from studies import families

# Each error is a few roundings to E4M3, 2.2 % RMS each, of which a family with
# more norms has more: half as much again is what they may add.
TIMES = 1.5

difference = functools.cache(families.difference)


@pytest.mark.slow
@pytest.mark.parametrize(
  "family", [*(f for f in FAMILIES if f != "llama"), *VISION_FAMILIES]
)
def test_fp8_changes_no_family_much_more_than_llama(family):
  llama, found = difference("llama"), difference(family)
  assert found.logits_error <= TIMES * llama.logits_error
  assert found.gradient_error <= TIMES * llama.gradient_error, found.worst
  saved = families.saved_bytes(family, recipes.coat())
  assert saved <= families.saved_bytes(family, recipes.bf16()) / 3


@pytest.mark.slow
def test_wrong_residual_is_noticed(monkeypatch):
  llama, bwd = difference("llama"), ops.activation_bwd_operands
  monkeypatch.setattr(
    ops,
    "activation_bwd_operands",
    lambda dout, parts, **options: bwd(dout, parts[:1] * 2, **options),
  )
  # Its own name: it is not kept for the others.
  found = families.difference("gemma2")
  assert found.gradient_error > 2 * TIMES * llama.gradient_error
