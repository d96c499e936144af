# SPDX-License-Identifier: Apache-2.0
"""Trains a vision transformer to classify images.

  python -m train.data.digits digits
  python -m train.vit vit_digits --data digits --out RUN [options]
  python -m train.vit vit_digits --data digits --out RUN --resume

Nearly all options are the same as in `train.pretrain`. See docs/vision.md.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence

from PIL import Image

from train.command_line import check_given_once, one_of, read_options
from train.data.images import Preprocessing
from train.data.labelled import (
  THREADS,
  Images,
  held_out_folder,
  load_labelled,
)
from train.loop import run_command
from train.options import read_path
from train.run.data import RunData
from train.run.directory import RunDirectory
from train.run.exits import say
from train.vit_config import CLASSES, PRESETS, ImageData, VitConfig

_DESCRIPTION = """\
Trains a vision transformer to classify images.

  python -m train.vit PRESET --data FOLDER --out RUN [options]"""


def read(words: Sequence[str]) -> VitConfig:
  check_given_once("data", words, "put all images into one folder")
  return read_options(one_of(PRESETS), "vit", words, _DESCRIPTION)


def main(arguments: Sequence[str] | None = None) -> int:
  return run_command(read, load, arguments)


def load(config: VitConfig) -> tuple[VitConfig, "ImageFolder"]:
  """Reads the images; sets `num_classes` in the returned configuration."""
  model = config.model
  if (model.family, model.num_channels) != ("vit", 3):
    raise ValueError(
      "model: RGB images need family vit and num_channels 3, got "
      f"{model.family} with num_channels {model.num_channels}; leave both "
      "options out"
    )
  if not config.data.folder:
    raise ValueError(
      "data: expected a folder of images by class, got none; pass --data FOLDER"
    )
  folder, share = read_path("data", config.data.folder), config.data.held_out
  own = held_out_folder(folder)
  if own is not None and share != ImageData.held_out:
    raise ValueError(
      "data: held_out applies only without a folder of held-out images, got "
      f"{share} and {own}; leave --held-out out, or remove the folder"
    )
  found = load_labelled(
    folder,
    _preprocessing(model.image_size),
    held_out=share,
    seed=config.seed,
  )
  count = len(found.classes)
  if model.num_classes not in (None, count):
    raise ValueError(
      f"model: the images have {count} classes, got num_classes "
      f"{model.num_classes}; leave num_classes out"
    )
  if len(found.rows) < config.batch:
    raise ValueError(
      f"batch: must be at most {len(found.rows)}, the number of training "
      f"images, got {config.batch}; lower --batch, or add images"
    )
  say(
    f"{config.out}: {len(found.rows)} images of {count} classes to train on, "
    f"{len(found.held_out)} held out; {config.steps} steps are "
    f"{config.steps * config.batch / len(found.rows):.3g} epochs"
  )
  model = dataclasses.replace(model, num_classes=count)
  threads = THREADS if found.rows.pixels is None else 0
  data = ImageFolder(**vars(found), threads=threads)
  return dataclasses.replace(config, model=model), data


def _preprocessing(size: int) -> Preprocessing:
  """Builds the preprocessing: square images, with pixels from -1 to 1."""
  return Preprocessing(
    size=(size, size),
    crop=None,
    resample=int(Image.Resampling.BICUBIC),
    scale=1 / 255,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ImageFolder(RunData[VitConfig]):
  """The images of a run, and the names of their classes."""

  rows: Images
  held_out: Images
  classes: Sequence[str]  # The name of each class.

  def keep_files(self, run: RunDirectory) -> None:
    run.source.mkdir(exist_ok=True)
    self.rows.preprocessing.save(run.source)
    names = json.dumps(self.classes, indent=2)
    (run.source / CLASSES).write_text(names + "\n")


if __name__ == "__main__":
  sys.exit(main())
