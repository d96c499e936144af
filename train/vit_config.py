# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run that classifies images, and its presets."""

import dataclasses
from typing import Annotated

from tyro.conf import Fixed, OmitArgPrefixes, Suppress

from coat_jax.models import VisionConfig
from coat_jax.models.ranges import Count, Range, check_fields
from train.config import TrainConfig, check_experts
from train.mesh import check_fits
from train.optim_config import OptimConfig
from train.options import Share, fixed, shown, silent

# The file in which a run stores the names of its classes.
CLASSES = "classes.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData:
  """Images to learn from.

  Attributes:
    folder: A folder with one folder of images per class, or with the folders
      `train` and `test` (or `val` or `validation`), which each have one folder
      per class; see `train.data.labelled`.
    held_out: Share of each class's images to hold out for evaluation, at most
      0.5. At least one image of each class is held out. The share is not used
      if there is a folder of held-out images.
  """

  folder: Annotated[str, shown("required", name="data", metavar="FOLDER")] = ""
  held_out: Share = fixed(0.2)

  def __post_init__(self):
    check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitConfig(TrainConfig):
  """The options of a run that trains an image classifier.

  Attributes:
    data: Images to learn from.
    model: The vision transformer's shape. The number of classes comes from the
      data.
    batch: Images per step, over all devices.
    seq: Tokens per image.
  """

  model: VisionConfig = fixed()  # pyright: ignore[reportIncompatibleVariableOverride]
  data: OmitArgPrefixes[ImageData] = silent(ImageData())  # pyright: ignore[reportIncompatibleVariableOverride]
  # `seq` is derived from the model.
  seq: Suppress[Fixed[Count]] = fixed(1)
  # Image classifiers do not support the next three options.
  init_from: Suppress[Fixed[str]] = silent("")
  optimizer_in_backward: Suppress[Fixed[bool]] = False
  watch: Suppress[Fixed[Annotated[int, Range(0, 0)]]] = silent(0)

  def __post_init__(self):
    # The loop needs `seq`. In a frozen class, `self.seq = ...` would raise.
    object.__setattr__(self, "seq", self.model.num_tokens)
    super().__post_init__()

  def check_mesh(self):
    check_experts(self)
    check_fits(self)


def vit_digits() -> VitConfig:
  """A small ViT that learns digits in a minute or two on two CPU cores.

  `python -m train.data.digits FOLDER` writes scikit-learn's 8 x 8 images.
  """
  return VitConfig(
    out="runs/vit_digits",
    model=VisionConfig(
      family="vit",
      num_layers=2,
      d_model=64,
      d_ff=256,
      num_heads=4,
      image_size=8,
      patch_size=4,
    ),
    optim=OptimConfig(lr=2e-3, warmup=0.1),
    steps=400,
    batch=64,
    eval_every=100,
    save_every=200,
  )


def vit_s16() -> VitConfig:
  """ViT-S/16 for ImageNet's 1.28 million images: arXiv:2205.01580, 90 epochs.

  The paper's accuracy also needs random crops, flips, RandAugment and mixup,
  which are not implemented here.
  """
  return VitConfig(
    out="runs/vit_s16",
    model=VisionConfig(
      family="vit",
      num_layers=12,
      d_model=384,
      d_ff=1536,
      num_heads=6,
      image_size=224,
      patch_size=16,
    ),
    optim=OptimConfig(lr=1e-3, warmup=10_000, b2=0.999),
    steps=112_600,
    batch=1024,
    eval_batches=48,
  )


PRESETS = {"vit_digits": vit_digits, "vit_s16": vit_s16}
