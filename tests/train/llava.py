# SPDX-License-Identifier: Apache-2.0
"""A tiny LLaVA, and images to train it on, for tests of the commands."""

import dataclasses
import json

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from coat_jax import recipes
from coat_jax.models import VisionLanguageModel
from coat_jax.models.hf.config import write_config
from coat_jax.models.hf.tensors import parts
from studies import shapes
from train import finetune
from train.finetune_config import ChatData, FinetuneConfig
from train.optim_config import OptimConfig
from train.pretrained import with_shape

# With these sizes, a gradient's shape shows which part it belongs to.
CONFIG = dataclasses.replace(
  shapes.CONFIG,
  text=dataclasses.replace(
    shapes.CONFIG.text, num_layers=2, d_model=64, d_ff=176, vocab_size=80
  ),
  vision=dataclasses.replace(
    shapes.CONFIG.vision, num_layers=2, d_model=48, d_ff=144
  ),
)
OPTIONS = {
  "batch": 8,
  "seq": 64,
  "steps": 4,
  "eval-every": 2,
  "save-every": 2,
  "held-out": 0.3,
  "samples": 0,
  "optim.group-size": 16,
  "optim.lr": 3e-3,
}


def make(folder):
  """Writes llava/ (a model without weights), shapes.json and its images."""
  shapes.make_rows(folder, 64)
  start = folder / "llava"
  start.mkdir()
  keys = write_config(CONFIG, np.dtype("float32"))
  (start / "config.json").write_text(json.dumps(keys))
  shapes.write_files(start, CONFIG)
  return folder


def add_weights(start):
  """Adds random weights, made by NumPy because JAX would have to compile."""
  make = lambda: VisionLanguageModel(  # noqa: E731
    CONFIG, recipes.bf16(), rngs=nnx.Rngs(0)
  )
  params = nnx.to_pure_dict(nnx.split(nnx.eval_shape(make), nnx.Param)[1])
  draw, found = np.random.default_rng(0), {}
  for part in parts(CONFIG, params):
    for name, x in part.tensors.items():
      is_norm = "norm" in name and name.endswith("weight")
      noise = 0.05 * draw.normal(size=x.shape)
      found[name] = (is_norm + noise).astype(np.float32)
  save_file(found, start / "model.safetensors")


def line(start, data, out, *flags, **options):
  """Returns a tiny run's command line; `optim__lr=1` is `--optim.lr 1`."""
  options = {
    name.replace("__", ".").replace("_", "-"): x for name, x in options.items()
  }
  words = [str(start), "--data", str(data), "--out", str(out), *flags]
  for name, x in (OPTIONS | options).items():
    words += [] if x is None else [f"--{name}", str(x)]
  return words


def run(start, data, out, *flags, **options):
  """Fine-tunes in this process; returns the exit status."""
  options = {"images": data.parent / "images"} | options
  try:
    return finetune.main(line(start, data, out, *flags, **options))
  except SystemExit as exit:  # raised by tyro
    return exit.code


def config_of(folder, **options):
  files = (str(folder / "shapes.json"),)
  data = dict(files=files, held_out=0.3, images=str(folder / "images"))
  found = FinetuneConfig(
    **dict(
      init_from=str(folder / "llava"),
      data=ChatData(**data),
      optim=OptimConfig(lr=1e-3, warmup=1, group_size=16),
      out="unused",
      seq=64,
      batch=8,
      steps=4,
      samples=0,
    )
    | options,
  )
  return with_shape(found)
