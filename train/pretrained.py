# SPDX-License-Identifier: Apache-2.0
"""Begins runs with the weights of a checkpoint.

The option `init_from` of `train.config` names a Hugging Face folder, or a run
that began with one. The shape in the folder's config.json replaces the preset's
shape. The run keeps config.json, the tokenizer and the preprocessing in its own
folder `hf`. So you can resume it, export it, and begin other runs with it even
if the original folder is gone.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coat_jax.models.hf.keys import CONFIG, LONGEST
from coat_jax.models.hf.load import check_tensors, load_params
from coat_jax.models.hf.save import PROCESSORS, carry
from coat_jax.models.initialization import Store
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
from train.source import read_length, read_shape, read_weights
from train.step import TrainState


def source_of(config: TrainConfig) -> Path | None:
  """Finds the folder with the config.json of the run's initial checkpoint."""
  kept = RunDirectory(config.out).source
  if config.resume and (kept / CONFIG).is_file():
    return kept
  if not config.init_from:
    return None
  origin = _origin(config)
  return origin.source if isinstance(origin, RunDirectory) else origin


def with_shape[Config: TrainConfig](config: Config) -> Config:
  """Gives a run the shape of the checkpoint that it begins with."""
  if (source := source_of(config)) is None:
    return config
  if all(config.model != preset().model for preset in PRESETS.values()):
    raise ValueError(
      f"init_from: the model's shape is that of {source / CONFIG}, got options "
      "of the model too; leave --model out"
    )
  shape: Any = read_shape(
    source, of_text=not isinstance(config, FinetuneConfig)
  )
  config = dataclasses.replace(config, model=shape)
  config.check_mesh()
  return config


def check(config: TrainConfig, abstract: TrainState) -> None:
  """Checks the folder that a run begins with, without reading its tensors."""
  if config.init_from and isinstance(origin := _origin(config), Path):
    check_tensors(origin, config.model, abstract.params)


def describe_length(config: TrainConfig) -> list[str]:
  """Warns if sequences are longer than the checkpoint's training sequences.

  `with_shape` refuses sequences that are longer than learned positions.
  """
  if (source := source_of(config)) is None:
    return []
  longest = read_length(source)
  if type(longest) is not int or config.seq <= longest:
    return []
  return [
    f"{config.out}: warning: sequences of {config.seq} tokens are longer than "
    f"{longest}, the {LONGEST} of {CONFIG}: positions beyond it are new to the "
    f"model, and exports keep that number; --seq {longest} avoids them"
  ]


def keep_files(config: TrainConfig, run: RunDirectory) -> None:
  """Copies the files that a run keeps from its checkpoint into its folder."""
  if config.init_from and (source := source_of(config)):
    run.source.mkdir()
    carry(source, run.source, CONFIG, *PROCESSORS)


def initial_state(
  config: TrainConfig, optimizer: FusedTransformation, mesh: Mesh | None = None
) -> TrainState:
  """Builds the state before the first step, like `step.initial_state`.

  The weights of a checkpoint are read onto their devices and rounded to nearest
  into the run's `params`.
  """
  if not config.init_from:
    return steps.initial_state(config, optimizer, mesh)
  abstract = steps.abstract_state(config, optimizer, mesh)
  if isinstance(origin := _origin(config), Path):
    load = functools.partial(load_params, origin, config.model, abstract.params)
  else:
    load = functools.partial(
      _params_of_run, origin, config, abstract.params, mesh
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
  """Reads the weights of a run's newest undamaged checkpoint."""
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


def _origin(config: TrainConfig) -> RunDirectory | Path:
  """Returns the run or the Hugging Face folder that `init_from` names."""
  folder = read_path("init_from", config.init_from)
  run = RunDirectory(folder)
  if not run.is_run():
    return folder
  needs = None
  if run.path.resolve() == RunDirectory(config.out).path.resolve():
    needs = "must be another run than --out, got the same"
  elif run.latest_step() is None:
    needs = "must have a checkpoint, got none yet"
  elif not (run.source / CONFIG).is_file():
    needs = "must have begun with a Hugging Face folder, got none"
  if needs is None:
    return run
  raise ValueError(
    f"init_from: a run to begin with {needs} in {run.path}; pass another, or "
    "what python -m train.convert export-hf makes of it"
  )
