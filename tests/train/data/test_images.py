# SPDX-License-Identifier: Apache-2.0
"""Images are prepared for a vision tower, and bad files are refused."""

import json
import math
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from train.data.images import MAX_PIXELS, Preprocessing
from train.data.sources import BadData

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.261, 0.2757]
# Published settings of CLIP and SigLIP, with smaller sizes.
CLIP = {
  "crop_size": {"height": 24, "width": 20},
  "do_center_crop": True,
  "do_convert_rgb": True,
  "do_normalize": True,
  "do_resize": True,
  "feature_extractor_type": "CLIPFeatureExtractor",
  "image_mean": MEAN,
  "image_std": STD,
  "resample": 3,
  "size": {"shortest_edge": 24},
}
SIGLIP = {
  "do_normalize": True,
  "do_rescale": True,
  "do_resize": True,
  "image_mean": [0.5, 0.5, 0.5],
  "image_processor_type": "SiglipImageProcessor",
  "image_std": [0.5, 0.5, 0.5],
  "processor_class": "SiglipProcessor",
  "resample": 2,
  "rescale_factor": 0.00392156862745098,
  "size": {"height": 24, "width": 20},
}


def load(folder, settings, name="preprocessor_config.json"):
  (folder / name).write_text(json.dumps(settings))
  return Preprocessing.load(folder)


def pixels(height, width, channels=3, seed=0):
  shape = (height, width, channels)
  return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def normalized(rgb, mean, std):
  """Normalizes 8-bit pixels [H, W, 3]; returns f64 values [3, H, W]."""
  return np.stack([(rgb[..., c] / 255.0 - mean[c]) / std[c] for c in range(3)])


@pytest.mark.parametrize("size", [(31, 50), (57, 29), (24, 24)])
def test_clip_resizes_the_shorter_side_and_crops_the_middle(tmp_path, size):
  height, width = size
  image = Image.fromarray(pixels(height, width))
  image.save(tmp_path / "a.png")
  short = min(size)
  tall, wide = (24 if x == short else 24 * x // short for x in size)
  resized = image.resize((wide, tall), Image.Resampling.BICUBIC)
  left, top = (wide - 20) // 2, (tall - 24) // 2
  cut = np.asarray(resized.crop((left, top, left + 20, top + 24)))
  preprocessing = load(tmp_path, CLIP)
  assert preprocessing.shape == (24, 20)
  found = preprocessing.read(tmp_path / "a.png")
  assert found.dtype == np.float32 and found.flags.c_contiguous
  # Two roundings to f32 change values of at most 3 by less than 1e-6.
  np.testing.assert_allclose(found, normalized(cut, MEAN, STD), atol=1e-6)


def test_siglip_resizes_both_sides(tmp_path):
  image = Image.fromarray(pixels(31, 50))
  image.save(tmp_path / "a.png")
  resized = np.asarray(image.resize((20, 24), Image.Resampling.BILINEAR))
  # transformers 5 nests the settings in a file with another name.
  nested = {"image_processor": SIGLIP, "processor_class": "LlavaProcessor"}
  preprocessing = load(tmp_path, nested, "processor_config.json")
  found = preprocessing.read(tmp_path / "a.png")
  expected = normalized(resized, [0.5] * 3, [0.5] * 3)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_grey_and_cmyk_images_become_rgb(tmp_path):
  preprocessing = load(tmp_path, SIGLIP | {"resample": 0})
  grey = pixels(24, 20, 1)[..., 0]
  as_rgb = normalized(np.stack([grey] * 3, -1), [0.5] * 3, [0.5] * 3)
  Image.fromarray(grey).save(tmp_path / "grey.png")
  found = preprocessing.read(tmp_path / "grey.png")
  np.testing.assert_allclose(found, as_rgb, atol=1e-6)
  # In CMYK, 255 is full ink: cyan removes red, and black removes all colors.
  ink = np.zeros((24, 20, 4), np.uint8)
  ink[:, :10, 0], ink[:, 10:, 3] = 255, 255
  Image.fromarray(ink, "CMYK").save(tmp_path / "ink.tiff")
  found = preprocessing.read(tmp_path / "ink.tiff")
  assert (found[0, :, :10] == -1).all() and (found[1:, :, :10] == 1).all()
  assert (found[:, :, 10:] == -1).all()
  Image.fromarray(ink, "CMYK").save(tmp_path / "ink.jpg")
  assert np.abs(preprocessing.read(tmp_path / "ink.jpg") - found).max() < 0.2


def header(width, height):
  """Returns a PNG that has this size in its header, but no pixels."""
  body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
  data = b"IDAT" + zlib.compress(b"")
  chunks = [
    struct.pack(">I", len(x) - 4) + x + struct.pack(">I", zlib.crc32(x))
    for x in (body, data)
  ]
  return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_bad_images_are_named_in_one_line(tmp_path):
  preprocessing = load(tmp_path, CLIP)

  def refused(name, content=None):
    if content is not None:
      (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData) as found:
      preprocessing.check([tmp_path / name])
    assert name in str(found.value) and "\n" not in str(found.value)
    return found.value.reason, str(found.value)

  assert refused("none.png")[0] == "missing image"
  assert refused("text.png", b"No image.")[0] == "no image"
  assert refused("empty.jpg", b"")[0] == "no image"
  assert refused("a.ppm", b"P6 9 9 255 " + bytes(243))[0] == "no image"
  (tmp_path / "folder.png").mkdir()
  assert refused("folder.png")[0] == "no image"
  os.mkfifo(tmp_path / "fifo.png")  # Opening it would block.
  assert refused("fifo.png")[0] == "no image"
  reason, message = refused("dot.png", header(1, 1))
  assert reason == "tiny image" and "1 x 1" in message
  # Images too large once resized, or so large that Pillow would warn or refuse.
  reason, message = refused("line.png", header(10**6, 2))
  assert reason == "large image" and "resized" in message
  for side in (9500, 30_000):
    reason, message = refused(f"{side}.png", header(side, side))
    assert reason == "large image" and str(MAX_PIXELS) in message
  Image.fromarray(np.zeros((30, 30), np.uint16)).save(tmp_path / "deep.png")
  assert refused("deep.png")[0] == "deep image"
  # An image of 30,000 x 30 pixels is accepted.
  Image.new("RGB", (30_000, 30)).save(tmp_path / "wide.png")
  assert preprocessing.read(tmp_path / "wide.png").shape == (3, 24, 20)
  # `check` reads only the header, so it accepts a truncated file.
  Image.fromarray(pixels(90, 90)).save(tmp_path / "whole.jpg")
  content = (tmp_path / "whole.jpg").read_bytes()
  (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 2])
  preprocessing.check([tmp_path / "cut.jpg"])
  with pytest.raises(
    BadData, match=r"Pillow cannot read the image .*cut\.jpg: .* truncated"
  ):
    preprocessing.read(tmp_path / "cut.jpg")


