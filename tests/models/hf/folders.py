# SPDX-License-Identifier: Apache-2.0
"""Provides checkpoints written by transformers, and variants of them."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from coat_jax.models.hf.tensors import parts
from coat_jax.optimizer.masks import leaf_path

# transformers 5.17 (torch 2.11, CPU, f32) wrote the checkpoints in DATA, with
# random weights. Each expected.npz has tokens, logits, the loss, and the norm
# of each tensor's gradient.
ROOT = Path(__file__).parents[3]
DATA = Path(__file__).parents[2] / "data" / "hf"
GATE_UP = "experts.gate_up_proj"
FAMILIES = (
  "llama",
  "olmo2",
  "gpt2",
  "qwen2",
  "llama3_rope",
  "mistral",
  "olmo",
  "phi3",
  "qwen3",
  "gemma2",
  "gemma3",
  "qwen3_moe",
)


def tensors_of(folder):
  """Reads all tensors of a folder by name, with the safetensors package."""
  found = {}
  for file in sorted(folder.glob("*.safetensors")):
    found |= load_file(file)
  return found


def copied(path, name="llama", *, tensors=None, cast=None, **keys):
  """Copies a checkpoint into a new folder, with changes.

  `keys` replaces keys of config.json, or removes those whose value is `...`.
  `tensors` replaces tensors by name, or removes those that are None. `cast` is
  a dtype for all tensors.
  """
  folder = shutil.copytree(DATA / name, path)
  file = folder / "config.json"
  found = json.loads(file.read_text()) | keys
  file.write_text(json.dumps({k: v for k, v in found.items() if v is not ...}))
  if tensors is not None or cast is not None:
    all_of_it = tensors_of(folder) | (tensors or {})
    all_of_it = {k: v for k, v in all_of_it.items() if v is not None}
    if cast is not None:
      all_of_it = {k: v.astype(cast) for k, v in all_of_it.items()}
    save_file(all_of_it, folder / "model.safetensors")
  return folder


def split(folder, count=3):
  """Splits a checkpoint into shards with an index, as transformers does."""
  tensors = tensors_of(folder)
  (folder / "model.safetensors").unlink()
  places = {}
  for i in range(count):
    file = f"model-{i + 1:05}-of-{count:05}.safetensors"
    names = sorted(tensors)[i::count]
    save_file({name: tensors[name] for name in names}, folder / file)
    places |= dict.fromkeys(names, file)
  write_index(folder, places)
  return folder


def write_index(folder, places):
  index = {"metadata": {"total_size": 0}, "weight_map": places}
  file = folder / "model.safetensors.index.json"
  file.write_text(json.dumps(index))


def params_of(model):
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def by_tensor(config, params):
  """Maps names of a checkpoint's tensors to parameters or gradients."""
  leaves = {leaf_path(keys): x for keys, x in jax.tree.leaves_with_path(params)}
  found = {}
  for part in parts(config, params):
    x = leaves[part.path]
    x = x if part.layer is None else x[part.layer]
    tensors = part.layout.unpack(x, part.split)
    found |= dict(zip(part.tensors, tensors, strict=True))
  return found


def fused(norms):
  """Merges the norms of expert tensors that transformers stores as one."""
  squares = {}
  for name, norm in norms.items():
    name = re.sub(r"experts\.\d+\.(gate|up)_proj.weight", GATE_UP, name)
    name = re.sub(r"experts\.\d+\.down_proj.weight", "experts.down_proj", name)
    squares[name] = squares.get(name, 0) + norm**2
  return {name: np.sqrt(x) for name, x in squares.items()}


def expected(name):
  with np.load(DATA / name / "expected.npz") as file:
    return dict(file)
