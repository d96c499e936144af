# SPDX-License-Identifier: Apache-2.0
"""Tests that another package can add a family: one row in each of 3 tables."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from coat_jax import recipes
from coat_jax.models import (
  FAMILIES,
  Decoder,
  Family,
  ModelConfig,
  load_hf,
  save_hf,
)
from coat_jax.models.hf.config_tables import CONFIGS, decoder_table
from coat_jax.models.hf.tensor_tables import TENSORS
from tests.models.hf.folders import params_of, tensors_of

TABLE = {
  "embedding": "embed.weight",
  "layers/attention/qkv/linear": "layers.{i}.qkv",
  "layers/attention/out": "layers.{i}.out",
  "layers/mlp/gate_up": ("layers.{i}.gate", "layers.{i}.up"),
  "layers/mlp/down": "layers.{i}.down",
  "norm": "norm",
  "head": "head.weight",
}


def test_family_of_another_package_is_saved_and_loaded(tmp_path, monkeypatch):
  family = Family(norm="layer", norm_has_scale=False, qkv_bias=True)
  monkeypatch.setitem(FAMILIES, "own", family)
  monkeypatch.setitem(CONFIGS, "own", decoder_table("OwnForCausalLM"))
  monkeypatch.setitem(TENSORS, "own", TABLE)
  config = ModelConfig(
    family="own",
    num_layers=2,
    d_model=16,
    d_ff=24,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=32,
  )
  model = Decoder(config, recipes.bf16(), rngs=nnx.Rngs(0))
  save_hf(model, tmp_path / "own")
  stored = tensors_of(tmp_path / "own")
  assert stored["layers.1.qkv.bias"].shape == (32,)
  up = params_of(model)["layers"]["mlp"]["gate_up"]["kernel"][1, :, 1]
  np.testing.assert_array_equal(stored["layers.1.up.weight"], up.T)
  # `load_hf` finds the family and the class from the folder alone.
  loaded = load_hf(tmp_path / "own", recipe=recipes.bf16())
  assert type(loaded) is Decoder and loaded.config == config
  tokens = jnp.arange(8)[None]
  logits = nnx.jit(lambda model: model.logits(tokens))
  np.testing.assert_array_equal(logits(loaded), logits(model))
