# SPDX-License-Identifier: Apache-2.0
"""Starts runs from the weights of a checkpoint.

The run's folder `hf` contains copies of the checkpoint's config.json, tokenizer
and image preprocessing. So you can resume the run, export it, and start other
runs from it even if the original folder is gone.
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
from train.run.directory import RunDirectory
from train.run.exits import say
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
  """Takes the model's shape from the run's initial checkpoint, if any."""
  if (source := source_of(config)) is None:
    return config
  if all(config.model != preset().model for preset in PRESETS.values()):
    raise ValueError(
      f"init_from: the model's shape is read from {source / CONFIG}, got "
      "--model.* options that set another shape; leave these options out"
    )
  shape: Any = read_shape(
    source, of_text=not isinstance(config, FinetuneConfig)
  )
  config = dataclasses.replace(config, model=shape)
  config.check_mesh()
  return config


def check(config: TrainConfig, abstract: TrainState) -> None:
  """Checks the initial checkpoint of a run without reading its tensors."""
  if config.init_from and isinstance(origin := _origin(config), Path):
    check_tensors(origin, config.model, abstract.params)


def warn_of_length(config: TrainConfig) -> None:
  """Warns if sequences are longer than the checkpoint's training sequences."""
  source = source_of(config)
  longest = None if source is None else read_length(source)
  if type(longest) is int and config.seq > longest:
    say(
      f"{config.out}: warning: sequences of {config.seq} tokens are longer "
      f"than the {LONGEST} of {longest} in {CONFIG}. The model was not trained "
      f"on later positions, and exported checkpoints keep {LONGEST}. Pass "
      f"--seq {longest} to avoid such positions."
    )


def keep_files(config: TrainConfig, run: RunDirectory) -> None:
  """Copies the initial checkpoint's files, except its weights, to a run."""
  if config.init_from and (source := source_of(config)):
    run.source.mkdir()
    carry(source, run.source, CONFIG, *PROCESSORS)


def initial_state(
  config: TrainConfig, optimizer: FusedTransformation, mesh: Mesh | None = None
) -> TrainState:
  """Builds the state before the first step, from `init_from` if it is set."""
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
  """Reads the weights of another run's newest undamaged checkpoint."""
  step, saved = run.newest()
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
  if run.path.resolve() == RunDirectory(config.out).path.resolve():
    problem = "is also the --out"
  elif run.latest_step() is None:
    problem = "has no checkpoint yet"
  elif not (run.source / CONFIG).is_file():
    problem = "did not start from a Hugging Face folder"
  else:
    return run
  raise ValueError(
    f"init_from: cannot start from the run {run.path}, because it {problem}; "
    "pass another run, or a folder that python -m train.convert export-hf wrote"
  )
