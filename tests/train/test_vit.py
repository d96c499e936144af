# SPDX-License-Identifier: Apache-2.0
"""`python -m train.vit`: from a folder of images to a classifier."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from PIL import Image

from tests.train.data.test_images import header
from tests.train.labelled import write_folder, write_image
from tests.train.runs import (
  ROOT,
  losses,
  programs_on_disk,
  wait_for_step,
)
from train import convert, generate, vit
from train.data import digits
from train.data.images import Preprocessing
from train.objective import objective_of
from train.run.metrics import read_metrics
from train.update import microbatches
from train.vit_config import ImageData, vit_digits

MODEL = dict(num_layers=2, d_model=32, d_ff=64, num_heads=2, patch_size=4)
OPTIONS = {
  **{f"model.{name.replace('_', '-')}": x for name, x in MODEL.items()},
  "batch": 8,
  "steps": 8,
  "eval-every": 4,
  "save-every": 4,
  "optim.warmup": 2,
  "optim.lr": 3e-3,
}


def line(data, out, *flags, **others):
  others = {
    name.replace("__", ".").replace("_", "-"): x for name, x in others.items()
  }
  words = ["vit_digits", "--data", str(data), "--out", str(out), *flags]
  for name, x in (OPTIONS | others).items():
    words += [f"--{name}", str(x)]
  return words


def config_of(data, **options):
  preset = vit_digits()
  return dataclasses.replace(
    preset,
    model=dataclasses.replace(preset.model, **MODEL),
    data=ImageData(folder=str(data)),
    **(dict(batch=8, out="unused") | options),
  )


def _truncated(folder):
  file = folder / "train/cat/3.png"
  file.write_bytes(file.read_bytes()[:-60])
  return "Pillow cannot read the image {}/train/cat/3.png"


def _tiny(folder):
  Image.new("RGB", (1, 1)).save(folder / "test/dog/1.png")
  return "at least 2 x 2 pixels, got 1 x 1 in {}/test/dog/1.png"


def _large(folder):
  (folder / "train/cat/1.png").write_bytes(header(30_000, 30_000))
  return "at most 89000000 pixels, got {}/train/cat/1.png"


def _no_image(folder):
  (folder / "train/cat/1.png").write_text("cat")
  return "got {}/train/cat/1.png, which is in none of them"


def _empty(folder):
  for file in (folder / "train/cat").iterdir():
    file.unlink()
  return "each class needs an image, got none in {}/train/cat"


def _one_class(folder):
  shutil.rmtree(folder / "train/cat")
  return "{}/train must contain folders of at least two classes, got dog; add"


def _none(folder):
  shutil.rmtree(folder)
  return "for each class, got {}, which is not a folder"


def _new_class(folder):
  (folder / "test/cow").mkdir()
  return "must also have training images, got cow only in {}/test"


def _few(folder):
  for i in range(5):
    (folder / f"train/cat/{i}.png").unlink()
    (folder / f"train/dog/{i}.png").unlink()
  return "at most 6, the number of training images, got 8; lower --batch"


def _alone(folder):
  shutil.rmtree(folder / "test")
  for i in range(1, 8):
    (folder / f"train/cat/{i}.png").unlink()
  return "needs two images, one to train on and one to hold out, got only {}"


@pytest.mark.parametrize(
  "damage",
  (
    *(_truncated, _tiny, _large, _no_image, _empty),
    *(_one_class, _none, _new_class, _few, _alone),
  ),
)
def test_bad_images_are_refused_and_nothing_is_written(
  damage, tmp_path, capsys
):
  folder = write_folder(tmp_path / "images")
  text = damage(folder).format(folder)
  assert vit.main(line(folder, tmp_path / "out")) == 2
  (error,) = (
    line for line in capsys.readouterr().err.splitlines() if "error" in line
  )
  assert text in error
  assert not (tmp_path / "out").exists()


def test_data_given_twice_is_refused(tmp_path, capsys):
  folder, out = write_folder(tmp_path / "images"), tmp_path / "out"
  with pytest.raises(SystemExit, match="2"):
    vit.main([*line(folder, out), "--data", str(folder)])
  assert "--data was given several times; put all images" in (
    capsys.readouterr().err
  )
  assert not out.exists()


def test_held_out_share_is_refused_next_to_a_held_out_folder(tmp_path, capsys):
  folder, out = write_folder(tmp_path / "images"), tmp_path / "out"
  assert vit.main(line(folder, out, held_out=0.3)) == 2
  words = (
    "held_out applies only without a folder of held-out images, got 0.3 and "
    f"{folder}/test; "
  )
  assert words in capsys.readouterr().err
  assert not out.exists()


@pytest.mark.parametrize(
  "option, value", [("num-channels", 1), ("family", "clip_vision")]
)
def test_models_for_other_images_are_refused(option, value, tmp_path, capsys):
  folder, out = write_folder(tmp_path / "images"), tmp_path / "out"
  words = [f"--model.{option}", str(value)]
  assert vit.main([*line(folder, out), *words]) == 2
  assert "need family vit and num_channels 3, got" in capsys.readouterr().err
  assert not out.exists()


@pytest.mark.parametrize("option", ["seq", "watch", "init_from"])
def test_options_of_decoders_are_refused(option, tmp_path, capsys):
  with pytest.raises(SystemExit):
    vit.main(line(tmp_path, tmp_path / "out", **{option: 1}))
  assert option.replace("_", "-") in capsys.readouterr().err


def test_batches_have_all_kinds_of_images_and_are_split_by_process(tmp_path):
  folder = write_folder(tmp_path / "images")
  Image.new("CMYK", (30, 8)).save(folder / "train/cat/8.jpg")
  Image.new("L", (30_000, 2)).save(folder / "train/cat/9.png")
  config, data = vit.load(config_of(folder))
  assert config.model.num_classes == 2 and len(data.rows) == 18
  assert config.seq == config.model.num_tokens == 5
  shapes = data.batch_shapes(config)
  whole = next(data.train_batches(config, process_index=0, process_count=1))
  parts = [
    next(data.train_batches(config, process_index=i, process_count=2))
    for i in range(2)
  ]
  for name, x in whole.items():
    assert (x.shape, x.dtype) == (shapes[name].shape, shapes[name].dtype)
    np.testing.assert_array_equal(np.concatenate([y[name] for y in parts]), x)
  # Each held-out image occurs once; rows labelled -1 fill up the batch.
  (held_out,) = data.eval_batches(config, process_index=0, process_count=1)
  assert sorted(held_out["labels"]) == [-1] * 4 + [0, 0, 1, 1]
  with pytest.raises(
    ValueError, match="the images have . classes, got num_classes"
  ):
    vit.load(
      dataclasses.replace(
        config, model=dataclasses.replace(config.model, num_classes=3)
      )
    )


def test_loss_and_accuracy_ignore_rows_that_fill_up_a_batch():
  draw = np.random.default_rng(0)
  logits = draw.normal(size=(8, 3)).astype(np.float32)
  labels = np.array([0, 1, 2, -1, 0, 1, -1, -1], np.int32)
  objective = objective_of(vit_digits().model)

  @jax.jit
  def measure(rows):
    batch = objective.batch_of(rows)
    parts = microbatches(batch, 2)
    parts = batch, *(jax.tree.map(lambda x, i=i: x[i], parts) for i in (0, 1))
    # The model returns its input as logits.
    return [objective.measure(lambda images: images, each) for each in parts]

  found = jax.device_get(measure({"images": logits, "labels": labels}))
  is_image = labels >= 0
  exact = logits.astype(np.float64)
  nats = np.log(np.exp(exact).sum(-1)) - exact[np.arange(8), labels]
  expected = {"loss": nats, "accuracy": exact.argmax(-1) == labels}
  # Microbatches have different numbers of images, but each image counts once.
  for name, each in expected.items():
    whole, *parts = (float(x[name]) for x in found)
    assert whole == pytest.approx(each[is_image].mean(), abs=1e-6)
    assert sum(parts) == pytest.approx(whole, abs=1e-6)


def test_digits_are_written_once(tmp_path, monkeypatch, capsys):
  out = tmp_path / "digits"
  monkeypatch.setitem(sys.modules, "sklearn", None)
  assert digits.main([str(out)]) == 2
  assert "pip install scikit-learn" in capsys.readouterr().err
  images = np.arange(12 * 64).reshape(12, 8, 8) % 17
  found = types.SimpleNamespace(images=images, target=np.arange(12) % 2)
  datasets = types.SimpleNamespace(load_digits=lambda: found)
  fake = types.SimpleNamespace(datasets=datasets)
  monkeypatch.setitem(sys.modules, "sklearn", fake)
  assert digits.main([str(out)]) == 0 and digits.main([str(out)]) == 2
  files = sorted(str(x.relative_to(out)) for x in out.rglob("*.png"))
  held_out = [x for x in files if x.startswith("test")]
  assert len(files) == 12
  names = ("0/0000", "0/0010", "1/0001", "1/0011")
  assert held_out == [f"test/{name}.png" for name in names]
  written = np.asarray(Image.open(out / "train/1/0003.png"))
  np.testing.assert_array_equal(written, np.round(images[3] * 255 / 16))
  assert written.max() == 255


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
  with programs_on_disk(tmp_path_factory.mktemp("programs")) as found:
    yield found


@pytest.mark.slow
def test_run_learns_and_a_killed_run_resumes_bit_for_bit(
  environment, tmp_path, capsys
):
  folder = write_folder(tmp_path / "images")
  long = dict(steps=40, eval_every=20, save_every=5)
  flags = ("--report-state",)
  assert vit.main(line(folder, tmp_path / "whole", *flags, **long)) == 0
  assert "held-out accuracy" in (table := capsys.readouterr().out)
  assert "perplexity" not in table
  rows = [*read_metrics(tmp_path / "whole/metrics.jsonl")]
  found = [row for row in rows if "held_out_loss" in row]
  assert [row["step"] for row in found] == [20, 40]
  assert found[-1]["held_out_accuracy"] == 1
  assert found[-1]["held_out_loss"] < 0.3
  # Kill a second run and resume it.
  out = tmp_path / "killed"
  process = subprocess.Popen(
    [sys.executable, "-m", "train.vit", *line(folder, out, *flags, **long)],
    cwd=ROOT,
    env={**os.environ, **environment},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  wait_for_step(process, out, 12)
  process.kill()
  process.communicate()
  assert vit.main(line(folder, out, *flags, "--resume", **long)) == 0
  assert "resumed at step" in capsys.readouterr().err
  assert losses(out) == losses(tmp_path / "whole")
  # Commands for text refuse the run, and it cannot resume with other images.
  assert generate.main([str(out), "--prompt", "a"]) == 2
  assert "expected a run that was trained on text" in capsys.readouterr().err
  write_image(folder / "train/cat/0.png", 99)
  more = dict(long, steps=45)
  assert vit.main(line(folder, out, *flags, "--resume", **more)) == 2
  assert "data: the fingerprint differs" in capsys.readouterr().err


@pytest.mark.slow
def test_exported_tower_has_class_names_and_preprocessing(
  environment, tmp_path, capsys
):
  folder, run = write_folder(tmp_path / "images"), tmp_path / "run"
  few = dict(steps=2, eval_every=2, save_every=2)
  assert vit.main(line(folder, run, **few)) == 0
  out = tmp_path / "out"
  export = ["export-hf", str(run), "--out", str(out)]
  assert convert.main(export) == 0
  config = json.loads((out / "config.json").read_bytes())
  assert config["id2label"] == {"0": "cat", "1": "dog"}
  assert config["label2id"] == {"cat": 0, "dog": 1}
  # The exported settings produce the same pixels as in training.
  _, data = vit.load(config_of(folder))
  trained = data.rows
  assert Preprocessing.load(out) == trained.preprocessing
  found = json.loads((out / "preprocessor_config.json").read_bytes())
  with Image.open(trained.files[3]) as image:
    pixels = _as_transformers_does(image, found)
  np.testing.assert_array_equal(pixels, trained.read(3)["images"])
  # A damaged list of classes is refused; without a list, classes are numbered.
  names = run / "hf" / "classes.json"
  names.write_text('["cat"')
  again = tmp_path / "again"
  assert convert.main(["export-hf", str(run), "--out", str(again)]) == 2
  assert (
    f"expected a JSON list of class names in {names}" in capsys.readouterr().err
  )
  shutil.rmtree(run / "hf")
  assert convert.main(["export-hf", str(run), "--out", str(again)]) == 0
  config = json.loads((again / "config.json").read_bytes())
  assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}


def _as_transformers_does(image, settings):
  """Prepares an image by the documented steps of ViTImageProcessor."""
  assert settings["image_processor_type"] == "ViTImageProcessor"
  assert all(
    settings[f"do_{x}"]
    for x in ("convert_rgb", "resize", "rescale", "normalize")
  )
  size = settings["size"]["width"], settings["size"]["height"]
  resized = image.convert("RGB").resize(size, settings["resample"])
  scaled = np.asarray(resized) * np.float64(settings["rescale_factor"])
  channels = [
    (scaled.astype(np.float32)[..., i] - np.float32(mean)) / np.float32(std)
    for i, (mean, std) in enumerate(
      zip(settings["image_mean"], settings["image_std"], strict=True)
    )
  ]
  return np.stack(channels)
