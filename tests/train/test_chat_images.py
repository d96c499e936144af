# SPDX-License-Identifier: Apache-2.0
"""Conversations with images (LLaVA's JSON), from rows to batches."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from train.data.batches import held_out_batches, read_ahead, train_batches
from train.data.chat.documents import load_documents
from train.data.chat.encoder import ChatEncoder
from train.data.chat.images import ChatImages
from train.data.chat.packing import pack
from train.data.chat.template import ChatTemplate
from train.data.images import Preprocessing

LLAMA3 = Path(__file__).parents[1] / "data" / "chat" / "llama3"
SEQ, EACH = 95, 4
PREPROCESSING = Preprocessing(
  size=(4, 6),
  crop=None,
  resample=0,
  scale=1 / 255,
  mean=(0, 0, 0),
  std=(1, 1, 1),
)


def said(*texts):
  roles = ("human", "gpt") * len(texts)
  return [
    {"from": x, "value": text} for x, text in zip(roles, texts, strict=False)
  ]


ROWS = [
  {"image": "red.png", "conversations": said("<image>\nWhat?", "Red.")},
  {"conversations": said("What?", "That.")},
  {
    "image": ["red.png", "blue.png"],
    "conversations": said("<image> or", "No.", "<image>?", "Blue."),
  },
  {"images": ["blue.png"], "conversations": said("What?\n<image>", "B.")},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Makes a folder with two images and a tokenizer that knows <image>."""
  folder = tmp_path_factory.mktemp("vision")
  for file in LLAMA3.iterdir():
    if file.is_file():
      (folder / file.name).write_bytes(file.read_bytes())
  tokenizer = Tokenizer.from_file(str(LLAMA3 / "tokenizer.json"))
  tokenizer.add_special_tokens(["<image>"])
  tokenizer.save(str(folder / "tokenizer.json"))
  for name, color in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
    Image.new("RGB", (9, 7), color).save(folder / f"{name}.png")
  return folder


@pytest.fixture(scope="module")
def encoder(folder):
  template = ChatTemplate.load(folder)
  return ChatEncoder(folder / "tokenizer.json", template)


@pytest.fixture(scope="module")
def images(folder):
  tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
  token = tokenizer.token_to_id("<image>")
  return ChatImages(PREPROCESSING, token, EACH, str(folder))


def load(tmp_path, rows, encoder, images, **options):
  file = tmp_path / "rows.json"
  file.write_text("[" + ",\n".join(map(json.dumps, rows)) + "]")
  options = {"seq": SEQ, "vocab_size": 200_000} | options
  return load_documents([str(file)], encoder, images=images, **options)


def test_images_become_tokens_and_answers_are_learned(
  tmp_path, encoder, images
):
  found = load(tmp_path, ROWS, encoder, images)
  # Without image names, the same conversations are plain text.
  rows = [{"conversations": row["conversations"]} for row in ROWS]
  text = load(tmp_path, rows, encoder, None)
  assert text.images is None and text.fingerprint != found.fingerprint
  assert [
    [image.name for image in found.images_of(i)] for i in range(len(ROWS))
  ] == [["red.png"], [], ["red.png", "blue.png"], ["blue.png"]]
  for i in range(len(ROWS)):
    # Each <image> token becomes four; the rest is unchanged.
    before = text.tokens[text.starts[i] : text.starts[i + 1]].tolist()
    mask = text.mask[text.starts[i] : text.starts[i + 1]].tolist()
    tokens, is_target = [], []
    for token, learned in zip(before, mask, strict=True):
      times = EACH if token == images.token else 1
      tokens += [token] * times
      is_target += [learned] * times
    here = slice(found.starts[i], found.starts[i + 1])
    assert found.tokens[here].tolist() == tokens
    assert found.mask[here].tolist() == is_target
  assert not found.mask[found.tokens == images.token].any()
  # Other images change the fingerprint, even if the tokens are equal.
  other = [{**ROWS[0], "image": "blue.png"}, *ROWS[1:]]
  assert load(tmp_path, other, encoder, images).fingerprint != found.fingerprint


def test_truncation_keeps_whole_images_with_their_answers(
  tmp_path, encoder, images
):
  whole = load(tmp_path, ROWS[2:3], encoder, images)
  found = load(tmp_path, ROWS[2:3], encoder, images, seq=len(whole.tokens) - 2)
  assert found.counts.truncated == len(found.images.found) == 1
  assert [image.name for image in found.images_of(0)] == ["red.png"]
  assert images.count(found.tokens) == 1
  assert found.mask.any() and found.starts[-1] < whole.starts[-1] - EACH


