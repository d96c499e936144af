# SPDX-License-Identifier: Apache-2.0
"""Images, options and runs that fine-tuning with images refuses."""

import dataclasses
import json
import re
import shutil
import sys

import pytest
from PIL import Image

from tests.train import llava
from tests.train.data.test_images import header
from tests.train.folders import with_tokenizer
from tests.train.llava import config_of, run
from tests.train.runs import contents
from train import evaluate
from train.conversations import load
from train.finetune_config import ChatData
from train.mesh import check_tower_fits
from train.optim_config import OptimConfig
from train.run.description import describe


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return llava.make(tmp_path_factory.mktemp("shapes"))


def asked(text, **row):
  turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "it"}]
  return {"conversations": turns, **row}


def test_bad_images_are_named_and_nothing_is_written(folder, tmp_path, capsys):
  images = tmp_path / "images"
  images.mkdir()
  Image.new("RGB", (1, 1)).save(images / "dot.png")
  (images / "wide.png").write_bytes(header(30_000, 30_000))
  (images / "cut.png").write_bytes(header(64, 64)[:20])
  shutil.copy(folder / "images" / "0_0.png", images / "good.png")
  bad = {
    "does not exist": asked("<image> What", image="none.png"),
    "got 1 in the text for 0": asked("<image> What"),
    "got 0 in the text for 1": asked("What", image="good.png"),
    "expected an image in one of the formats JPEG": asked(
      "<image> What", image="cut.png"
    ),
    "got 1 x 1": asked("<image> What", image="dot.png"),
    "at most 89000000 pixels, got": asked("<image> What", image="wide.png"),
  }
  good = [asked("<image> What", image="good.png"), asked("What")]
  out, file = tmp_path / "run", tmp_path / "rows.jsonl"
  config = config_of(folder, batch=1, trained="projector")
  data = dict(files=(str(file),), held_out=0.3, images=str(images))

  def load_rows(*rows, **options):
    file.write_text("".join(json.dumps(x) + "\n" for x in rows))
    options = ChatData(**data | options)
    return load(dataclasses.replace(config, data=options))

  for words, row in bad.items():
    where = re.escape(f"chat: {file} line 3: ")
    with pytest.raises(ValueError, match=f"^{where}.*{words}"):
      load_rows(*good, row)
  # The file still ends with the last bad row.
  assert run(folder / "llava", file, out) == 2
  errors = capsys.readouterr().err
  assert f"{file} line 3: " in errors and words in errors
  assert "Traceback" not in errors and not out.exists()
  load_rows(*bad.values(), *good, *good, skip_bad=True)
  said = capsys.readouterr().err
  assert "10 rows; bad rows left out: 6 (1 large image, first at " in said
  assert "; 1 missing image, first at " in said
  # Without --images, names are relative to the file of rows.
  words = "line 1: the image .* does not exist; pass --images"
  with pytest.raises(ValueError, match=words) as raised:
    load_rows(*good, images="")
  assert "correct the row" not in str(raised.value)
  with pytest.raises(ValueError, match=f"{words}.*, not .*/images, or skip"):
    load_rows(asked("<image> What", image="none.png"))


def test_images_path_that_is_not_a_folder_is_refused_at_once(
  folder, tmp_path, capsys
):
  start, data, out = folder / "llava", folder / "shapes.json", tmp_path / "run"
  file = tmp_path / "file"
  file.touch()
  for images in (tmp_path / "nowhere", file):
    # --skip-bad must not skip all rows with images.
    for flags in ([], ["--skip-bad"]):
      assert run(start, data, out, *flags, images=images) == 2
      errors = capsys.readouterr().err
      assert (
        f"are relative to, got {images}, which is not a folder; pass" in errors
      )
      assert "line 1" not in errors and not out.exists()
  line = [start, "--conversations", data, "--images", tmp_path / "nowhere"]
  assert evaluate.main([*map(str, line)]) == 2
  assert "nowhere, which is not a folder; pass" in capsys.readouterr().err


def test_options_that_do_not_fit_the_model_are_refused(
  folder, tmp_path, monkeypatch, capsys
):
  text = with_tokenizer(tmp_path / "text")
  other = shutil.copytree(folder / "llava", tmp_path / "other")
  file = other / "preprocessor_config.json"
  file.write_text(file.read_text().replace("32", "16"))
  data = folder / "shapes.json"
  out = tmp_path / "run"
  assert run(text, data, out) == 2
  errors = capsys.readouterr().err
  assert "images needs a vision-language model, got a text-only" in errors
  assert "Traceback" not in errors and not out.exists()
  muon = OptimConfig(lr=1e-3, warmup=1, optimizer="coat_muon", group_size=16)
  share = OptimConfig(lr=1e-3, warmup=1, group_size=16, clip="share")
  for words, options in {
    "trained needs a vision-language model": dict(
      init_from=str(text), data=ChatData(), trained="all"
    ),
    "watch needs a text-only model": dict(watch=1),
    "optim.optimizer coat_muon needs a text-only model": dict(optim=muon),
    "optimizer_in_backward needs a text-only model": dict(
      optim=share, optimizer_in_backward=True
    ),
    "num_tokens of the vision tower, got tensor=2 and 17": dict(
      mesh="data=4,tensor=2", activation_group_size=8
    ),
  }.items():
    with pytest.raises(ValueError, match=words):
      config_of(folder, **options)
  with pytest.raises(ValueError, match="needs images of 3 x 32 x 32"):
    load(config_of(folder, init_from=str(other)))
  vision = dataclasses.replace(llava.CONFIG.vision, d_ff=136)
  words = "fsdp must divide d_ff of the vision tower / tensor=1, got fsdp=16"
  with pytest.raises(ValueError, match=words):
    check_tower_fits({"fsdp": 16}, vision)
  monkeypatch.setitem(sys.modules, "train.data.chat.images", None)
  with pytest.raises(ValueError, match=r"pip install '\.\[vision\]'"):
    load(config_of(folder))


def test_run_without_checkpoint_or_start_folder_is_refused(
  folder, tmp_path, capsys
):
  data, out = folder / "shapes.json", tmp_path / "run"
  config, source = load(config_of(folder))
  start = tmp_path / "start"
  start.mkdir()
  described = json.dumps(describe(config, source))
  (start / "config.json").write_text(described)
  assert run(start, data, out) == 2
  assert "has no checkpoint yet" in capsys.readouterr().err
  (start / "checkpoints" / "3").mkdir(parents=True)
  assert run(start, data, out) == 2
  assert "did not start from a Hugging Face folder" in capsys.readouterr().err
  before = contents(start)
  assert run(start, data, start, "--overwrite") == 2
  assert "is also the --out" in capsys.readouterr().err
  assert contents(start) == before and not out.exists()
