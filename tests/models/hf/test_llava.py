# SPDX-License-Identifier: Apache-2.0
"""Tests LLaVA checkpoints: config.json, tensor names, and exact round trips."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import (
  VisionLanguageModel,
  load_hf,
  save_hf,
)
from coat_jax.models.hf.config import (
  parse_config,
  read_config,
  write_config,
)
from coat_jax.models.hf.load import check_tensors
from tests.models.hf.folders import DATA, copied, params_of, tensors_of

LLAVA = DATA / "llava"
# LLaVA 1.5 7B was published with these keys.
PUBLISHED = {
  "architectures": ["LlavaForConditionalGeneration"],
  "ignore_index": -100,
  "image_token_index": 32000,
  "model_type": "llava",
  "pad_token_id": 32001,
  "projector_hidden_act": "gelu",
  "text_config": {
    "_name_or_path": "lmsys/vicuna-7b-v1.5",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "vocab_size": 32064,
  },
  "tie_word_embeddings": False,
  "torch_dtype": "float16",
  "transformers_version": "4.36.0.dev0",
  "vision_config": {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "model_type": "clip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "projection_dim": 768,
    "vocab_size": 32000,
  },
  "vision_feature_layer": -2,
  "vision_feature_select_strategy": "default",
  "vocab_size": 32064,
}


def parse(tmp_path, found):
  return parse_config(tmp_path / "config.json", found)


def abstract(config):
  make = lambda: VisionLanguageModel(  # noqa: E731
    config, recipes.bf16(), rngs=nnx.Rngs(0)
  )
  return params_of(nnx.eval_shape(make))


def test_published_config_is_read(tmp_path):
  config, dtype = parse(tmp_path, PUBLISHED)
  text, vision = config.text, config.vision
  assert dtype == np.float16 and config.tokens_each == 576
  assert (text.num_layers, text.d_model, text.d_ff) == (32, 4096, 11008)
  assert (text.vocab_size, text.norm_eps) == (32064, 1e-5)
  assert (vision.num_layers, vision.d_model, vision.d_ff) == (24, 1024, 4096)
  assert (config.image_token, config.feature_layer) == (32000, -2)
  full, _ = parse(
    tmp_path, PUBLISHED | {"vision_feature_select_strategy": "full"}
  )
  assert full.tokens_each == 577
  for each in (config, full):
    written = write_config(each, np.dtype(np.float16))
    assert parse(tmp_path, written) == (each, np.float16)
  kept = write_config(config, np.dtype(np.float16), PUBLISHED)
  assert kept["ignore_index"] == -100
  assert kept["text_config"]["_name_or_path"] == "lmsys/vicuna-7b-v1.5"


def test_text_config_overrides_tied_embeddings(tmp_path):
  text = PUBLISHED["text_config"]
  for top, own, tied in ((True, ..., True), (False, True, True)):
    found = PUBLISHED | {"tie_word_embeddings": top}
    if own is not ...:
      found["text_config"] = text | {"tie_word_embeddings": own}
    assert parse(tmp_path, found)[0].text.tied_embeddings is tied


@pytest.mark.parametrize(
  "change, message",
  [
    ({"model_type": "llava_next"}, "model_type must be one of llama"),
    ({"projector_hidden_act": "relu"}, "projector_hidden_act must be gelu"),
    ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer must be a wh"),
    ({"vision_feature_layer": -26}, "feature_layer must be from -25 to 24"),
    ({"vision_feature_select_strategy": "cls"}, "must be one of default, full"),
    ({"image_token_index": 32064}, "image_token must be at most 32063, got"),
    ({"image_grid_pinpoints": [[1, 2]]}, "image_grid_pinpoints is not supp"),
    ({"text_config": 3}, "text_config must be an object"),
    ({"vision_config": {"model_type": "pixtral"}}, "got pixtral; other values"),
  ],
)
def test_unsupported_models_are_refused(tmp_path, change, message):
  with pytest.raises(
    ValueError, match=rf"load_hf: .*config\.json: .*{message}"
  ):
    parse(tmp_path, PUBLISHED | change)


def test_decoders_that_scale_embeddings_are_refused():
  config, _ = read_config(LLAVA)
  gemma = dict(family="gemma2", window=8, full_every=2)
  with pytest.raises(ValueError, match="does not scale its embeddings, got g"):
    dataclasses.replace(config, text=dataclasses.replace(config.text, **gemma))


@pytest.mark.slow
def test_import_then_export_keeps_all_tensors(tmp_path):
  (source := copied(tmp_path / "a", "llava")).joinpath(
    "preprocessor_config.json"
  ).write_text("{}")
  model = load_hf(source, param_dtype=jnp.float32)
  assert model.tower.layers.mlp.recipe == recipes.coat()
  assert model.decoder.layers.mlp.recipe == recipes.coat()
  save_hf(model, tmp_path / "b", like=source, max_shard_size=200_000)
  assert (tmp_path / "b" / "preprocessor_config.json").is_file()
  assert read_config(tmp_path / "b") == read_config(LLAVA)
  found, golden = tensors_of(tmp_path / "b"), tensors_of(LLAVA)
  assert found.keys() == golden.keys()
  for name, x in golden.items():
    assert found[name].dtype == x.dtype
    np.testing.assert_array_equal(found[name], x, err_msg=name)
  # There are more shards than parts of the model: tower, projector and decoder.
  assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 3
  with pytest.raises(ValueError, match="must describe the model to save"):
    save_hf(model, tmp_path / "c", like=_other(tmp_path))


def _other(tmp_path):
  keys = json.loads((LLAVA / "config.json").read_text())
  return copied(tmp_path / "o", "llava", **keys | {"image_token_index": 3})


def test_tensor_names_of_all_versions_are_read(tmp_path):
  config, _ = read_config(LLAVA)
  params, golden = abstract(config), tensors_of(LLAVA)
  old = {
    name.replace("vision_tower.", "vision_tower.vision_model."): x
    for name, x in golden.items()
  }
  folder = copied(tmp_path / "m", "llava", tensors=dict.fromkeys(golden) | old)
  assert check_tensors(folder, config, params).keys() == golden.keys()
  lost = copied(
    tmp_path / "l",
    "llava",
    tensors={"multi_modal_projector.linear_2.bias": None},
  )
  with pytest.raises(
    ValueError, match=r"got no multi_modal_pr.*linear_2\.bias"
  ):
    check_tensors(lost, config, params)
  more = {"image_newline": np.ones(64, np.float32)}
  folder = copied(tmp_path / "s", "llava", tensors=more)
  with pytest.raises(ValueError, match="got image_newline too"):
    check_tensors(folder, config, params)


def test_tied_head_may_be_stored_beside_the_embedding(tmp_path):
  golden = tensors_of(LLAVA)
  keys = json.loads((LLAVA / "config.json").read_text())
  keys["text_config"]["tie_word_embeddings"] = True
  head = "language_model.lm_head.weight"
  same = golden["language_model.model.embed_tokens.weight"]
  twice = copied(tmp_path / "t", "llava", tensors={head: same}, **keys)
  config, _ = read_config(twice)
  params = abstract(config)
  assert "head" not in params["decoder"]
  check_tensors(twice, config, params)
  other = copied(tmp_path / "o", "llava", tensors={head: same + 1}, **keys)
  with pytest.raises(ValueError, match=f"got different {head} and language_mo"):
    check_tensors(other, config, params)