@pytest.mark.parametrize("is_packed", [True, False])
def test_rows_contain_the_images_of_their_documents(
  tmp_path, encoder, images, is_packed
):
  documents = load(tmp_path, ROWS * 3, encoder, images)
  numbers = np.arange(len(documents))
  rows = pack(documents, numbers, seq=SEQ, seed=0, is_packed=is_packed)
  assert rows.images == 2
  assert (len(rows) < len(documents)) == is_packed
  red, blue = np.float32([1, 0, 0]), np.float32([0, 0, 1])
  colors = {"red.png": red, "blue.png": blue}
  seen = []
  for i, members in enumerate(rows.members):
    row = rows.read(i)
    assert row["images"].shape == (2, 3, 4, 6)
    own = [x.name for member in members for x in documents.images_of(member)]
    assert np.count_nonzero(row["tokens"] == images.token) == EACH * len(own)
    expected = [*(colors[name] for name in own), np.zeros(3), np.zeros(3)][:2]
    np.testing.assert_array_equal(row["images"][:, :, 0, 0], expected)
    assert (row["images"] == row["images"][:, :, :1, :1]).all()
    seen += members
  assert sorted(seen) == list(range(len(documents)))
  assert not rows.read(None)["images"].any()
  # Rows of plain text also have room for one image.
  of_text = load(tmp_path, ROWS[1:2], encoder, images)
  of_text = pack(of_text, np.arange(1), seq=SEQ, seed=0)
  assert of_text.read(0)["images"].shape == (1, 3, 4, 6)


def test_batches_with_images_resume_and_keep_their_order_with_threads(
  tmp_path, encoder, images
):
  documents = load(tmp_path, ROWS * 3, encoder, images)
  rows = pack(documents, np.arange(12), seq=SEQ, seed=0)
  batches = train_batches(rows, batch_size=2, seed=3)
  iterator = iter(read_ahead(batches, threads=3))
  for _ in range(2):
    next(iterator)
  state = iterator.get_state()
  expected = [next(iterator) for _ in range(3)]
  again = iter(read_ahead(batches, threads=3))
  again.set_state(state)
  for i, batch in enumerate(expected):
    assert batch["images"].shape == (2, 2, 3, 4, 6)
    for other in (next(again), batches[i + 2]):
      assert other.keys() == batch.keys()
      for key, x in batch.items():
        np.testing.assert_array_equal(other[key], x)
  last = list(held_out_batches(rows, batch_size=len(rows) + 1))[-1]
  assert not last["images"][-1].any() and not last["tokens"][-1].any()


BAD = {
  "one <image> for each image of the row, got 1 in the text for 0": {
    "conversations": said("<image>", "a")
  },
  "got 0 in the text for 1": {
    "image": "red.png",
    "conversations": said("What?", "a"),
  },
  "got 2 in the text for 1": {
    "image": "red.png",
    "conversations": said("<image><image>", "a"),
  },
  "only in the user's text, got it in an answer": {
    "image": "red.png",
    "conversations": said("What?", "<image>"),
  },
  r"the image .*none\.png does not exist": {
    "image": "none.png",
    "conversations": said("<image>", "a"),
  },
  "with a path or a list of paths, got": {
    "image": [3],
    "conversations": said("<image>", "a"),
  },
  r"1 x 1 in .*dot\.png": {
    "image": "dot.png",
    "conversations": said("<image>", "a"),
  },
}


def test_bad_rows_are_named_by_file_and_line(tmp_path, folder, encoder, images):
  Image.new("RGB", (1, 1)).save(folder / "dot.png")
  for message, row in BAD.items():
    with pytest.raises(ValueError, match=message) as found:
      load(tmp_path, [ROWS[0], row], encoder, images)
    assert re.match(rf"chat: {tmp_path}/rows\.json line 2: ", str(found.value))
    assert "\n" not in str(found.value)
  rows = [*BAD.values(), *ROWS]
  counts = load(tmp_path, rows, encoder, images, skip_bad=True).counts
  assert sum(counts.bad.values()) == len(BAD)
  assert counts.bad["wrong number of images"] == 3
  assert counts.bad["missing image"] == counts.bad["tiny image"] == 1


def test_tokenizer_without_image_tokens_is_refused(tmp_path, images):
  plain = ChatEncoder(LLAMA3 / "tokenizer.json", ChatTemplate.load(LLAMA3))
  with pytest.raises(
    ValueError, match="line 1: .* one token .* <image> .* 1 in all, got 0"
  ):
    load(tmp_path, ROWS, plain, images)


def test_damaged_image_is_named_when_it_is_read(
  tmp_path, folder, encoder, images
):
  noise = np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8)
  Image.fromarray(noise).save(folder / "cut.jpg")
  content = (folder / "cut.jpg").read_bytes()
  (folder / "cut.jpg").write_bytes(content[: len(content) // 2])
  rows = [*ROWS, {**ROWS[0], "image": "cut.jpg"}]
  documents = load(tmp_path, rows, encoder, images)
  packed = pack(documents, np.arange(5), seq=SEQ, seed=0, is_packed=False)
  iterator = iter(
    read_ahead(train_batches(packed, batch_size=5, seed=0), threads=1)
  )
  with pytest.raises(
    ValueError, match=r"rows\.json line 5: Pillow .*cut\.jpg: "
  ):
    next(iterator)
