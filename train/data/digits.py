# SPDX-License-Identifier: Apache-2.0
"""Writes scikit-learn's handwritten digits, with one folder for each class.

  python -m train.data.digits FOLDER

These 1797 gray images of 8 x 8 pixels come from the test set of E. Alpaydin and
C. Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI Machine
Learning Repository, doi:10.24432/C50P49. The scikit-learn package contains the
images, so nothing is downloaded. Every fifth image of each digit is held out.
"""

import collections
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro
from PIL import Image
from tyro.conf import Positional

from coat_jax.models.hf.whole import check_free, written_whole

_HELD_OUT = 5


def main(arguments: Sequence[str] | None = None) -> int:

  def read(folder: Positional[Path]) -> Path:
    """Writes handwritten digits to FOLDER/{train,test}/DIGIT/*.png.

    Args:
      folder: The folder to create.
    """
    return folder

  folder = tyro.cli(read, args=arguments, prog="python -m train.data.digits")
  try:
    count = write_digits(folder)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(f"{folder}: {count} images")
  return 0


def write_digits(folder: Path) -> int:
  """Writes the digits into a new folder; returns the number of images."""
  try:
    from sklearn import datasets
  except ImportError as error:
    raise ValueError(
      "digits: the images are in scikit-learn, which is not installed; run pip "
      "install scikit-learn"
    ) from error
  check_free("digits", folder)
  found = datasets.load_digits()
  images, labels = found.images, found.target  # pyright: ignore
  written = collections.Counter()
  with written_whole(folder) as path:
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
      part = "test" if written[label] % _HELD_OUT == 0 else "train"
      written[label] += 1
      file = path / part / str(label) / f"{i:04}.png"
      file.parent.mkdir(parents=True, exist_ok=True)
      # The dataset's pixel values range from 0 to 16.
      Image.fromarray(np.round(image * (255 / 16)).astype(np.uint8)).save(file)
  return len(images)


if __name__ == "__main__":
  sys.exit(main())
