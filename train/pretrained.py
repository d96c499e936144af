# SPDX-License-Identifier: Apache-2.0
"""Runs that begin with the weights of a checkpoint of transformers.

The option `init_from` of `train.config`. The model's shape is that of the
checkpoint's config.json, in place of the preset's; all else is the preset's and
the other options'. A run keeps that file, and those of the tokenizer, in its
folder `hf`, so that it is resumed and exported without the checkpoint.
"""

import dataclasses
import functools
from pathlib import Path

import jax
from jax.sharding import Mesh

from coat_jax import FusedTransformation
from coat_jax.models.hf.config import CONFIG, read_config
from coat_jax.models.hf.load import check_tensors, load_params
from coat_jax.models.hf.save import carry
from train import step as steps
from train import weights
from train.config import TrainConfig
from train.options import read_path
from train.presets import PRESETS
from train.run.directory import RunDirectory
from train.step import TrainState


def with_shape(config: TrainConfig) -> TrainConfig:
  """Gives a run the shape of the checkpoint that it begins with.

  Args:
    config: The run, with a preset's model. If it is resumed, the shape is read
      from its own folder.

  Returns:
    The run with the checkpoint's model; the same run where it has none.

  Raises:
    ValueError: the checkpoint's config.json cannot be used, or options of the
      model were given.
  """
  kept = RunDirectory(config.out).source
  if config.resume and (kept / CONFIG).is_file():
    source = kept
  elif config.init_from:
    source = read_path("init_from", config.init_from)
  else:
    return config
  if all(config.model != preset().model for preset in PRESETS.values()):
    raise ValueError(
      f"init_from: the model's shape is that of {source / CONFIG}, got options "
      "of the model too; leave --model out"
    )
  config = dataclasses.replace(config, model=read_config(source)[0])
  config.check_mesh()
  return config


def check(config: TrainConfig, abstract: TrainState) -> None:
  """Checks a run's checkpoint, if it has one, without reading its tensors.

  Args:
    config: The run, from `with_shape`.
    abstract: Its state.

  Raises:
    ValueError: the checkpoint has no such tensors.
  """
  if config.init_from:
    check_tensors(_folder(config), config.model, abstract.params)


def keep_files(config: TrainConfig, run: RunDirectory) -> None:
  """Copies what is kept of a checkpoint into a run's new folder."""
  if config.init_from:
    run.source.mkdir()
    carry(_folder(config), run.source, CONFIG)


def initial_state(
  config: TrainConfig, optimizer: FusedTransformation, mesh: Mesh | None = None
) -> TrainState:
  """Builds the state before the first step, as `step.initial_state` does.

  Weights are the checkpoint's where the run has one, read onto their devices
  and stored as `params` says, rounded to nearest.

  Raises:
    ValueError: the checkpoint has other tensors.
  """
  if not config.init_from:
    return steps.initial_state(config, optimizer, mesh)
  abstract = steps.abstract_state(config, optimizer, mesh)
  load = functools.partial(
    load_params, _folder(config), config.model, abstract.params
  )
  with_moments = jax.jit(
    functools.partial(steps.with_moments, config, optimizer),
    out_shardings=steps.shardings(abstract),
    donate_argnums=0,
  )
  return weights.draw(config.params, load, with_moments)


def _folder(config: TrainConfig) -> Path:
  return read_path("init_from", config.init_from)
