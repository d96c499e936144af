# SPDX-License-Identifier: Apache-2.0
"""Reads the model of a run or of a Hugging Face folder.

The model is read onto one device. It uses the `bf16` recipe, because with most
FP8 recipes all tokens of a matmul share one scale. The prediction for a text
would then depend on the other texts in its batch.
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
from coat_jax.models.hf.keys import CONFIG, LONGEST
from train import step as steps
from train import weights
from train.config import TrainConfig
from train.data.text import (
  FolderText,
  Text,
  TokenizerText,
  has_tokenizer,
  open_text,
)
from train.data.tokens import DataConfig
from train.run.checkpoint import restore_state
from train.run.directory import RunDirectory
from train.run.exits import say
from train.step import TrainState
from train.vit_config import VitConfig

Compute = Literal["bfloat16", "float32"]
Shape = ModelConfig | VisionLanguageConfig
_LENGTH = 2048  # Llama's default context length, if config.json has none.


class Source(NamedTuple):
  """A model, before its weights are read."""

  name: str  # The folder; for a run, also the step.
  # The folder with config.json, the tokenizer and the image preprocessing; a
  # run keeps copies of these files.
  files: Path
  config: Shape
  compute: Compute
  text: Text
  length: int  # The context length.
  # Reads the weights and returns the model, on one device.
  load: Callable[[], Decoder | VisionLanguageModel]

  @property
  def family(self) -> str:
    return getattr(self.config, "family", "llava")


def decoder_of(model: Decoder | VisionLanguageModel) -> Decoder:
  """Returns the decoder of a LLaVA, or the model itself if it is a decoder."""
  return model.decoder if isinstance(model, VisionLanguageModel) else model


def read_shape(folder: Path, *, of_text: bool = False) -> Shape:
  """Reads a Hugging Face model's shape; `of_text` accepts only text models."""
  shape, _ = read_config(folder)
  if isinstance(shape, VisionConfig):
    wanted = "a text-only model" if of_text else "a text model or a LLaVA model"
    raise ValueError(
      f"{folder}: expected {wanted}, got a vision tower ({shape.family}), "
      "which writes no text; pass another folder, or train an image classifier "
      "from random weights with python -m train.vit PRESET --data FOLDER"
    )
  if of_text and isinstance(shape, VisionLanguageConfig):
    raise ValueError(
      f"{folder}: expected a text-only model, got a LLaVA model; train it "
      f"with python -m train.finetune {folder} --data FILES --out RUN"
    )
  return shape


def read_length(folder: Path) -> Any:
  """Reads a checkpoint's context length; None if config.json has none."""
  found = read_json(folder / CONFIG)
  return found.get("text_config", found).get(LONGEST)


def open_source(
  folder: Path, tokenizer: str | None = None, compute: Compute | None = None
) -> Source:
  """Opens the newest checkpoint of a run, or a Hugging Face folder."""
  run = RunDirectory(folder)
  if run.is_run() and run.latest_step() is not None:
    return _open_run(run, tokenizer, compute)
  if not run.is_run() and (folder / CONFIG).is_file():
    return _open_hf(folder, tokenizer, compute or "bfloat16")
  raise ValueError(
    f"{folder}: expected a Hugging Face checkpoint or a run that has a "
    "checkpoint, got neither; pass the --out of a run, or a folder with "
    "config.json and safetensors"
  )


def _open_run(
  run: RunDirectory, tokenizer: str | None, compute: Compute | None
) -> Source:
  done, config = run.newest()
  config = dataclasses.replace(
    config, mesh="", distributed=False, grad_reduce="float32"
  )
  if isinstance(config, VitConfig):
    raise ValueError(
      f"{run.path}: expected a run that was trained on text, got a run of "
      "train.vit, which classifies images; pass another run"
    )
  compute = compute or config.compute

  def load() -> Any:
    abstract = steps.abstract_state(config, steps.build_optimizer(config))
    params = _restore(run, done, abstract, optimizer=()).params
    say(f"{run.path}: weights of step {done}")
    shown = dataclasses.replace(
      config.with_f32_moments("bf16"), compute=compute
    )
    return nnx.merge(steps.build_graph(shown), params)

  return Source(
    f"{run.path}, step {done}",
    run.source,
    config.model,
    compute,
    _text_of_run(run, config, done, tokenizer),
    config.seq,
    load,
  )


def _restore(
  run: RunDirectory, step: int, abstract: TrainState, **others: Any
) -> TrainState:
  """Restores a state, except `exact`, `clip` and the fields in `others`."""
  abstract = abstract._replace(exact=(), clip=(), **others)
  return restore_state(run.checkpoints, step, abstract)


def _text_of_run(
  run: RunDirectory, config: TrainConfig, done: int, tokenizer: str | None
) -> Text:
  """Opens the tokenizer of a run's data, or of the initial checkpoint."""
  # If `tokenizer` is None, the tokenizer in `run.source` is used
  #   for runs on conversations: always
  #   for runs on token ids: if it exists
  #   for runs on text: if it exists, the run is at step 0, and the data's
  #     options name no tokenizer
  data = config.data
  if isinstance(data, DataConfig):
    is_kept = data.dtype != "text" or (not done and data.tokenizer is None)
    if tokenizer is not None or not (is_kept and has_tokenizer(run.source)):
      return open_text(data, tokenizer)
  elif tokenizer is not None:
    return TokenizerText(tokenizer)
  return FolderText(run.source)


def _open_hf(folder: Path, tokenizer: str | None, compute: Compute) -> Source:
  config, dtype = read_shape(folder), jnp.dtype(compute)
  text = FolderText(folder, tokenizer)
  length = read_length(folder)
  if length is None:
    length = _LENGTH
  if type(length) is not int or length < 1:
    raise ValueError(
      f"{folder / CONFIG}: {LONGEST} must be a whole number above 0, got "
      f"{repr(length)[:40]}; copy the original file again"
    )

  def load():
    model = load_hf(
      folder, recipe=recipes.bf16(), dtype=dtype, param_dtype=dtype
    )
    say(f"{folder}: read the weights")
    return model

  return Source(str(folder), folder, config, compute, text, length, load)


def read_weights(
  run: RunDirectory, step: int, config: TrainConfig, mesh: Mesh | None = None
) -> Any:
  """Reads a checkpoint's weights; joins bf16 weights with low bytes to f32."""
  optimizer = steps.build_optimizer(config, mesh)
  abstract = steps.abstract_state(config, optimizer, mesh)
  if config.params != "bfloat16_low8":
    return _restore(run, step, abstract, optimizer=()).params
  state = _restore(run, step, abstract)
  low = weights.without_low(state.optimizer)[1]
  return jax.jit(weights.load)(state.params, low)
