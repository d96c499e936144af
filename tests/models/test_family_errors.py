# SPDX-License-Identifier: Apache-2.0
"""Compares the errors of FP8 in each family with those in Llama."""

import functools

import pytest

from coat_jax import ops, recipes
from coat_jax.models import VISION_FAMILIES
from coat_jax.models.config import FAMILIES
from studies import families

# An error comes from a few roundings to E4M3, with an RMS of 2.2 % each. A
# family with more norms has more roundings, so its errors may be 1.5 times as
# large.
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
def test_wrong_saved_array_causes_a_large_error(monkeypatch):
  llama, bwd = difference("llama"), ops.activation_bwd_operands
  monkeypatch.setattr(
    ops,
    "activation_bwd_operands",
    lambda dout, parts, **options: bwd(dout, parts[:1] * 2, **options),
  )
  # Do not call the cached `difference`, because other tests would get this.
  found = families.difference("gemma2")
  assert found.gradient_error > 2 * TIMES * llama.gradient_error
