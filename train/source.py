# SPDX-License-Identifier: Apache-2.0
"""Reads a model: that of a run, or of a folder that transformers wrote.

Both are read onto one device, in recipe bf16: what a model says of a text must
not depend on the texts beside it, as FP8 products with one scale for all their
tokens would have it. A LLaVA is read whole, or its decoder alone.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from coat_jax import recipes
from coat_jax.models import (
  Decoder,
  ModelConfig,
  VisionConfig,
  VisionLanguageConfig,
  VisionLanguageModel,
  load_hf,
)
from coat_jax.models.hf.config import read_config
from coat_jax.models.hf.files import read_json
from coat_jax.models.hf.keys import CONFIG
from coat_jax.models.hf.load import model_of
from train import step as steps
from train import weights
from train.config import TrainConfig
from train.data.folder import FolderText, has_tokenizer
from train.data.text import Text, open_text
from train.run.checkpoint import read_description, restore_state
from train.run.description import configuration
from train.run.directory import RunDirectory
from train.run.exits import say
from train.vit_config import VitConfig

Compute = Literal["bfloat16", "float32"]
Shape = ModelConfig | VisionLanguageConfig
# Of a config.json without max_position_embeddings, as transformers has it for
# Llama.
_LENGTH = 2048


class Source(NamedTuple):
  """A model whose weights are not read yet."""

  name: str  # The folder and, of a run, the step.
  # The folder with config.json and the files of tokenizer and preprocessing; a
  # run keeps copies of them.
  files: Path
  config: Shape
  compute: Compute
  text: Text
  length: int  # The context length.
  # Reads the weights and returns the model, on one device.
  load: Callable[[], Decoder | VisionLanguageModel]

  @property
  def family(self) -> str:
    """The family of the model."""
    return _family(self.config)

  @property
  def decoder_config(self) -> ModelConfig:
    """The decoder's shape, which a LLaVA has too."""
    config = self.config
    return config if isinstance(config, ModelConfig) else config.text

  def load_decoder(self) -> Decoder:
    """Reads the weights and returns the decoder, which a LLaVA has too."""
    model = self.load()
    return model if isinstance(model, Decoder) else model.decoder


def _family(config: Shape) -> str:
  return config.family if isinstance(config, ModelConfig) else "llava"


def read_shape(folder: Path) -> Shape:
  """Reads the shape of a Hugging Face decoder or LLaVA."""
  return _read(folder, "a text model or a LLaVA")


def read_text_shape(folder: Path) -> ModelConfig:
  """Reads the shape of a Hugging Face decoder."""
  shape = _read(folder, "a model of text alone")
  if isinstance(shape, ModelConfig):
    return shape
  raise ValueError(
    f"{folder} must hold a model of text alone, got a LLaVA; train it with "
    f"python -m train.finetune {folder} --data FILES --out RUN"
  )


def _read(folder: Path, wanted: str) -> Shape:
  """Reads a checkpoint's shape; raises ValueError for a vision tower."""
  shape, _ = read_config(folder)
  if not isinstance(shape, VisionConfig):
    return shape
  raise ValueError(
    f"{folder} must hold {wanted}, got a {shape.family}, which writes no text; "
    "pass another folder, or train a classifier of images, from random "
    "weights, with python -m train.vit PRESET --data FOLDER"
  )


def open_source(
  folder: Path, tokenizer: str | None = None, compute: Compute | None = None
) -> Source:
  """Opens the newest checkpoint of a run, or one of transformers."""
  run = RunDirectory(folder)
  if run.is_run() and run.latest_step() is not None:
    return _open_run(run, tokenizer, compute)
  if not run.is_run() and (folder / CONFIG).is_file():
    return _open_hf(folder, tokenizer, compute or "bfloat16")
  raise ValueError(
    f"{folder} must hold a run with a checkpoint, or one of transformers, got "
    "neither; pass the --out of a run, or a folder with config.json and "
    "safetensors"
  )


def _open_run(
  run: RunDirectory, tokenizer: str | None, compute: Compute | None
) -> Source:
  done, damaged = run.newest_whole_step()
  config = _on_one_device(
    configuration(read_description(run.checkpoints, done))
  )
  if isinstance(config, VitConfig):
    raise ValueError(
      f"{run.path} must be a run that has learned from text, got one of "
      "train.vit, which classifies images; pass another"
    )
  compute = compute or config.compute

  def load():
    abstract = steps.abstract_state(config, steps.build_optimizer(config))
    # What is () is not read.
    weights: Any = abstract._replace(optimizer=(), exact=(), clip=())
    params = restore_state(run.checkpoints, done, weights).params
    say(f"{run.path}: weights of step {done}", *damaged)
    return nnx.merge(_graph(config.model, compute), params)

  return Source(
    f"{run.path}, step {done}",
    run.source,
    config.model,
    compute,
    _text_of_run(run, config, done, tokenizer),
    config.seq,
    load,
  )


def _on_one_device(config: TrainConfig) -> TrainConfig:
  options = {"mesh": "", "distributed": False, "grad_reduce": "float32"}
  return dataclasses.replace(config, **options)


def _graph(config: Shape, compute: Compute) -> nnx.GraphDef:
  model = nnx.eval_shape(
    lambda: model_of(config, recipe=recipes.bf16(), dtype=jnp.dtype(compute))
  )
  return nnx.split(model, nnx.Param)[0]


def _text_of_run(
  run: RunDirectory, config: TrainConfig, done: int, tokenizer: str | None
) -> Text:
  """Opens the tokenizer of a run's data.

  Where they are ids, or nothing was trained yet, that is what is kept of the
  checkpoint that the run began with.
  """
  data = config.data
  is_kept = data.dtype != "text" or (not done and data.tokenizer is None)
  if tokenizer is None and is_kept and has_tokenizer(run.source):
    return FolderText(run.source)
  return open_text(data, tokenizer)


def _open_hf(folder: Path, tokenizer: str | None, compute: Compute) -> Source:
  config, dtype = read_shape(folder), jnp.dtype(compute)
  text = FolderText(folder, tokenizer)

  def load():
    model = load_hf(
      folder,
      recipe=recipes.bf16(),
      dtype=dtype,
      param_dtype=dtype,
    )
    say(f"{folder}: weights of a {_family(config)}")
    return model

  length = _length(folder)
  return Source(str(folder), folder, config, compute, text, length, load)


def _length(folder: Path) -> int:
  """The longest text that a checkpoint's model was trained for."""
  found = read_json(folder / CONFIG)
  found = found.get("text_config", found).get(
    "max_position_embeddings", _LENGTH
  )
  if type(found) is not int or found < 1:
    raise ValueError(
      f"{folder / CONFIG}: max_position_embeddings must be a number of tokens, "
      f"got {str(found)[:40]}; copy the file again"
    )
  return found


def read_weights(
  run: RunDirectory, step: int, config: TrainConfig, mesh: Mesh | None = None
) -> Any:
  """Reads the weights of a checkpoint; those with low bytes become f32."""
  abstract = steps.abstract_state(
    config, steps.build_optimizer(config, mesh), mesh
  )
  # What is () is not read.
  abstract = abstract._replace(exact=(), clip=())
  if config.params != "bfloat16_low8":  # Else it has the weights' low bytes.
    none: Any = ()
    abstract = abstract._replace(optimizer=none)
  state = restore_state(run.checkpoints, step, abstract)
  if config.params != "bfloat16_low8":
    return state.params
  return jax.jit(weights.load)(
    state.params, weights.without_low(state.optimizer)[1]
  )
