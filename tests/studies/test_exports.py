# SPDX-License-Identifier: Apache-2.0
"""Tests `studies.exports`, with a fake instead of transformers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import recipes
from coat_jax.models import generate, load_hf
from studies import exports
from tests.models.hf.folders import DATA


def stand_in(folder, tokens, prompt):
  """Returns our logits and tokens; changes one logit and the last token."""
  model = load_hf(folder, recipe=recipes.bf16(), dtype=jnp.float32)
  logits = np.array(model.logits(jnp.int32(tokens)))
  logits[0, 0, 0] += 0.5 * np.abs(logits).max()
  found = generate(
    model, [prompt], max_new_tokens=exports.NEW_TOKENS, temperature=0.0
  )
  return logits, [*found.tokens[0][:-1], -1]


@pytest.mark.slow
def test_differences_from_transformers_are_found(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(exports, "theirs", stand_in)
  exports.main([str(tmp_path), str(DATA / "gpt2")])
  assert (tmp_path / "gpt2" / "config.json").exists()
  lines = capsys.readouterr().out.splitlines()
  (row,) = (json.loads(line) for line in lines if line.startswith("{"))
  assert row["case"] == {"model": "gpt2"}
  assert 0.2 < row["logits"] <= 0.5
  assert row["greedy"] == exports.NEW_TOKENS - 1
  assert row["moved"] > 1e-4
