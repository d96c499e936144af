# SPDX-License-Identifier: Apache-2.0
"""Tests that damaged and missing checkpoints are refused with one sentence."""

import json
import shutil

import numpy as np
import pytest

from coat_jax.models import load_hf
from coat_jax.models.hf import load
from tests.models.hf.folders import (
  copied,
  split,
  tensors_of,
  write_index,
)

NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
  return copied(tmp_path / "checkpoint")


def assert_refused(folder, words):
  with pytest.raises(ValueError) as caught:
    load_hf(folder)
  message = str(caught.value)
  assert message.startswith("load_hf: ") and "\n" not in message
  assert words in message, message


@pytest.mark.parametrize(
  "tensors, words",
  [
    ({NAME: None}, f"got no {NAME}; copy the whole"),
    (
      {NAME: np.zeros((64, 65), "f")},
      f"got {NAME} [64, 65] instead of [64, 64",
    ),
    ({"model.more": np.zeros(3, "f")}, "got model.more too, which this model"),
    ({NAME: np.zeros((64, 64))}, f"F32, F16, BF16, got {NAME} of F64"),
    ({NAME: np.zeros((64, 64), "i4")}, f"got {NAME} of I32"),
  ],
)
def test_wrong_tensors_are_refused(tensors, words, tmp_path):
  assert_refused(copied(tmp_path / "m", tensors=tensors), words)


def test_tied_output_projection_must_equal_the_embedding(tmp_path, monkeypatch):
  folder = copied(tmp_path / "m", tie_word_embeddings=True)
  words = "got different lm_head.weight and model.embed_tokens"
  assert_refused(folder, words)
  # Compare 100 rows at a time, and then the last 84 of 384 rows.
  monkeypatch.setattr(load, "_ROWS", 100)
  embedding = tensors_of(folder)["model.embed_tokens.weight"]
  for row in (0, 150, 383):
    head = embedding.copy()
    head[row, 5] += 1
    head = {"lm_head.weight": head}
    folder = copied(tmp_path / f"{row}", tensors=head, tie_word_embeddings=True)
    assert_refused(folder, words)


def test_folders_without_a_checkpoint_are_refused(folder):
  file = folder / "config.json"
  assert_refused(file, "config.json and model.safetensors, got a file;")
  assert_refused(folder / "absent", "got nothing of that name;")
  (folder / "empty").mkdir()
  assert_refused(folder / "empty", "got an empty folder;")
  weights = folder / "model.safetensors"
  weights.rename(folder / "other.safetensors")
  assert_refused(folder, "model.safetensors.index.json, got neither;")
  (folder / "pytorch_model.bin").write_bytes(b"")
  assert_refused(
    folder, "got pytorch_model.bin, a pickle, which can run arbitrary"
  )
  file.unlink()
  assert_refused(
    folder, "config.json must hold a JSON object, got No such file"
  )


def damaged(folder, data):
  (folder / "model.safetensors").write_bytes(data)
  return folder


def header_of(data):
  length = int.from_bytes(data[:8], "little")
  return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(data, change):
  header, rest = header_of(data)
  text = json.dumps(change(header) or header).encode()
  return len(text).to_bytes(8, "little") + text + rest


def test_damaged_files_are_refused(folder):
  data = (folder / "model.safetensors").read_bytes()
  length = int.from_bytes(data[:8], "little")
  for end in (len(data) - 1, length + 100):
    assert_refused(damaged(folder, data[:end]), "it was cut short")
  for end in (0, 7, 8, 300):
    words = f"got {end} bytes with a header of"
    assert_refused(damaged(folder, data[:end]), words)
  assert_refused(damaged(folder, data + b"\0"), "bytes of tensors, got")
  huge = (2**60).to_bytes(8, "little") + data[8:]
  assert_refused(damaged(folder, huge), f"with a header of {2**60}")
  noise = data[:8] + b"\xff" * length + data[8 + length :]
  assert_refused(damaged(folder, noise), "must begin with a JSON header")
  deep = (300_000).to_bytes(8, "little") + b"[" * 300_000
  assert_refused(damaged(folder, deep), "brackets nested too deeply")
  text = b'{"a": 1, "a": 2}'
  twice = len(text).to_bytes(8, "little") + text
  assert_refused(damaged(folder, twice), "got the key 'a' twice")
  damaged(folder, with_header(data, lambda header: [1]))
  assert_refused(folder, "JSON header, got a list")


@pytest.mark.parametrize(
  "entry",
  [
    dict(data_offsets=[0, 4]),
    dict(data_offsets=[16384, 0]),
    dict(data_offsets=[0]),
    dict(data_offsets="all"),
    dict(shape=[64, -64]),
    dict(shape=[True, 4096]),
    dict(shape=[2**60, 2**60]),
    dict(dtype=None),
    dict(dtype=["F32"]),
    dict(dtype={"F32": 1}),
  ],
)
def test_invalid_header_entries_are_refused(entry, folder):
  data = (folder / "model.safetensors").read_bytes()
  damaged(folder, with_header(data, lambda header: header[NAME].update(entry)))
  assert_refused(
    folder, f"dtype, shape and data_offsets of each tensor, got {NAME}"
  )


def test_overlapping_tensors_are_refused(folder):
  data = (folder / "model.safetensors").read_bytes()
  other = NAME.replace(".1.", ".0.")

  def change(header):
    header[NAME]["data_offsets"] = header[other]["data_offsets"]

  damaged(folder, with_header(data, change))
  assert_refused(folder, "must hold tensors one after another")


def test_missing_shards_are_refused(folder):
  shard = "model-00002-of-00003.safetensors"
  (split(folder) / shard).unlink()
  assert_refused(
    folder, f"lists {shard}, which is not in the folder; copy all 3"
  )


@pytest.mark.parametrize(
  "name",
  [
    "../m.safetensors",
    "/etc/passwd",
    "a/b.safetensors",
    "..",
    ".",
    "",
    "a\\b.safetensors",
    "m.bin",
    "\0.safetensors",
  ],
)
def test_index_may_only_name_files_of_its_folder(name, folder):
  shutil.copy(folder / "model.safetensors", folder.parent / "m.safetensors")
  places = dict.fromkeys(tensors_of(folder), name)
  (folder / "model.safetensors").unlink()
  write_index(folder, places)
  assert_refused(folder, f"must list files in its folder, got {name!r}")


def test_index_must_match_its_shards(folder):
  index = split(folder) / "model.safetensors.index.json"
  places = json.loads(index.read_text())["weight_map"]
  first, *others = sorted(places)
  write_index(folder, {name: places[name] for name in others})
  assert_refused(folder, f"got None for {first}, which is in model-00001-of")
  write_index(folder, places | {"more": places[first]})
  assert_refused(folder, "00003.safetensors for more, which is in no file")
  for text in ('{"weight_map": []}', "{}", '{"weight_map": {}}'):
    index.write_text(text)
    assert_refused(folder, "must have a weight_map from tensors to files")
  index.write_text("nothing")
  assert_refused(folder, "must hold a JSON object, got Expecting value")
