# SPDX-License-Identifier: Apache-2.0
"""Encoding and decoding text."""

import json

import pytest
import tokenizers

from train.data.text import ByteText, TokenizerText, open_text
from train.data.tokens import DataConfig

WORDS = ["the", "cat", "<|endoftext|>", "<|im_end|>", "[UNK]", "<s>"]
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<s>"]


@pytest.fixture
def folder(tmp_path):
  """Makes a folder with a tokenizer.json of `WORDS`."""
  model = tokenizers.models.WordLevel(
    {word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"
  )
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens(SPECIAL)
  # The post-processor's token must not be added.
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", WORDS.index("<s>"))]
  )
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  return tmp_path


def configure(folder, **config):
  (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_ids_are_bytes_and_invalid_ids_are_replaced():
  text = ByteText()
  assert text.encode("é!") == [0xC3, 0xA9, 33]
  assert text.decode([0xC3, 0xA9, 33]) == "é!"
  # Half a character, and an id that is not a byte, are replaced.
  replaced = "A{0}B{0}C".format("\N{REPLACEMENT CHARACTER}")
  assert text.decode([65, 0xC3, 66, 300, 67]) == replaced
  # If a command line is not UTF-8, Python represents its bytes like this.
  assert text.encode("\udcff") == [0xFF]


def test_tokenizer_adds_no_token_and_names_the_stop_tokens(folder):
  text = TokenizerText(str(folder / "tokenizer.json"))
  assert text.encode("the cat \udcff") == [0, 1, 4]
  assert text.decode([0, 1, 2]) == "the cat"
  assert text.stop_tokens == (2,)
  assert text.chat is None
  configure(folder, chat_template="x", eos_token="<|im_end|>")
  text = TokenizerText(str(folder / "tokenizer.json"))
  assert text.stop_tokens == (2, 3)


def test_text_uses_the_tokenizer_of_the_data_or_the_given_one(folder, tmp_path):
  path = str(folder / "tokenizer.json")
  assert isinstance(open_text(DataConfig(), None), ByteText)
  for data, given in (
    (DataConfig(path="x", tokenizer=path), None),
    (DataConfig(), path),
  ):
    assert open_text(data, given).encode("cat") == [1]
  ids = DataConfig(path="x", dtype="uint16")
  with pytest.raises(
    ValueError, match="dtype uint16. and has no tokenizer; pass --tokenizer"
  ):
    open_text(ids, None)
  assert open_text(ids, path).encode("cat") == [1]