@pytest.mark.parametrize(
  "change, message",
  [
    ({"size": {"height": 3}}, "size"),
    ({"size": {"shortest_edge": 0}}, "size 0"),
    ({"do_center_crop": False}, "shortest_edge 24 without do_center_crop"),
    ({"crop_size": 25}, "crop_size"),
    ({"do_rescale": False}, "do_rescale False"),
    ({"do_pad": True}, "the unknown key do_pad"),
    ({"image_mean": [0.5]}, "image_mean"),
    ({"image_std": [0, 1, 1]}, "image_std"),
    ({"image_std": [1, math.nan, 1]}, "image_std nan"),
    ({"image_mean": [10**400, 0, 0]}, "image_mean 1000"),
    ({"rescale_factor": math.inf}, "rescale_factor inf"),
    ({"rescale_factor": "1"}, "rescale_factor 1"),
    ({"resample": 9}, "9 is not a valid"),
  ],
)
def test_unsupported_settings_are_refused(tmp_path, change, message):
  with pytest.raises(ValueError, match=f"preprocessor_config.*{message}"):
    load(tmp_path, CLIP | change)


@pytest.mark.parametrize(
  "size, crop", [((8, 9), None), ((8, 9), (6, 7)), (10, (8, 8))]
)
def test_saved_settings_are_restored(size, crop, tmp_path):
  settings = Preprocessing(
    size=size,
    crop=crop,
    resample=2,
    scale=1 / 127,
    mean=(0.1, 0.2, 0.3),
    std=(0.3, 0.2, 0.1),
  )
  settings.save(tmp_path)
  assert Preprocessing.load(tmp_path) == settings


def test_plain_sizes_are_accepted_but_missing_settings_are_not(tmp_path):
  with pytest.raises(ValueError, match="got neither"):
    Preprocessing.load(tmp_path)
  short = CLIP | {
    "size": 24,
    "crop_size": 24,
    "do_pad": False,
    "pad_size": None,
  }
  assert load(tmp_path, short).shape == (24, 24)
