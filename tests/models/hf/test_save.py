# SPDX-License-Identifier: Apache-2.0
"""Tests saved models: exact round trips, and files for other libraries."""

import json
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import Decoder, ModelConfig, load_hf, save_hf
from tests.matrices import quick
from tests.models.hf.folders import (
  DATA,
  FAMILIES,
  by_tensor,
  copied,
  params_of,
  split,
  tensors_of,
)
from train.mesh import make_mesh, parse_mesh

DTYPES = {
  "float32": np.float32,
  "bfloat16": ml_dtypes.bfloat16,
  "float16": np.float16,
}


def bytes_of(folder):
  return {
    name: (x.dtype, x.shape, x.tobytes())
    for name, x in tensors_of(folder).items()
  }


@pytest.mark.parametrize(
  "name, dtype",
  [
    ("llama", "bfloat16"),
    ("olmo", "float16"),
    ("qwen2", "float32"),
    ("phi3", "bfloat16"),
    ("olmo2", "float32"),
    ("gemma3", "bfloat16"),
    pytest.param("gemma2", "float32", marks=pytest.mark.slow),
    ("gpt2", "float16"),
    ("qwen3_moe", "bfloat16"),
    pytest.param("qwen3", "float32", marks=pytest.mark.slow),
    pytest.param("mistral", "float32", marks=pytest.mark.slow),
    pytest.param("llama3_rope", "float32", marks=pytest.mark.slow),
  ],
)
def test_import_then_export_keeps_the_bytes_of_all_tensors(
  name, dtype, tmp_path
):
  source = copied(tmp_path / "a", name, cast=DTYPES[dtype], dtype=dtype)
  save_hf(load_hf(source), tmp_path / "b", like=source)
  assert bytes_of(tmp_path / "b") == bytes_of(source)
  # Saving again gives the same files, and no others.
  save_hf(load_hf(tmp_path / "b"), tmp_path / "c", like=tmp_path / "b")
  files = ("config.json", "model.safetensors")
  assert sorted(os.listdir(tmp_path / "c")) == sorted(files)
  for file in files:
    again = (tmp_path / "c" / file).read_bytes()
    assert again == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_model_without_a_source_is_saved_in_the_given_dtype(dtype, tmp_path):
  config = ModelConfig(
    family="mistral",
    num_layers=2,
    d_model=32,
    d_ff=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=64,
    tied_embeddings=True,
    rope_theta=5e5,
  )
  model = Decoder(config, recipes.bf16(), rngs=nnx.Rngs(0))
  save_hf(model, tmp_path / "m", dtype=dtype)
  loaded = load_hf(tmp_path / "m")
  assert loaded.config == config and loaded.head is None
  want = by_tensor(config, params_of(model))
  found = tensors_of(tmp_path / "m")
  assert found.keys() == want.keys()
  for name, tensor in found.items():
    np.testing.assert_array_equal(tensor, want[name].astype(dtype))
  if dtype == "float32":
    save_hf(model, tmp_path / "default")
    assert bytes_of(tmp_path / "default") == bytes_of(tmp_path / "m")


def test_model_on_a_mesh_is_saved_in_shards(tmp_path):
  mesh = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2"))
  source, out = copied(tmp_path / "a", "qwen2"), tmp_path / "b"
  model = load_hf(split(source), mesh=mesh)
  save_hf(model, out, like=source, max_shard_size=200_000)
  assert bytes_of(out) == bytes_of(source)
  shards = sorted(file.name for file in out.glob("*.safetensors"))
  assert shards == [f"model-0000{i}-of-00003.safetensors" for i in range(1, 4)]
  index = json.loads((out / "model.safetensors.index.json").read_text())
  sizes = [x.nbytes for x in tensors_of(out).values()]
  assert index["metadata"]["total_size"] == sum(sizes)
  assert index["weight_map"].keys() == tensors_of(out).keys()
  assert all((out / shard).stat().st_size < 202_000 for shard in shards)
  again = load_hf(out)  # This checks that the index is right.
  np.testing.assert_array_equal(
    again.layers.mlp.down.kernel[...], model.layers.mlp.down.kernel[...]
  )


def test_unknown_config_keys_and_companion_files_are_copied(tmp_path):
  source = copied(tmp_path / "a", eos_token_id=[2, 7], head_dim=...)
  kept = ("tokenizer.json", "chat_template.jinja", "generation_config.json")
  for name in (*kept, "README.md", "pytorch_model.bin"):
    (source / name).write_text(name)
  save_hf(load_hf(source), tmp_path / "b", like=source, dtype=jnp.bfloat16)
  files = {*kept, "config.json", "model.safetensors"}
  assert {file.name for file in (tmp_path / "b").iterdir()} == files
  assert (tmp_path / "b" / kept[0]).read_text() == kept[0]
  before = json.loads((source / "config.json").read_text())
  after = json.loads((tmp_path / "b" / "config.json").read_text())
  # transformers 4 reads these; version 5 reads `dtype` and `rope_parameters`.
  written = {"rope_theta": 1e4, "torch_dtype": "bfloat16"}
  assert after == before | written | {"dtype": "bfloat16"}


def test_failed_save_leaves_no_files(tmp_path, monkeypatch):
  model, out = load_hf(DATA / "llama"), tmp_path / "folder" / "out"

  def full(descriptor):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patched:
    patched.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
      save_hf(model, out)
  assert list(out.parent.iterdir()) == []
  save_hf(model, out)
  before = out.stat().st_mtime_ns
  with pytest.raises(ValueError, match="must not exist, because nothing is"):
    save_hf(model, out)
  assert out.stat().st_mtime_ns == before
  assert list(out.parent.iterdir()) == [out]


def test_wrong_source_dtype_or_config_is_refused(tmp_path):
  model = load_hf(DATA / "olmo")
  with pytest.raises(ValueError, match="must describe the model to save"):
    save_hf(model, tmp_path / "out", like=DATA / "llama")
  with pytest.raises(ValueError, match="float16, got float64"):
    save_hf(model, tmp_path / "out", dtype="float64")
  shape = dict(num_layers=1, d_model=16, d_ff=16, num_heads=1, num_kv_heads=1)
  own = ModelConfig(family="olmo", vocab_size=8, norm_eps=1e-3, **shape)
  model = Decoder(own, recipes.bf16(), rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="in a olmo, norm_eps must be"):
    save_hf(model, tmp_path / "out")
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", quick(2, FAMILIES))
def test_header_follows_the_safetensors_format(name, tmp_path):
  save_hf(load_hf(DATA / name), tmp_path / "m")
  data = (tmp_path / "m" / "model.safetensors").read_bytes()
  length = int.from_bytes(data[:8], "little")
  header = json.loads(data[8 : 8 + length])
  assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
  place = 0
  for entry in header.values():
    begin, end = entry["data_offsets"]
    assert begin == place and end - begin == 4 * np.prod(entry["shape"])
    place = end
  assert place == len(data) - 8 - length
