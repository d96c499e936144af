# SPDX-License-Identifier: Apache-2.0
"""A model to read: of a run, or of a folder that transformers wrote.

Both are read onto one device, in recipe bf16: what a model says of a text must
not depend on the texts beside it, as FP8 products with one scale for all their
tokens would have it. A LLaVA is read whole, or its decoder alone.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx

from coat_jax import recipe as recipes
from coat_jax.models import (
  Decoder,
  ModelConfig,
  VisionLanguageConfig,
  VisionLanguageModel,
  load_hf,
)
from coat_jax.models.hf.config import CONFIG, read_config
from coat_jax.models.hf.files import check_folder, read_json
from coat_jax.models.hf.llava_config import read_llava_config
from coat_jax.models.hf.vision_config import VISION_TYPES
from train import step as steps
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
_MODELS: dict[type, type] = {
  ModelConfig: Decoder,
  VisionLanguageConfig: VisionLanguageModel,
}
# Of a config.json without max_position_embeddings, as transformers has it for
# Llama.
_LENGTH = 2048


class Source(NamedTuple):
  """A model whose weights are not read yet.

  Attributes:
    name: The folder, and of a run the step.
    files: The folder with config.json, the tokenizer's files and those of the
      images' preprocessing; of a run what it keeps, if it has a config.json.
    config: The model's shape.
    compute: What is computed in.
    text: Its tokenizer.
    length: Tokens that it was trained to see, prompt and text together.
    load: Reads the weights and returns the model, on one device.
  """

  name: str
  files: Path
  config: Shape
  compute: Compute
  text: Text
  length: int
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
  """Reads the shape of a checkpoint of transformers, of text or a LLaVA.

  Raises:
    ValueError: its config.json cannot be used.
  """
  kind = _model_type(folder, "a text model or a LLaVA")
  return (read_llava_config if kind == "llava" else read_config)(folder)[0]


def read_text_shape(folder: Path) -> ModelConfig:
  """Reads the shape of a checkpoint of transformers, of text alone.

  Raises:
    ValueError: its config.json cannot be used.
  """
  if _model_type(folder, "a model of text alone") == "llava":
    raise ValueError(
      f"{folder} must hold a model of text alone, got a LLaVA; train it with "
      f"python -m train.finetune {folder} --data FILES --out RUN"
    )
  return read_config(folder)[0]


def _model_type(folder: Path, wanted: str) -> Any:
  """Reads a checkpoint's model_type; raises ValueError of a vision tower."""
  check_folder(folder)
  kind = read_json(folder / CONFIG).get("model_type")
  if isinstance(kind, str) and kind in {*VISION_TYPES, "clip", "siglip"}:
    raise ValueError(
      f"{folder} must hold {wanted}, got a {kind}, which writes no text; pass "
      "another folder, or train a classifier of images, from random weights, "
      "with python -m train.vit PRESET --data FOLDER"
    )
  return kind


def open_source(
  folder: Path, tokenizer: str | None = None, compute: Compute | None = None
) -> Source:
  """Opens the newest checkpoint of a run, or one of transformers.

  Args:
    folder: The run's, which may be training meanwhile; or one with config.json
      and safetensors.
    tokenizer: A `tokenizers` JSON file in place of the folder's own.
    compute: What to compute in; None for what the run did, or BF16.

  Returns:
    The model and its tokenizer.

  Raises:
    FileNotFoundError, ValueError: it is neither, or damaged, or its tokenizer
      cannot be read.
  """
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
    lambda: _MODELS[type(config)](
      config,
      recipes.bf16(),
      dtype=jnp.dtype(compute),
      rngs=nnx.Rngs(params=0),
    )
  )
  return nnx.split(model, nnx.Param)[0]


def _text_of_run(
  run: RunDirectory, config: TrainConfig, done: int, tokenizer: str | None
) -> Text:
  """What a run's data were tokenized with.

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
      model=_MODELS[type(config)],
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
