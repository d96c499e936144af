# SPDX-License-Identifier: Apache-2.0
"""Tokenizer files: long texts in pieces, and unusable files."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from train.data import tokenizer
from train.data.text import TokenizerText
from train.data.tokenizer import Tokenizer

CHAT = Path(__file__).parents[2] / "data" / "chat"
# Lines, template tokens, and a long last line without a line end.
TEXT = (
  "What is this? It is five.\n" * 30
  + "<|start_header_id|>user<|end_header_id|>\n\n" * 20
  + "a  b<|eot_id|>" * 60
)


def changed(tmp_path, **parts):
  """Writes Llama 3's tokenizer.json with some parts changed."""
  found = json.loads((CHAT / "llama3" / "tokenizer.json").read_text())
  file = tmp_path / "tokenizer.json"
  file.write_text(json.dumps(found | parts))
  return str(file)


@pytest.mark.parametrize("name", ["llama3", "qwen2_5"])
def test_pieces_give_the_same_tokens_as_the_whole_text(name, monkeypatch):
  file = str(CHAT / name / "tokenizer.json")
  library = tokenizers.Tokenizer.from_file(file)
  # Llama's post-processor would trim spaces from the offsets of tokens.
  library.post_processor = None
  texts = [TEXT, "", "\n", "five" * 40, TEXT[:50]]
  whole = library.encode_batch(texts, add_special_tokens=False)
  monkeypatch.setattr(tokenizer, "PIECE", 37)
  made = Tokenizer(file)
  made.drop_post_processor()
  found = list(made.encode_each(texts))
  pieces = [piece for piece, _, _ in made.split(TEXT)]
  assert "".join(pieces) == TEXT and max(map(len, pieces)) <= 37
  added = library.get_added_tokens_decoder().values()
  for token in (each.content for each in added):
    assert sum(x.count(token) for x in pieces) == TEXT.count(token), token
  assert len(found) == len(texts)
  for i in (0, 1, 2, 4):
    ids, offsets = found[i]
    assert ids.dtype == np.int32 and ids.tolist() == whole[i].ids
    assert offsets.tolist() == list(map(list, whole[i].offsets))
  # Without line ends, words are cut.
  ids, offsets = found[3]
  assert offsets[0, 0] == 0 and offsets[-1, 1] == 160
  assert (offsets[1:, 0] == offsets[:-1, 1]).all()


def test_pieces_do_not_cut_an_added_token_that_contains_a_line_end(monkeypatch):
  monkeypatch.setattr(tokenizer, "PIECE", 8)
  made = Tokenizer(str(CHAT / "qwen2_5" / "tokenizer.json"))
  made.added_tokens = ["<line\nbreak>"]
  text = "a<line\nbreak>" + 20 * "b"
  pieces = [piece for piece, _, _ in made.split(text)]
  assert pieces[0] == "a" and "".join(pieces) == text


def test_kept_tokens_do_not_depend_on_splitting(monkeypatch):
  # Llama 2's normalizer adds a token to each text, so to each piece too.
  file = str(CHAT / "llama2" / "tokenizer.json")
  text = "What is this?\n" * 40
  library = tokenizers.Tokenizer.from_file(file)
  whole = library.encode(text, add_special_tokens=False).ids
  monkeypatch.setattr(tokenizer, "PIECE", 32)
  ((ids, _),) = Tokenizer(file).encode_each([text], kept=20)
  assert len(whole) > 40 and ids[:20].tolist() == whole[:20]
  assert ids.tolist() != whole


def test_library_gets_limited_numbers_of_texts_and_characters(monkeypatch):
  monkeypatch.setattr(tokenizer, "PIECE", 1000)
  monkeypatch.setattr(tokenizer, "_CHARACTERS", 4000)
  made = Tokenizer(str(CHAT / "llama3" / "tokenizer.json"))
  library, sizes = made._whole, []

  class Watched:
    def encode_batch(self, texts, **options):
      sizes.append([len(text) for text in texts])
      return library.encode_batch(texts, **options)

  made._whole = Watched()
  lengths = [2700, *[3] * 600, *[800] * 6, 0]
  found = made.encode_each("a" * length for length in lengths)
  assert [int(places.max(initial=0)) for _, places in found] == lengths
  assert sum(map(sum, sizes)) == sum(lengths)
  assert max(map(sum, sizes)) <= 4000 and max(map(len, sizes)) <= 256
  assert max(map(max, sizes)) == 1000 and len(sizes) < 10


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
  # The library panics if it truncates with a stride beyond the length.
  cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst"}
  file = changed(tmp_path, truncation=cut | {"stride": 5})
  whole = Tokenizer(str(CHAT / "llama3" / "tokenizer.json")).encode([TEXT])
  assert Tokenizer(file).encode([TEXT]) == whole
  assert TokenizerText(file).encode(TEXT) == whole[0]


@pytest.mark.parametrize(
  "parts",
  [
    # The library panics; a panic is not an Exception.
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    # The library raises a bare Exception.
    {
      "model": {
        **{"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"b": 0}},
        **{"continuing_subword_prefix": "", "max_input_chars_per_word": 9},
      }
    },
  ],
)
def test_errors_of_the_library_name_the_file(tmp_path, parts):
  file = changed(tmp_path, **parts)
  for use in (
    lambda: TokenizerText(file).encode(TEXT),
    lambda: Tokenizer(file).first_tokens(),
    lambda: list(Tokenizer(file).encode_each([TEXT])),
  ):
    with pytest.raises(
      ValueError, match=r"tokenizer.json (could not be read|failed to)"
    ):
      use()
