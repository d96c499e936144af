# SPDX-License-Identifier: Apache-2.0
"""Runs the study of Fashion-MNIST on random images, with small models."""

import dataclasses
import gzip
import json
import struct

import numpy as np
import pytest
from PIL import Image

from studies import fashion


@pytest.fixture
def idx(tmp_path):
  """Writes random images in the format of Fashion-MNIST."""
  draw = np.random.default_rng(0)
  folder = tmp_path / "idx"
  folder.mkdir()
  for part, count in (("train", 160), ("t10k", 20)):
    images = draw.integers(0, 256, (count, 28, 28), np.uint8)
    header = struct.pack(">4B3I", 0, 0, 8, 3, *images.shape)
    name = folder / f"{part}-images-idx3-ubyte"
    name.write_bytes(header + images.tobytes())
    labels = np.arange(count, dtype=np.uint8) % 10
    data = struct.pack(">4BI", 0, 0, 8, 1, count) + labels.tobytes()
    name = folder / f"{part}-labels-idx1-ubyte.gz"
    name.write_bytes(gzip.compress(data))
  return folder


def test_images_and_conversations_have_the_classes_of_the_files(idx, tmp_path):
  fashion.write_images(idx, tmp_path)
  pixels, labels = fashion.read_idx(idx, "train")
  number = 13
  said = fashion.CLASSES[labels[number]]
  assert said == "a dress"
  path = tmp_path / "images/train/dress/13.png"
  np.testing.assert_array_equal(np.asarray(Image.open(path)), pixels[number])
  rows = json.loads((tmp_path / "two.json").read_text())
  seen = []
  for row in rows:
    names = row["image"]
    seen += names
    numbers = [int(name.split("/")[-1].split(".")[0]) for name in names]
    classes = [fashion.CLASSES[labels[i]] for i in numbers]
    asked, told = (turn["value"] for turn in row["conversations"])
    assert asked == "<image> <image> What are they ?"
    assert told == " and ".join(classes) + " ."
  for row in json.loads((tmp_path / "one.json").read_text()):
    seen += row["image"]
  assert len(seen) == len(set(seen)) == 160


@pytest.mark.slow
def test_both_models_train_in_both_recipes(idx, tmp_path, monkeypatch):
  small = dict(num_layers=1, d_model=64, d_ff=128, num_heads=2)
  vision = dataclasses.replace(fashion.LLAVA.vision, **small)
  text = dataclasses.replace(fashion.LLAVA.text, num_kv_heads=2, **small)
  monkeypatch.setattr(fashion, "_VISION", vision)
  monkeypatch.setattr(
    fashion,
    "LLAVA",
    dataclasses.replace(fashion.LLAVA, text=text, vision=vision),
  )
  stages = {key: (*x[:3], 1) for key, x in fashion.STAGES.items()}
  monkeypatch.setattr(fashion, "STAGES", stages)
  monkeypatch.setattr(fashion, "BATCH", {"vit": 64, "llava": 8})
  monkeypatch.setattr(fashion, "STEPS", 3)
  fashion.main(["images", str(idx), str(tmp_path)])
  for model in ("vit", "llava"):
    fashion.main([model, str(tmp_path), "--seeds", "0"])
  lines = (tmp_path / "rows.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert [row["case"]["recipe"] for row in rows] == ["bf16", "coat"] * 2
  for key, each in (("held_out_loss", rows[:2]), ("decoder_loss", rows[2:])):
    losses = [row[key] for row in each]
    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=0.1)
