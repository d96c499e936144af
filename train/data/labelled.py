# SPDX-License-Identifier: Apache-2.0
"""Reads images from one folder per class, like torchvision's ImageFolder.

  FOLDER/train/CLASS/*.png   images to train on
  FOLDER/test/CLASS/*.png    held-out images; test may also be named val or
                             validation
  FOLDER/CLASS/*.png         all images, if there is no `train` folder

Without a held-out folder, a share of each class is held out. Classes are
numbered in the order of their names. Images may also be in subfolders of a
class. All image headers are read at the start. If the pixels of all images fit
into `_IN_MEMORY` bytes, they are read at the start too and stay in memory.
Otherwise they are read a batch at a time.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np

from train.data.images import Preprocessing
from train.data.token_files import hash_change_times

_TRAIN, _HELD_OUT = "train", ("test", "val", "validation")
_ENDS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
THREADS = 8  # Threads help, because Pillow releases the GIL while it decodes.
# Enough for 5000 images of 224 x 224 pixels, or four million of 8 x 8, in f32.
_IN_MEMORY = 3 * 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Images:
  """Images with their classes; if `pixels` is None, `read` decodes files."""

  has_padding: ClassVar[bool] = True

  files: Sequence[Path]
  labels: np.ndarray  # int32 [images], the class numbers.
  preprocessing: Preprocessing
  pixels: np.ndarray | None = None  # f32 [images, 3, H, W] if in memory.

  def __len__(self) -> int:
    return len(self.files)

  def read(self, row: int | None) -> dict[str, np.ndarray]:
    """Reads an image and its label; returns zeros and -1 if `row` is None."""
    if row is None:
      pixels = np.zeros((3, *self.preprocessing.shape), np.float32)
      return {"images": pixels, "labels": np.asarray(-1, np.int32)}
    kept = self.pixels
    pixels = self._decode(row) if kept is None else kept[row]
    return {"images": pixels, "labels": np.asarray(self.labels[row])}

  def in_memory(self) -> "Images":
    with ThreadPoolExecutor(THREADS) as pool:
      pixels = list(pool.map(self._decode, range(len(self))))
    return dataclasses.replace(self, pixels=np.stack(pixels))

  def take(self, rows: np.ndarray) -> "Images":
    """Selects images by row number; call this before `in_memory`."""
    return dataclasses.replace(
      self, files=[self.files[i] for i in rows], labels=self.labels[rows]
    )

  def _decode(self, row: int) -> np.ndarray:
    return self.preprocessing.read(self.files[row])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Labelled:
  """A folder's images, divided into training images and held-out images."""

  classes: tuple[str, ...]  # Names of the classes, by number.
  rows: Images  # Images to train on.
  held_out: Images
  # A hash of the names, classes and sizes of all files, of the preprocessing,
  # and of the pixels if they are in memory.
  fingerprint: str
  # A hash of the files' modification times; None if the pixels are in memory.
  change_times: str | None


def load_labelled(
  folder: Path, preprocessing: Preprocessing, *, held_out: float, seed: int
) -> Labelled:
  """Reads a folder that contains a folder of images for each class."""
  if not folder.is_dir():
    raise ValueError(
      "data: expected a folder that contains a folder of images for each "
      f"class, got {folder}, which is not a folder; pass --data FOLDER with "
      "images as FOLDER/train/CLASS/1.png or FOLDER/CLASS/1.png"
    )
  start = folder / _TRAIN if (folder / _TRAIN).is_dir() else folder
  classes, rows = _read(start, preprocessing)
  if (own := held_out_folder(folder)) is None:
    rows, others = _split(rows, held_out, seed)
  else:
    _, others = _read(own, preprocessing, classes)
  files = [*rows.files, *others.files]
  shown = 12 * np.prod(preprocessing.shape) * len(files)
  is_kept = shown <= _IN_MEMORY
  if is_kept:
    rows, others = rows.in_memory(), others.in_memory()
  return Labelled(
    classes=classes,
    rows=rows,
    held_out=others,
    fingerprint=_fingerprint(folder, classes, rows, others),
    change_times=None if is_kept else hash_change_times(files),
  )


def held_out_folder(folder: Path) -> Path | None:
  """Finds the held-out folder next to `train`; None if either is missing."""
  found = [folder / name for name in _HELD_OUT if (folder / name).is_dir()]
  return found[0] if found and (folder / _TRAIN).is_dir() else None


def _read(
  start: Path,
  preprocessing: Preprocessing,
  classes: tuple[str, ...] | None = None,
) -> tuple[tuple[str, ...], Images]:
  """Lists a folder's classes and images, and checks the images' headers."""
  found = sorted(
    x.name
    for x in start.iterdir()
    if x.is_dir() and not x.name.startswith((".", "__"))
  )
  known = tuple(found) if classes is None else classes
  if len(known) < 2:
    raise ValueError(
      f"data: {start} must contain folders of at least two classes, got "
      f"{', '.join(known) or 'none'}; add a folder of images per class"
    )
  if new := sorted(set(found) - set(known)):
    raise ValueError(
      "data: every held-out class must also have training images, got "
      f"{new[0]} only in {start}; add training images, or remove the class"
    )
  files, labels = [], []
  for name in found:
    own = sorted(_images_in(start / name))
    if not own:
      raise ValueError(
        f"data: each class needs an image, got none in {start / name}; add "
        f"images with names that end in {', '.join(_ENDS)}, or remove the "
        "folder"
      )
    files += own
    labels += [known.index(name)] * len(own)
  preprocessing.check(files, threads=THREADS)
  return known, Images(
    files=files,
    labels=np.asarray(labels, np.int32),
    preprocessing=preprocessing,
  )


def _images_in(folder: Path) -> Iterator[Path]:
  for file in folder.rglob("*"):
    is_hidden = file.name.startswith(".")
    if file.suffix.lower() in _ENDS and not is_hidden and not file.is_dir():
      yield file


def _split(images: Images, share: float, seed: int) -> tuple[Images, Images]:
  """Holds out a share of each class: at least one image, but never all."""
  held_out = []
  draw = np.random.default_rng(seed)
  for label in np.unique(images.labels):
    own = np.flatnonzero(images.labels == label)
    if len(own) < 2:
      raise ValueError(
        "data: a class needs two images, one to train on and one to hold out, "
        f"got only {images.files[own[0]]}; add images, or put all training "
        "images into FOLDER/train and all held-out images into FOLDER/test"
      )
    count = min(max(round(share * len(own)), 1), len(own) - 1)
    held_out += draw.permutation(own)[:count].tolist()
  is_held_out = np.zeros(len(images), bool)
  is_held_out[held_out] = True
  rows, others = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
  return images.take(rows), images.take(others)


def _fingerprint(folder: Path, classes: tuple[str, ...], *parts: Images) -> str:
  digest = hashlib.sha256(repr((classes, parts[0].preprocessing)).encode())
  for images in parts:
    for file, label in zip(images.files, images.labels, strict=True):
      name = file.relative_to(folder).as_posix()
      digest.update(f"{name}\0{label} {file.stat().st_size}\n".encode())
    if images.pixels is not None:
      digest.update(np.ascontiguousarray(images.pixels))
  return f"images 1:{digest.hexdigest()[:32]}"
