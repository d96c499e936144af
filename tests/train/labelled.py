# SPDX-License-Identifier: Apache-2.0
"""Folders of small images, one per class, for tests."""

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog")


def write_image(file, seed, *, brightness=0):
  """Writes an image of 8 x 8 pixels: noise plus `brightness`."""
  pixels = np.random.default_rng(seed).integers(0, 100, (8, 8, 3))
  file.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray((pixels + brightness).astype(np.uint8)).save(file)


def write_folder(folder, *, parts=("train", "test"), count=8):
  """Writes images of two classes: by default 16 to train on, 4 held out."""
  for part in parts:
    for label, name in enumerate(CLASSES):
      for i in range(2 if part in ("test", "val") else count):
        file = folder / part / name / f"{i}.png"
        seed = [len(part), label, i]
        write_image(file, seed, brightness=150 * label)
  return folder
