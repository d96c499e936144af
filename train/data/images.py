# SPDX-License-Identifier: Apache-2.0
"""Reads image files as the pixels that a vision tower expects.

As in transformers, an image is converted to RGB and resized by Pillow, with 8
bits per channel. For CLIP, the shorter side gets the configured length, and
only the center is kept. For SigLIP, both sides get the configured lengths. The
values are then scaled in f64 and normalized in f32.

Files may come from untrusted sources, so we check each header first: the
format, and the number of pixels before and after resizing.
"""

import dataclasses
import json
import os
import stat
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from train.data.sources import BadData
from train.options import first_line

# The maximum number of pixels; Pillow warns above 89,478,485.
MAX_PIXELS = 89_000_000
# Tracking pixels and placeholders for failed downloads often have one pixel.
_MIN_SIDE = 2
# Only raster formats are read. Pillow can also read PostScript, but PostScript
# files are programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Modes with more than 8 bits per channel, whose values Pillow would clip.
_DEEP = ("I", "F")
_PREPROCESSOR = "preprocessor_config.json"
_FILES = (_PREPROCESSOR, "processor_config.json")
_STEPS = ("do_resize", "do_rescale", "do_normalize")
_WITHOUT_EFFECT = {
  *("image_processor_type", "feature_extractor_type", "processor_class"),
  *("data_format", "input_data_format", "return_tensors", "device"),
  *("default_to_square", "disable_grouping", "image_seq_length"),
  *("_valid_processor_keys", "do_convert_rgb", "do_center_crop"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing:
  """Settings that turn an image into pixels."""

  # Height and width after resizing; an int sets only the shorter side.
  size: tuple[int, int] | int
  # Height and width of the center crop after resizing; None for no crop.
  crop: tuple[int, int] | None
  resample: int  # Pillow's number for the resampling filter.
  scale: float  # Factor by which the 8-bit values are multiplied.
  # A channel's normalized values are (scaled value - mean) / std.
  mean: tuple[float, float, float]
  std: tuple[float, float, float]

  @classmethod
  def load(cls, folder: Path) -> "Preprocessing":
    """Reads the settings in a checkpoint's folder."""
    file = next((folder / x for x in _FILES if (folder / x).is_file()), None)
    if file is None:
      raise ValueError(
        f"images: expected {' or '.join(_FILES)} in {folder}, got neither; "
        "copy the checkpoint's whole folder"
      )
    try:
      found = json.loads(file.read_bytes())
      found = found.get("image_processor", found)
      return cls._parse({k: x for k, x in found.items() if x is not None})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
      raise ValueError(
        f"images: expected a processor like CLIP's or SigLIP's in {file}, got "
        f"{error}; correct the file in a copy of its folder"
      ) from error

  @classmethod
  def _parse(cls, found: dict[str, Any]) -> "Preprocessing":
    known = {field.name for field in dataclasses.fields(cls)} - {"scale"}
    known |= {"crop_size", "rescale_factor", "image_mean", "image_std", *_STEPS}
    for key, value in found.items():
      if key not in known | _WITHOUT_EFFECT and value:
        raise ValueError(f"the unknown key {key}")
    for key in _STEPS:
      if not found.get(key, True):
        raise ValueError(f"{key} {found[key]}")
    size = found["size"] if "size" in found else {}
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
      size = size["shortest_edge"]
    size = _count(size) if isinstance(size, int) else _height_width(size)
    crop = None
    is_cropped = found.get("do_center_crop", "crop_size" in found)
    if is_cropped:
      crop = found.get("crop_size", size)
      crop = (crop, crop) if isinstance(crop, int) else _height_width(crop)
    height, width = (size, size) if isinstance(size, int) else size
    if crop is None and isinstance(size, int):
      raise ValueError(f"shortest_edge {size} without do_center_crop")
    if crop is not None and (crop[0] > height or crop[1] > width):
      raise ValueError(f"crop_size {crop} for images of {height} x {width}")
    resample = found.get("resample", int(Image.Resampling.BICUBIC))
    return cls(
      size=size,
      crop=crop,
      resample=int(Image.Resampling(resample)),
      scale=_number("rescale_factor", found.get("rescale_factor", 1 / 255)),
      mean=_channels(found, "image_mean"),
      std=_channels(found, "image_std"),
    )

  def save(self, folder: Path) -> None:
    """Writes preprocessor_config.json, for `load` and for transformers."""
    size, crop = self.size, self.crop
    names = "height", "width"
    found: dict[str, Any] = {
      "image_processor_type": "ViTImageProcessor",
      "do_convert_rgb": True,
      "do_resize": True,
      "size": {"shortest_edge": size}
      if isinstance(size, int)
      else dict(zip(names, size, strict=True)),
      "resample": self.resample,
      "do_rescale": True,
      "rescale_factor": self.scale,
      "do_normalize": True,
      "image_mean": list(self.mean),
      "image_std": list(self.std),
    }
    if crop is not None:  # ViTImageProcessor cannot crop.
      found["image_processor_type"] = "CLIPImageProcessor"
      found["do_center_crop"] = True
      found["crop_size"] = dict(zip(names, crop, strict=True))
    (folder / _PREPROCESSOR).write_text(json.dumps(found, indent=2) + "\n")

  @property
  def shape(self) -> tuple[int, int]:
    """Height and width of the pixels that `read` returns."""
    size = self.crop or self.size
    assert isinstance(size, tuple)  # `_parse` requires a crop for an int size.
    return size

  def check(self, files: Iterable[Path], *, threads: int = 1) -> None:
    """Checks the headers of images, in up to `threads` threads."""

    def check_one(file: Path) -> None:
      with _opened(file) as image:
        self._check_size(image)

    # Set the warning filter once, because all threads share it. `_check_size`
    # refuses the images that Pillow warns about.
    with warnings.catch_warnings():
      warnings.simplefilter("ignore", Image.DecompressionBombWarning)
      with ThreadPoolExecutor(threads) as pool:
        list(pool.map(check_one, files))

  def read(self, file: Path) -> np.ndarray:
    """Reads an image as f32 [3, H, W]; thread-safe."""
    with _opened(file) as image:
      width, height = self._check_size(image)
      try:
        resized = image.convert("RGB").resize(
          (width, height), Image.Resampling(self.resample)
        )
      except Exception as error:  # Decoders raise many types.
        raise BadData(
          "broken image",
          f"Pillow cannot read the image {file}: {first_line(error)}",
        ) from error
    rows, columns = self.shape
    top, left = (height - rows) // 2, (width - columns) // 2
    pixels = np.asarray(resized)[top : top + rows, left : left + columns]
    scaled = (pixels.astype(np.float64) * self.scale).astype(np.float32)
    normalized = (scaled - np.asarray(self.mean, np.float32)) / np.asarray(
      self.std, np.float32
    )
    return np.ascontiguousarray(normalized.transpose(2, 0, 1))

  def _check_size(self, image: Image.Image) -> tuple[int, int]:
    """Checks an image's size; returns the width and height after resizing."""
    width, height = image.size
    if min(width, height) < _MIN_SIDE:
      raise BadData(
        "tiny image",
        f"expected an image of at least {_MIN_SIDE} x {_MIN_SIDE} pixels, got "
        f"{width} x {height} in {image.filename}",  # pyright: ignore
      )
    new = self.size
    if isinstance(new, int):
      short = min(width, height)
      new = tuple(
        new if side == short else int(new * side / short)
        for side in (height, width)
      )
    for what, pixels in (
      ("", width * height),
      ("resized to ", new[0] * new[1]),
    ):
      if pixels > MAX_PIXELS:
        raise BadData(
          "large image",
          f"expected an image of at most {MAX_PIXELS} pixels, got {width} x "
          f"{height} in {image.filename}, "  # pyright: ignore
          f"{what}{pixels} pixels",
        )
    return new[1], new[0]


def _opened(file: Path) -> Image.Image:
  """Opens an image; Pillow reads only its header."""
  try:
    if not stat.S_ISREG(os.stat(file).st_mode):
      raise UnidentifiedImageError  # Opening a named pipe would block.
    image = Image.open(file, formats=_FORMATS)
  except FileNotFoundError as error:
    raise BadData(
      "missing image", f"the image {file} does not exist"
    ) from error
  except Image.DecompressionBombError as error:
    raise BadData(
      "large image",
      f"expected an image of at most {MAX_PIXELS} pixels, got {file}: "
      f"{first_line(error)}",
    ) from error
  except Exception as error:  # Decoders raise many types.
    is_other = isinstance(error, UnidentifiedImageError)
    got = "which is in none of them" if is_other else first_line(error)
    raise BadData(
      "no image",
      f"expected an image in one of the formats {', '.join(_FORMATS)}, got "
      f"{file}, {got}",
    ) from error
  if image.mode.split(";")[0] in _DEEP:
    mode = image.mode
    image.close()
    raise BadData(
      "deep image",
      f"expected 8 bits per channel, got {file} in mode {mode}",
    )
  return image


def _height_width(size: Any) -> tuple[int, int]:
  if not isinstance(size, dict) or set(size) != {"height", "width"}:
    raise ValueError(f"size {str(size)[:60]}")
  return _count(size["height"]), _count(size["width"])


def _count(value: Any) -> int:
  if type(value) is not int or not 1 <= value <= 2**13:
    raise ValueError(f"size {str(value)[:60]}")
  return value


def _number(key: str, value: Any) -> float:
  # `not abs(value) < 1e30` is also true for NaN.
  if type(value) not in (int, float) or not abs(value) < 1e30:
    raise ValueError(f"{key} {str(value)[:60]}")
  return float(value)


def _channels(found: dict[str, Any], key: str) -> tuple[float, float, float]:
  values = tuple(_number(key, x) for x in found.get(key) or ())
  if len(values) != 3 or key == "image_std" and min(values) <= 0:
    raise ValueError(f"{key} {str(found.get(key))[:60]}")
  return values
