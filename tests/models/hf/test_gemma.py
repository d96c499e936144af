# SPDX-License-Identifier: Apache-2.0
"""Tests config.json of Gemma 2 and 3, as transformers 4 and 5 write it."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from coat_jax.models import ModelConfig
from coat_jax.models.hf.config import parse_config, write_config
from tests.models.hf.folders import DATA

FILE = Path("config.json")
SLIDING, FULL = "sliding_attention", "full_attention"
# transformers 4 wrote these files.
GEMMA2_9B = """{
  "architectures": ["Gemma2ForCausalLM"], "attention_bias": false,
  "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "bos_token_id": 2,
  "cache_implementation": "hybrid", "eos_token_id": 1,
  "final_logit_softcapping": 30.0, "head_dim": 256,
  "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 8192, "model_type": "gemma2",
  "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
  "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
  "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
  "torch_dtype": "float32", "transformers_version": "4.42.0.dev0",
  "use_cache": true, "vocab_size": 256000
}"""
GEMMA3_12B = """{
  "architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
  "attention_dropout": 0.0, "attn_logit_softcapping": null,
  "cache_implementation": "hybrid", "final_logit_softcapping": null,
  "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 3840, "initializer_range": 0.02, "intermediate_size": 15360,
  "max_position_embeddings": 131072, "model_type": "gemma3_text",
  "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8,
  "query_pre_attn_scalar": 224, "rms_norm_eps": 1e-06,
  "rope_local_base_freq": 10000.0,
  "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
  "rope_theta": 1000000.0, "sliding_window": 1024,
  "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
  "use_cache": true, "vocab_size": 262208
}"""
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA3_ROPES = {
  SLIDING: {"rope_type": "default", "rope_theta": 1e4},
  FULL: LINEAR | {"rope_theta": 1e6},
}


def golden(name):
  return json.loads((DATA / name / "config.json").read_text())


def read(found):
  return parse_config(FILE, found)[0]


def test_gemma2_is_read():
  config, dtype = parse_config(FILE, json.loads(GEMMA2_9B))
  assert config == ModelConfig(
    family="gemma2",
    num_layers=42,
    d_model=3584,
    d_ff=14336,
    num_heads=16,
    num_kv_heads=8,
    vocab_size=256000,
    norm_eps=1e-6,
    tied_embeddings=True,
    head_dim=256,
    window=4096,
    full_every=2,
    attention_soft_cap=50.0,
    logits_soft_cap=30.0,
  )
  assert dtype == "float32"
  assert config.kinds_of_layers == (0, 1) * 21


def test_gemma3_is_read_in_both_forms():
  config = read(json.loads(GEMMA3_12B))
  assert config.query_scalar == 224
  assert config.attention_options["query_scale"] == 224**-0.5
  assert (config.window, config.full_every, config.num_layers) == (1024, 6, 48)
  assert (config.rope_theta, config.window_rope_theta) == (1e6, 1e4)
  assert config.rope_scaling == "linear,factor=8.0"
  assert config.attention_soft_cap is config.logits_soft_cap is None
  new = json.loads(GEMMA3_12B) | {"rope_parameters": GEMMA3_ROPES}
  for key in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
    new.pop(key)
  new.pop("sliding_window_pattern")
  kinds = ([SLIDING] * 5 + [FULL]) * 8
  new |= {"_sliding_window_pattern": 6, "layer_types": kinds}
  assert read(new) == config
  # If a file gives no base for RoPE, transformers uses 1e6 for layers without
  # a window and 1e4 for layers with one.
  old = json.loads(GEMMA3_12B)
  for key in ("rope_theta", "rope_local_base_freq"):
    old.pop(key)
    assert read(old) == config
  ropes = {SLIDING: {"rope_type": "default"}, FULL: LINEAR}
  assert read(new | {"rope_parameters": ropes}) == config


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "9b", "12b"])
def test_written_config_suits_transformers_4_and_5(name):
  known = {"9b": json.loads(GEMMA2_9B), "12b": json.loads(GEMMA3_12B)}
  before = known[name] if name in known else golden(name)
  config, dtype = parse_config(FILE, before)
  written = json.loads(json.dumps(write_config(config, dtype)))
  assert read(written) == config
  assert written["query_pre_attn_scalar"] == before["query_pre_attn_scalar"]
  kinds = written["layer_types"]
  assert kinds == before.get("layer_types", kinds)
  # transformers 4 ignores rope_parameters and layer_types, and repeats kinds of
  # layers with the family's period.
  old = {k: v for k, v in written.items() if k != "rope_parameters"}
  old.pop("layer_types")
  assert read(old) == config
  # transformers 5 reads the bases of RoPE only from rope_parameters.
  new = {k: v for k, v in written.items() if k != "rope_scaling"}
  for key in ("rope_theta", "rope_local_base_freq"):
    new.pop(key, None)
  assert read(new) == config
  like = write_config(config, dtype, before)
  assert {key: like[key] for key in before} == before


def kinds_of(types, **keys):
  found = golden("gemma2") | {"layer_types": types, **keys}
  config = read(found | {"num_hidden_layers": len(types)})
  assert read(write_config(config, jnp.dtype("float32"))) == config
  return config.full_every, config.window


def test_period_of_layers_follows_from_layer_types():
  a, b = SLIDING, FULL
  assert kinds_of([a, b, a, b, a]) == (2, 24)
  assert kinds_of([a, a, b, a, a]) == (3, 24)
  assert kinds_of([a, a, b], sliding_window_pattern=2) == (3, 24)
  assert kinds_of([a]) == (2, 24)
  assert kinds_of([a, a, a]) == (4, 24)  # All layers have a window.
  assert kinds_of([b, b]) == (1, 24)
  assert kinds_of([b, b], sliding_window=None) == (None, None)


@pytest.mark.parametrize(
  "name, keys, words",
  [
    ("gemma2", {"layer_types": [FULL, SLIDING]}, "must be sliding_attention e"),
    ("gemma2", {"layer_types": [SLIDING]}, "must be a list of 2 types, one"),
    ("gemma2", {"layer_types": ["chunked", FULL]}, "layers in another order"),
    (
      "gemma2",
      {"layer_types": "full"},
      "a list of 2 types, one per layer, got full",
    ),
    ("gemma3", {"_sliding_window_pattern": 2.5}, "a whole number above 0"),
    ("gemma2", {"sliding_window": None}, "full_every needs a window for"),
    (
      "gemma2",
      {"use_bidirectional_attention": True},
      "use_bidirectional_attention must be False, got True",
    ),
    ("gemma2", {"hidden_activation": "gelu"}, "must be gelu_pytorch_tanh"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_scalar must be a whole"),
    ("gemma2", {"final_logit_softcapping": 0}, "logits_soft_cap must be a num"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "must be None, got 50.0"),
    (
      "gemma3",
      {"rope_parameters": {"rope_type": "default"}},
      "an object with no keys but sliding_attention and full_attention",
    ),
    (
      "gemma3",
      {"rope_parameters": GEMMA3_ROPES | {SLIDING: LINEAR}},
      "of sliding_attention must be of type 'default', got linear,factor=8.0",
    ),
    ("gemma2", {"rope_local_base_freq": 1e4}, "freq is not supported"),
    ("llama", {"sliding_window_pattern": 6}, "pattern is not supported"),
    (
      "gemma3",
      {"model_type": "gemma3"},
      "got gemma3; other values are not supported yet",
    ),
  ],
)
def test_unsupported_gemmas_are_refused_by_name(name, keys, words):
  with pytest.raises(ValueError) as caught:
    read(golden(name) | keys)
  message = str(caught.value)
  assert message.startswith("load_hf: config.json") and "\n" not in message
  assert words in message, message


def test_equal_ropes_become_one_base():
  same = LINEAR | {"rope_theta": 2e4}
  found = golden("gemma3") | {"rope_parameters": {SLIDING: same, FULL: same}}
  config = read(found)
  assert (config.rope_theta, config.window_rope_theta) == (2e4, None)
  assert read(write_config(config, jnp.dtype("float32"))) == config
