# SPDX-License-Identifier: Apache-2.0
"""Tests checkpoints with experts: their keys, and each expert's tensors."""

import json
from pathlib import Path

import numpy as np
import pytest

from coat_jax.models import ModelConfig, load_hf
from coat_jax.models.hf.config import parse_config, write_config
from tests.models.hf.folders import (
  DATA,
  by_tensor,
  copied,
  params_of,
  tensors_of,
)
from train.mesh import make_mesh, parse_mesh

FILE = Path("config.json")
MESHES = ("fsdp=8", "data=2,fsdp=2,tensor=2")
# transformers 4 wrote this file.
QWEN3_30B_A3B = """{
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
  "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
  "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
  "max_position_embeddings": 40960, "max_window_layers": 48,
  "mlp_only_layers": [], "model_type": "qwen3_moe",
  "moe_intermediate_size": 768, "norm_topk_prob": true,
  "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 48, "num_key_value_heads": 4,
  "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
  "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
  "sliding_window": null, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
  "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
}"""
GOLDEN = json.loads((DATA / "qwen3_moe" / "config.json").read_text())


def test_keys_of_a_file_are_kept():
  before = json.loads(QWEN3_30B_A3B)
  config, dtype = parse_config(FILE, before)
  after = write_config(config, dtype, before)
  before.pop("rope_scaling")
  assert {key: after[key] for key in before} == before


def test_experts_are_read_under_both_names_and_written():
  config, _ = parse_config(FILE, json.loads(QWEN3_30B_A3B))
  assert config == ModelConfig(
    family="qwen3_moe",
    num_layers=48,
    d_model=2048,
    d_ff=768,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    rope_theta=1e6,
    norm_eps=1e-6,
    num_experts=128,
    experts_per_token=8,
    normalize_experts=True,
    auxiliary_loss=0.001,
  )
  found = dict(GOLDEN)
  config, dtype = parse_config(FILE, found)
  assert found["num_local_experts"] == config.num_experts == 4
  assert (config.d_ff, config.experts_per_token) == (64, 2)
  assert not config.normalize_experts and config.auxiliary_loss == 0.001
  # transformers 4 reads num_experts, and transformers 5 num_local_experts.
  written = write_config(config, dtype)
  assert written["num_experts"] == written["num_local_experts"] == 4
  for key in ("num_experts_per_tok", "norm_topk_prob", "num_local_experts"):
    found.pop(key)
  config, _ = parse_config(FILE, found)
  assert (config.num_experts, config.experts_per_token) == (128, 8)


@pytest.mark.parametrize(
  "keys, words",
  [
    ({"decoder_sparse_step": 2}, "decoder_sparse_step must be 1, got 2"),
    ({"mlp_only_layers": [0]}, "mlp_only_layers must be [], got [0]"),
    (
      {"num_experts": 8},
      "must be equal to num_experts (8), got 4; correct the",
    ),
    ({"num_experts_per_tok": 5}, "which must be at most num_experts, got 4"),
    ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ({"router_aux_loss_coef": -1}, "must be a number at least 0"),
  ],
)
def test_unsupported_mixtures_are_refused_by_name(keys, words):
  with pytest.raises(ValueError) as caught:
    parse_config(FILE, GOLDEN | keys)
  message = str(caught.value)
  assert message.startswith("load_hf: config.json") and "\n" not in message
  assert words in message, message


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["", *MESHES])
@pytest.mark.parametrize("is_fused", [False, True])
def test_each_expert_is_loaded_into_its_place(mesh, is_fused, tmp_path):
  """In some files, the tensors of a layer's experts are stacked."""
  folder = copied(tmp_path / "m", "qwen3_moe")
  want = tensors_of(folder)
  if is_fused:
    experts = {name: None for name in want if ".experts." in name}
    for i in range(2):
      at = f"model.layers.{i}.mlp.experts."
      gate, up, down = (
        np.stack([want[f"{at}{e}.{x}_proj.weight"] for e in range(4)])
        for x in ("gate", "up", "down")
      )
      experts[f"{at}gate_up_proj"] = np.concatenate([gate, up], axis=1)
      experts[f"{at}down_proj"] = down
    folder = copied(tmp_path / "fused", "qwen3_moe", tensors=experts)
    assert len(tensors_of(folder)) == len(want) - 2 * 4 * 3 + 2 * 2
  model = load_hf(folder, mesh=make_mesh(parse_mesh(mesh)))
  params = params_of(model)
  found = by_tensor(model.config, params)
  assert found.keys() == want.keys()
  for name, tensor in found.items():
    np.testing.assert_array_equal(tensor, want[name], err_msg=name)
  # Check one expert without the library's tables of names.
  up = want["model.layers.1.mlp.experts.2.up_proj.weight"]
  down = want["model.layers.1.mlp.experts.2.down_proj.weight"]
  mlp = params["layers"]["mlp"]
  np.testing.assert_array_equal(mlp["gate_up"][1, 2, :, 1], up.T)
  np.testing.assert_array_equal(mlp["down"][1, 2], down.T)
  if mesh:
    devices = {"fsdp=8": 8}.get(mesh, 4)
    for x in (mlp["gate_up"], mlp["down"]):
      assert x.addressable_shards[0].data.size == x.size // devices
