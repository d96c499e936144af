# SPDX-License-Identifier: Apache-2.0
"""Image folders with one subfolder per class."""

import shutil

import numpy as np
import pytest
from PIL import Image

from tests.train.labelled import write_folder, write_image
from train.data import labelled
from train.data.images import Preprocessing
from train.data.labelled import load_labelled

HALF = (0.5, 0.5, 0.5)
PLAIN = Preprocessing(
  size=(8, 8), crop=None, resample=3, scale=1 / 255, mean=HALF, std=HALF
)


def load(folder, **options):
  return load_labelled(folder, PLAIN, **(dict(held_out=0.25, seed=0) | options))


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_images_in_a_test_or_val_folder_are_held_out(tmp_path, held_out):
  folder = write_folder(tmp_path, parts=("train", held_out))
  (folder / "train/cat/notes.txt").write_text("not an image")
  (folder / "train/.cache").mkdir()
  # A class may have no held-out images.
  shutil.rmtree(folder / held_out / "cat")
  found = load(folder)
  assert found.classes == ("cat", "dog")
  assert found.rows.labels.tolist() == [0] * 8 + [1] * 8
  assert found.held_out.labels.tolist() == [1, 1]
  read = found.held_out.read(1)
  file = folder / held_out / "dog/1.png"
  pixels = np.asarray(Image.open(file), np.float64) / 255
  expected = ((pixels - 0.5) / 0.5).transpose(2, 0, 1)
  np.testing.assert_allclose(read["images"], expected, atol=1e-6)
  assert read["images"].dtype == np.float32
  assert read["labels"] == 1 and read["labels"].dtype == np.int32
  fill = found.rows.read(None)
  assert fill["labels"] == -1 and not fill["images"].any()


def test_a_share_of_each_class_is_held_out(tmp_path):
  write_folder(tmp_path, parts=("",))
  found, again, other = (load(tmp_path, seed=seed) for seed in (0, 0, 1))
  assert np.bincount(found.held_out.labels).tolist() == [2, 2]
  own, others = {*found.rows.files}, {*found.held_out.files}
  assert not own & others and len(own | others) == 16
  assert found.held_out.files == again.held_out.files
  assert found.held_out.files != other.held_out.files
  # A share is also held out if there is only a train folder.
  (tmp_path / "own").mkdir()
  write_folder(tmp_path / "own", parts=("train",))
  found = load(tmp_path / "own", held_out=1e-6)
  assert np.bincount(found.held_out.labels).tolist() == [1, 1]


def test_fingerprint_detects_changes_and_large_sets_stay_on_disk(
  tmp_path, monkeypatch
):
  folder = write_folder(tmp_path / "a")
  first = load(folder)
  shutil.copytree(folder, tmp_path / "b")
  assert load(tmp_path / "b").fingerprint == first.fingerprint
  assert first.change_times is None
  write_image(folder / "train/cat/3.png", 99)
  assert load(folder).fingerprint != first.fingerprint
  (tmp_path / "b/train/cat/3.png").rename(tmp_path / "b/train/dog/8.png")
  assert load(tmp_path / "b").fingerprint != first.fingerprint
  # Images of large sets are read on demand, not kept in memory.
  kept = load(folder)
  monkeypatch.setattr(labelled, "_IN_MEMORY", 1000)
  found = load(folder)
  assert found.rows.pixels is None and found.change_times is not None
  for row in range(16):
    for name, x in kept.rows.read(row).items():
      np.testing.assert_array_equal(found.rows.read(row)[name], x)
