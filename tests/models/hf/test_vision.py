# SPDX-License-Identifier: Apache-2.0
"""Tests checkpoints of vision towers: exact round trips, and errors."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from coat_jax import recipes
from coat_jax.models import (
  VisionConfig,
  VisionLanguageModel,
  VisionTower,
  load_hf,
  save_hf,
)
from coat_jax.models.hf.config import write_config
from tests.matrices import quick
from tests.models.hf.folders import DATA, copied, params_of, tensors_of

FAMILIES = ("clip_vision", "vit", "siglip_vision")


def loaded(folder):
  return load_hf(folder, recipe=recipes.bf16())


def bytes_of(folder):
  return {
    name: (x.dtype, x.shape, x.tobytes())
    for name, x in tensors_of(folder).items()
  }


@pytest.mark.parametrize("name", quick(1, FAMILIES))
def test_import_then_export_keeps_the_bytes_of_all_tensors(name, tmp_path):
  cast = dict(cast=ml_dtypes.bfloat16, dtype="bfloat16")
  source = copied(tmp_path / "a", name, **cast)
  save_hf(loaded(source), tmp_path / "b", like=source)
  assert bytes_of(tmp_path / "b") == bytes_of(source)
  before, after = (
    json.loads((tmp_path / each / "config.json").read_text()) for each in "ab"
  )
  assert after == before | {"torch_dtype": "bfloat16"}
  # Without a source folder, the same tower is written.
  save_hf(loaded(source), tmp_path / "c", dtype="bfloat16")
  assert bytes_of(tmp_path / "c") == bytes_of(source)
  assert loaded(tmp_path / "c").config == loaded(source).config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip_vision", "siglip_vision"])
def test_tower_is_read_from_a_whole_model(name, tmp_path):
  """Published checkpoints also contain the text model."""
  tower, folder = loaded(DATA / name), tmp_path / "m"
  folder.mkdir()
  tensors = {f"vision_model.{k}": x for k, x in tensors_of(DATA / name).items()}
  tensors |= {
    "text_model.final_layer_norm.bias": np.ones(64, np.float32),
    "logit_scale": np.ones((), np.float32),
  }
  save_file(tensors, folder / "model.safetensors")
  keys = json.loads((DATA / name / "config.json").read_text())
  del keys["architectures"]
  whole = name.removesuffix("_vision")
  keys = {
    "model_type": whole,
    "architectures": [{"clip": "CLIPModel", "siglip": "SiglipModel"}[whole]],
    "vision_config": keys,
    "text_config": {"hidden_size": 64},
  }
  (folder / "config.json").write_text(json.dumps(keys))
  found = loaded(folder)
  assert found.config == tower.config
  for a, b in zip(
    *(nnx.to_flat_state(nnx.state(x, nnx.Param)) for x in (found, tower)),
    strict=True,
  ):
    np.testing.assert_array_equal(a[1][...], b[1][...])
  save_hf(found, tmp_path / "b", like=folder)
  assert bytes_of(tmp_path / "b") == bytes_of(DATA / name)
  assert loaded(tmp_path / "b").config == tower.config


@pytest.mark.slow
def test_vit_without_classes_is_loaded_and_saved(tmp_path):
  """A ViTModel has no prefix in its names and no classes."""
  tensors = {
    k.removeprefix("vit."): x
    for k, x in tensors_of(DATA / "vit").items()
    if not k.startswith("classifier")
  }
  rng = np.random.default_rng(0)
  kernel = rng.normal(size=(64, 64)).astype(np.float32)
  tensors["pooler.dense.weight"] = kernel
  tensors["pooler.dense.bias"] = kernel[0]
  absent = dict.fromkeys(tensors_of(DATA / "vit"))
  folder = copied(
    tmp_path / "a",
    "vit",
    tensors=absent | tensors,
    architectures=["ViTModel"],
    id2label=...,
    label2id=...,
  )
  tower = loaded(folder)
  assert tower.config.num_classes is None
  pool = params_of(tower)["pool"]["linear"]
  np.testing.assert_array_equal(pool["kernel"], kernel.T)
  save_hf(tower, tmp_path / "b", like=folder)
  assert bytes_of(tmp_path / "b") == bytes_of(folder)


@pytest.mark.slow
def test_tower_may_have_no_pool(tmp_path):
  kept = [
    k for k in tensors_of(DATA / "siglip_vision") if k.startswith("head.")
  ]
  folder = copied(
    tmp_path / "a",
    "siglip_vision",
    tensors=dict.fromkeys(kept),
    vision_use_head=False,
  )
  tower = loaded(folder)
  assert tower.pool is None and not tower.config.has_pool
  save_hf(tower, tmp_path / "b")
  assert bytes_of(tmp_path / "b") == bytes_of(folder)
  assert loaded(tmp_path / "b").config == tower.config


@pytest.mark.parametrize(
  "name, keys, words",
  [
    ("vit", dict(hidden_act="relu"), "hidden_act must be gelu, got relu"),
    ("vit", dict(qkv_bias=False), "qkv_bias must be True, got False"),
    (
      "vit",
      dict(id2label=[]),
      r"id2label must be an object of class names by number, got \[\]",
    ),
    ("vit", dict(patch_sise=8), "did you mean patch_size"),
    ("vit", dict(patch_size=8.5), "patch_size must be a whole number, got 8.5"),
    ("vit", dict(patch_size=30), "at most image_size, got 30 and 28"),
    ("clip_vision", dict(architectures=["CLIPTextModel"]), "CLIPTextModel"),
    ("clip_vision", dict(model_type="clip"), "vision_config must be an obj"),
    ("siglip_vision", dict(vision_use_head=1), "must be true or false, got 1"),
    ("siglip_vision", dict(vision_use_head=False), "got head.attention.in_pr"),
  ],
)
def test_unsupported_towers_are_refused(name, keys, words, tmp_path):
  folder = copied(tmp_path / "m", name, **keys)
  with pytest.raises(ValueError, match=words):
    loaded(folder)


def test_config_decides_the_class_of_the_model(tmp_path):
  kinds = dict.fromkeys(FAMILIES, VisionTower)
  for name, kind in (kinds | {"llava": VisionLanguageModel}).items():
    assert type(load_hf(DATA / name)) is kind


def test_names_of_image_classes_are_written(tmp_path):
  config = VisionConfig(
    family="vit",
    num_layers=1,
    d_model=8,
    d_ff=8,
    num_heads=1,
    image_size=4,
    patch_size=2,
    num_classes=2,
  )
  dtype = np.dtype("float32")
  named = write_config(config, dtype, labels=("cat", "dog"))
  assert named["id2label"] == {"0": "cat", "1": "dog"}
  assert named["label2id"] == {"cat": 0, "dog": 1}
  assert write_config(config, dtype, named)["id2label"]["1"] == "dog"
  for wrong in (("cat",), ("cat", "cat")):
    with pytest.raises(ValueError, match="must be 2 distinct names"):
      write_config(config, dtype, labels=wrong)
  without = dataclasses.replace(config, num_classes=None)
  tower = VisionTower(without, recipe=recipes.bf16(), rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="must be 0 distinct names"):
    save_hf(tower, tmp_path / "out", labels=("cat", "dog"))
  assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_like_must_describe_the_tower(tmp_path):
  config = VisionConfig(
    family="vit",
    num_layers=1,
    d_model=8,
    d_ff=8,
    num_heads=1,
    image_size=4,
    patch_size=2,
    num_classes=3,
  )
  tower = VisionTower(config, recipe=recipes.bf16(), rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="must describe the model to save"):
    save_hf(tower, tmp_path / "m", like=DATA / "vit")
  save_hf(tower, tmp_path / "m")
  assert loaded(tmp_path / "m").config == config
