# SPDX-License-Identifier: Apache-2.0
"""Converts runs to and from Hugging Face folders, for `train.convert`."""

import dataclasses
import json
from pathlib import Path
from typing import Literal

from flax import nnx

from coat_jax.models import Decoder, save_hf
from coat_jax.models.hf.keys import CONFIG
from coat_jax.models.hf.save import PROCESSORS, carry
from coat_jax.models.hf.whole import written_whole
from train import pretrained
from train import step as steps
from train.config import TrainConfig
from train.data.text import has_tokenizer
from train.run.directory import RunDirectory
from train.run.exits import say
from train.run.imported import create_run, newest_checkpoint
from train.run.writing import save_errors
from train.source import read_weights
from train.vit_config import CLASSES, VitConfig

Dtype = Literal["float32", "bfloat16", "float16"]


def import_hf(source: Path, config: TrainConfig) -> int:
  """Turns a Hugging Face checkpoint into a run at step 0."""
  config = dataclasses.replace(config, init_from=str(source.absolute()))
  config = pretrained.with_shape(config)

  def make(abstract):
    pretrained.check(config, abstract)
    return pretrained.initial_state(config, steps.build_optimizer(config))

  return create_run("import-hf", config, make)


def export_hf(run: Path, out: Path, dtype: Dtype | None = None) -> int:
  """Exports the newest undamaged checkpoint's weights; returns its step."""
  _, step, config = newest_checkpoint("export-hf", run, out)
  params = read_weights(RunDirectory(run), step, config)
  model = nnx.merge(steps.build_graph(config), params)
  source = RunDirectory(run).source
  like = source if (source / CONFIG).is_file() else None
  with save_errors(out), written_whole(out) as written:
    save_hf(
      model,
      written,
      like=like,
      dtype=dtype,
      max_length=config.seq if isinstance(model, Decoder) else None,
      labels=_labels(source),
    )
    # For models other than a ViT, `save_hf` has copied these files from `like`.
    if isinstance(config, VitConfig):
      carry(source, written, *PROCESSORS)
  if not (isinstance(config, VitConfig) or has_tokenizer(out)):
    say(f"{out}: no tokenizer was written, because the run keeps none")
  return step


def _labels(source: Path) -> list[str] | None:
  """Reads the class names of an image classifier; None if there are none."""
  if not (file := source / CLASSES).is_file():
    return None
  try:
    found = json.loads(file.read_bytes())
  except ValueError:
    found = None
  if isinstance(found, list) and all(isinstance(x, str) for x in found):
    return found
  raise ValueError(
    f"export-hf: expected a JSON list of class names in {file}, got something "
    "else; repair the file, or remove it to export without names"
  )
