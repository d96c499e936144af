# SPDX-License-Identifier: Apache-2.0
"""Tests reading and writing config.json, and errors for unsupported keys."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from coat_jax.layers import LinearScaling, Llama3Scaling, YarnScaling
from coat_jax.models import VISION_FAMILIES, ModelConfig
from coat_jax.models.config import FAMILIES
from coat_jax.models.hf.config import parse_config, write_config
from coat_jax.models.hf.config_tables import CONFIGS
from coat_jax.models.hf.tensor_tables import TENSORS
from tests.models.hf.folders import DATA
from tests.models.hf.published import GPT2, LLAMA2_7B, MISTRAL, QWEN2_05B
from train.presets import PRESETS

FILE = Path("config.json")


def golden(name="llama"):
  return json.loads((DATA / name / "config.json").read_text())


def test_llama2_matches_the_preset():
  config, dtype = parse_config(FILE, json.loads(LLAMA2_7B))
  assert config == PRESETS["llama2_7b"]().model
  assert dtype == "float16"


def test_qwen2_mistral_olmo_and_gpt2_are_read():
  config, dtype = parse_config(FILE, json.loads(QWEN2_05B))
  assert config == ModelConfig(
    family="qwen2",
    num_layers=24,
    d_model=896,
    d_ff=4864,
    num_heads=14,
    num_kv_heads=2,
    vocab_size=151936,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=True,
  )
  assert dtype == jnp.bfloat16
  config, _ = parse_config(FILE, json.loads(MISTRAL))
  assert (config.head_dim, config.head_width) == (128, 128)
  assert (config.rope_theta, config.num_kv_heads) == (1e6, 8)
  found = golden("olmo") | {"clip_qkv": 8.0}
  config, _ = parse_config(FILE, found)
  assert config.clip_qkv == 8 and config.norm_eps == 1e-5
  config, _ = parse_config(FILE, json.loads(GPT2))
  preset = PRESETS["gpt2"]().model
  assert config == dataclasses.replace(preset, vocab_size=50257)
  found = golden("gpt2") | {"activation_function": "gelu", "n_inner": 128}
  config, _ = parse_config(FILE, found)
  assert (config.gelu, config.d_ff) == ("erf", 128)
  assert parse_config(FILE, golden("olmo"))[0].clip_qkv is None


def test_every_family_is_in_all_tables():
  assert FAMILIES.keys() | VISION_FAMILIES.keys() == TENSORS.keys()
  assert TENSORS.keys() | {"llava"} == CONFIGS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_written_presets_are_read_unchanged(name):
  config = PRESETS[name]().model
  written = write_config(config, jnp.dtype("bfloat16"))
  found = json.loads(json.dumps(written))
  assert parse_config(FILE, found) == (config, jnp.bfloat16)
  # transformers 4 ignores these keys.
  found.pop("rope_parameters", None)
  found.pop("dtype")
  assert parse_config(FILE, found) == (config, jnp.bfloat16)


@pytest.mark.parametrize(
  "name, like, want",
  [
    ("llama2_7b", None, 512),
    ("llama2_7b", json.loads(LLAMA2_7B), 4096),
    ("gpt2", None, None),
  ],
)
def test_context_length_is_written_if_the_source_has_none(name, like, want):
  config = PRESETS[name]().model
  found = write_config(config, jnp.dtype("float16"), like, max_length=512)
  assert found.get("max_position_embeddings") == want
  assert parse_config(FILE, found) == (config, jnp.float16)
  without = write_config(config, jnp.dtype("float16"))
  assert "max_position_embeddings" not in without


SPELLED = json.loads(GPT2) | {
  "activation_function": "gelu_pytorch_tanh",
  "n_inner": None,
}


@pytest.mark.parametrize(
  "text", [LLAMA2_7B, QWEN2_05B, MISTRAL, GPT2, json.dumps(SPELLED)]
)
def test_keys_of_a_file_are_kept(text):
  before = json.loads(text)
  config, dtype = parse_config(FILE, before)
  after = write_config(config, dtype, before)
  before.pop("rope_scaling", None)
  assert {key: after[key] for key in before} == before


LLAMA31 = {
  "factor": 8.0,
  "high_freq_factor": 4.0,
  "low_freq_factor": 1.0,
  "original_max_position_embeddings": 8192,
  "rope_type": "llama3",
}
V4 = {"rope_parameters": ...}


@pytest.mark.parametrize(
  "rope, scaling",
  [
    (
      LLAMA31,
      Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
      ),
    ),
    ({"type": "linear", "factor": 2.5}, LinearScaling(factor=2.5)),
    (
      {"rope_type": "yarn", "factor": 4.0, "beta_fast": None},
      YarnScaling(factor=4.0, original_max_position_embeddings=256),
    ),
    (
      {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": True,
      },
      YarnScaling(
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale=0.707,
        mscale_all_dim=1.0,
      ),
    ),
  ],
)
def test_rope_scaling_is_read_in_both_forms_and_written(rope, scaling):
  old = golden() | {"rope_scaling": rope, "rope_theta": 5e5}
  old.pop("rope_parameters")
  new = golden() | {"rope_parameters": rope | {"rope_theta": 5e5}}
  for found in (old, new):
    config, dtype = parse_config(FILE, found)
    assert (config.scaling, config.rope_theta) == (scaling, 5e5)
    written = json.loads(json.dumps(write_config(config, dtype)))
    assert parse_config(FILE, written)[0] == config
    # transformers 4 ignores this key.
    written.pop("rope_parameters")
    assert parse_config(FILE, written)[0] == config
  assert parse_config(FILE, new | {"rope_scaling": rope}) == (config, dtype)
  for other in ({**rope, "factor": 64.0}, {"type": "default"}):
    with pytest.raises(ValueError, match="must be equal to rope_parameters"):
      parse_config(FILE, new | {"rope_scaling": other})


@pytest.mark.parametrize(
  "keys", [{}, dict(rope_scaling={"rope_type": "linear", "factor": 2.0})]
)
def test_partial_rope_is_read_in_both_forms_and_written(keys):
  old = golden("phi3") | {"partial_rotary_factor": 0.75, "rope_theta": 1e4}
  old = {k: v for k, v in (old | keys).items() if k != "rope_parameters"}
  new = golden("phi3")
  new["rope_parameters"] = new["rope_parameters"] | keys.get("rope_scaling", {})
  new["rope_parameters"]["partial_rotary_factor"] = 0.75
  for found in (old, new):
    config, dtype = parse_config(FILE, found)
    assert config.rotary_dim == 12  # A head has 16 channels.
    assert (config.scaling is None) == (not keys)
    written = json.loads(json.dumps(write_config(config, dtype, found)))
    assert parse_config(FILE, written)[0] == config
    written.pop("rope_parameters")  # transformers 4 ignores this.
    assert parse_config(FILE, written)[0] == config
  # A model without partial RoPE drops the source's partial_rotary_factor.
  whole = dataclasses.replace(config, rotary_dim=None)
  assert parse_config(FILE, write_config(whole, dtype, old))[0] == whole


def test_windows_are_read():
  found = json.loads(MISTRAL) | {"sliding_window": 24}
  assert parse_config(FILE, found)[0].window == 24
  found.pop("sliding_window")
  assert parse_config(FILE, found)[0].window == 4096
  assert parse_config(FILE, json.loads(MISTRAL))[0].window is None
  # Qwen3's config.json contains a window that the model does not use.
  found = golden("qwen3") | {"sliding_window": 24}
  assert parse_config(FILE, found)[0].window is None


@pytest.mark.parametrize(
  "text, words",
  [
    ("ntk,factor=2", "must be one of ('linear', 'llama3', 'yarn'), got 'ntk'"),
    ("linear", "fields factor (optional: none), got none"),
    ("linear,factor=2,base=3", "(optional: none), got factor, base"),
    ("linear,factor", "fields like factor=4, got 'factor'"),
    ("linear,factor=0.5", "factor must be at least 1 and finite, got 0.5"),
    ("linear,factor=inf", "factor must be at least 1 and finite, got inf"),
    ("linear,factor=nan", "factor must be at least 1 and finite, got nan"),
    (
      "yarn,factor=2,original_max_position_embeddings=inf",
      "original_max_position_embeddings must be a whole number, got inf",
    ),
  ],
)
def test_invalid_rope_scaling_is_refused(text, words):
  shape = dataclasses.asdict(parse_config(FILE, golden())[0])
  with pytest.raises(ValueError) as caught:
    ModelConfig(**shape | {"rope_scaling": text})
  assert words in str(caught.value)


@pytest.mark.parametrize(
  "name, keys, words",
  [
    (
      "phi3",
      {"rope_parameters": {"rope_type": "longrope"}},
      "of type 'longrope' is not supported",
    ),
    (
      "llama",
      {**V4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
      "rope_scaling of type 'dynamic' is not supported",
    ),
    (
      "llama",
      {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
      "llama3 must have the fields factor, high_freq_factor, low_freq_factor",
    ),
    (
      "llama",
      {
        "max_position_embeddings": None,
        "rope_parameters": {"rope_type": "yarn", "factor": 8.0},
      },
      "factor, original_max_position_embeddings",
    ),
    (
      "llama",
      {"rope_parameters": {"rope_type": "linear", "factor": "8"}},
      "factor of rope_parameters must be a number, got 8",
    ),
    (
      "llama",
      {"rope_parameters": {"rope_type": "yarn", "truncate": False}},
      "truncate of rope_parameters must be a number, got False",
    ),
    ("llama", {"rope_parameters": {"rope_type": []}}, "of type '[]' is not"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
    (
      "llama",
      {"rope_parameters": {"partial_rotary_factor": 0.5}},
      "partial_rotary_factor of rope_parameters is not supported",
    ),
    (
      "llama",
      {"rope_theta": 5e5},
      "must be one number, got [10000.0, 500000.0]",
    ),
    ("llama", {**V4, "rope_theta": "1"}, "must be one number, got ['1']"),
    (
      "llama",
      {"partial_rotary_factor": 0.5},
      "partial_rotary_factor is not supported, got 0.5",
    ),
    ("phi3", {"partial_rotary_factor": 0.5}, "must be one number, got [1.0, 0"),
    (
      "phi3",
      {**V4, "partial_rotary_factor": -1},
      "partial_rotary_factor must be above 0 and at most 1, got -1",
    ),
    (
      "phi3",
      {**V4, "partial_rotary_factor": 0.7},
      "rotary_dim must be even, because RoPE rotates pairs, and at",
    ),
    (
      "llama",
      {"attention_bias": True},
      "attention_bias must be False, got True",
    ),
    ("llama", {"mlp_bias": True}, "mlp_bias must be False, got True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
    (
      "llama",
      {"attention_dropout": 0.1},
      "attention_dropout must be 0, got 0.1",
    ),
    ("mistral", {"sliding_window": 0}, "window must be a whole number"),
    (
      "mistral",
      {"layer_types": ["sliding_attention"]},
      "or all full_attention, got",
    ),
    ("olmo2", {"attention_bias": True}, "attention_bias must be False"),
    ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop must be 0, got 0.1"),
    (
      "gpt2",
      {"scale_attn_by_inverse_layer_idx": True},
      "scale_attn_by_inverse_layer_idx must be False, got True",
    ),
    (
      "gpt2",
      {"reorder_and_upcast_attn": True},
      "reorder_and_upcast_attn must be False, got True",
    ),
    ("gpt2", {"scale_attn_weights": False}, "must be True, got False"),
    (
      "gpt2",
      {"activation_function": "relu"},
      "must be one of gelu_new, gelu_pytorch_tanh, gelu, got relu",
    ),
    ("gpt2", {"n_positions": ...}, "must have n_positions; copy"),
    ("gpt2", {"n_embd": "64"}, "n_embd must be a whole number"),
    ("gpt2", {"rope_theta": 1e4}, "rope_theta is not supported"),
    ("gpt2", {"hidden_size": 64}, "hidden_size is not supported"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window must be False"),
    (
      "qwen2",
      {"layer_types": ["full_attention", "sliding_attention"]},
      "layer_types must be absent or all full_attention, got ['full",
    ),
    (
      "llama",
      {"qk_layernorm": True},
      "qk_layernorm is not supported, got True",
    ),
    ("llama", {"num_experts": 8}, "num_experts is not supported, got 8"),
    ("llama", {"hiden_size": 8}, "did you mean hidden_size?"),
    (
      "llama",
      {"quantization_config": {}},
      "another library quantized the weights",
    ),
    ("llama", {"auto_map": {"AutoModel": "m.M"}}, "auto_map is not supported"),
    (
      "llama",
      {"model_type": "gpt_neox"},
      "model_type must be one of llama, mi",
    ),
    ("llama", {"model_type": ["llama"]}, "model_type must be one of llama, mi"),
    ("llama", {"model_type": "qwen2"}, "must be [Qwen2ForCausalLM]"),
    (
      "llama",
      {"architectures": ["LlamaForSequenceClassification"]},
      "other classes are not supported",
    ),
    ("llama", {"hidden_size": ...}, "must have hidden_size; copy"),
    ("llama", {"hidden_size": "64"}, "hidden_size must be a whole number"),
    ("llama", {"hidden_size": 2**40}, "d_model must be a whole number"),
    ("llama", {"head_dim": 15}, "head_dim must be even"),
    ("llama", {"num_key_value_heads": 3}, "a multiple of num_kv_heads, got 4"),
    ("llama", {"rms_norm_eps": float("nan")}, "norm_eps must be a number"),
    ("llama", {"tie_word_embeddings": 1}, "must be true or false, got 1"),
    ("llama", {"dtype": "int8"}, "float16, got int8"),
    ("llama", {"dtype": ["a"]}, "float16, got ['a']"),
  ],
)
def test_unsupported_keys_are_refused_by_name(name, keys, words):
  found = json.loads(MISTRAL) if name == "mistral" else golden(name)
  found = {k: v for k, v in (found | keys).items() if v is not ...}
  with pytest.raises(ValueError) as caught:
    parse_config(FILE, found)
  message = str(caught.value)
  assert message.startswith("load_hf: config.json") and "\n" not in message
  assert words in message, message


def test_missing_keys_get_the_defaults_of_transformers():
  found = golden()
  for key in ("head_dim", "num_key_value_heads", "rms_norm_eps", "dtype"):
    found.pop(key)
  found.pop("rope_parameters")
  found.pop("tie_word_embeddings")
  config, dtype = parse_config(FILE, found)
  assert (config.num_kv_heads, config.norm_eps) == (4, 1e-6)
  assert (config.rope_theta, config.tied_embeddings) == (1e4, False)
  assert config.head_dim is None and dtype == "float32"
