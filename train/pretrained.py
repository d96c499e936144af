# SPDX-License-Identifier: Apache-2.0
"""Runs that begin with the weights of a checkpoint.

The option `init_from` of `train.config` names a folder of transformers, or a
run that began with one. The model's shape is that of the folder's config.json,
in place of the preset's; all else is the preset's and the other options'. A run
keeps that file, and those of the tokenizer and of images, in its folder `hf`,
so that it is resumed, exported and begun with without the folder.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coat_jax.models.hf.files import read_json
from coat_jax.models.hf.keys import CONFIG, LONGEST
from coat_jax.models.hf.load import check_tensors, load_params
from coat_jax.models.hf.save import PROCESSORS, carry
from coat_jax.models.stack import Store
from coat_jax.optimizer import FusedTransformation
from coat_jax.optimizer.masks import leaf_path
from train import step as steps
from train import weights
from train.config import TrainConfig
from train.finetune_config import FinetuneConfig
from train.options import read_path
from train.presets import PRESETS
from train.run.checkpoint import read_description
from train.run.description import configuration
from train.run.directory import RunDirectory
from train.source import read_shape, read_text_shape, read_weights
from train.step import TrainState


def source_of(config: TrainConfig) -> Path | None:
  """Finds the folder that a run's checkpoint is read from, or was kept in."""
  kept = RunDirectory(config.out).source
  if config.resume and (kept / CONFIG).is_file():
    return kept
  return _files(config) if config.init_from else None


def with_shape[Config: TrainConfig](config: Config) -> Config:
  """Gives a run the shape of the checkpoint that it begins with."""
  if (source := source_of(config)) is None:
    return config
  if all(config.model != preset().model for preset in PRESETS.values()):
    raise ValueError(
      f"init_from: the model's shape is that of {source / CONFIG}, got options "
      "of the model too; leave --model out"
    )
  read = read_shape if isinstance(config, FinetuneConfig) else read_text_shape
  config = dataclasses.replace(config, model=read(source))
  config.check_mesh()
  return config


def check(config: TrainConfig, abstract: TrainState) -> None:
  """Checks a run's checkpoint, if it has one, without reading its tensors."""
  if config.init_from and _run(config) is None:
    check_tensors(_folder(config), config.model, abstract.params)


def describe_length(config: TrainConfig) -> list[str]:
  """Says where sequences are longer than those that a checkpoint has seen.

  Learned positions end there, and `with_shape` refuses more; RoPE does not.
  """
  if (source := source_of(config)) is None:
    return []
  found = read_json(source / CONFIG)
  found = found.get("text_config", found)
  longest = found.get(LONGEST) if isinstance(found, dict) else None
  if type(longest) is not int or config.seq <= longest:
    return []
  return [
    f"{config.out}: warning: sequences of {config.seq} tokens are longer than "
    f"{longest}, the {LONGEST} of {CONFIG}: positions beyond it are new to the "
    f"model, and exports keep that number; --seq {longest} has none"
  ]


def keep_files(config: TrainConfig, run: RunDirectory) -> None:
  """Copies what is kept of a checkpoint into a run's new folder."""
  if config.init_from:
    run.source.mkdir()
    carry(_files(config), run.source, CONFIG, *PROCESSORS)


def initial_state(
  config: TrainConfig, optimizer: FusedTransformation, mesh: Mesh | None = None
) -> TrainState:
  """Builds the state before the first step, as `step.initial_state` does.

  Weights are the checkpoint's where the run has one, read onto their devices
  and stored as `params` says, rounded to nearest.
  """
  if not config.init_from:
    return steps.initial_state(config, optimizer, mesh)
  abstract = steps.abstract_state(config, optimizer, mesh)
  if (run := _run(config)) is not None:
    load = functools.partial(_params_of_run, run, config, abstract.params, mesh)
  else:
    load = functools.partial(
      load_params, _folder(config), config.model, abstract.params
    )
  with_moments = jax.jit(
    functools.partial(steps.with_moments, config, optimizer),
    out_shardings=steps.shardings(abstract),
    donate_argnums=0,
  )
  return weights.draw(config.params, load, with_moments)


def _params_of_run(
  run: RunDirectory,
  config: TrainConfig,
  params: Any,
  mesh: Mesh | None,
  store: Store | None = None,
) -> Any:
  """Reads the weights of a run's newest whole checkpoint."""
  step, _ = run.newest_whole_step()
  saved = configuration(read_description(run.checkpoints, step))
  saved = dataclasses.replace(
    saved, mesh=config.mesh, grad_reduce=config.grad_reduce, distributed=False
  )
  found = read_weights(run, step, saved, mesh)

  @functools.partial(jax.jit, out_shardings=steps.shardings(params))
  def stored(found):
    return jax.tree.map_with_path(
      lambda keys, x, leaf: (
        x.astype(leaf.dtype)
        if store is None
        else store(leaf_path(keys), x.astype(jnp.float32))
      ),
      found,
      params,
    )

  return stored(found)


def _folder(config: TrainConfig) -> Path:
  return read_path("init_from", config.init_from)


def _run(config: TrainConfig) -> RunDirectory | None:
  """Returns the run to begin with, or None for a Hugging Face folder."""
  run = RunDirectory(_folder(config))
  if not run.is_run():
    return None
  needs = None
  if run.path.resolve() == RunDirectory(config.out).path.resolve():
    needs = "must be another run than --out, got the same"
  elif run.latest_step() is None:
    needs = "must have a checkpoint, got none yet"
  elif not (run.source / CONFIG).is_file():
    needs = "must have begun with a folder of transformers, got none"
  if needs is None:
    return run
  raise ValueError(
    f"init_from: a run to begin with {needs} in {run.path}; pass another, or "
    "what python -m train.convert export-hf makes of it"
  )


def _files(config: TrainConfig) -> Path:
  """The folder that the checkpoint's other files are in."""
  run = _run(config)
  return _folder(config) if run is None else run.source
