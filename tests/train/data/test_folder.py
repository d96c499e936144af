# SPDX-License-Identifier: Apache-2.0
"""The tokens that begin and end texts, read from Hugging Face folders."""

from typing import Any

import pytest

from tests.train.folders import with_tokenizer, write_json
from train.data.text import FolderText

NONE: Any = dict(bos_token_id=..., eos_token_id=...)


@pytest.mark.parametrize(
  "begin, config, first, prefix",
  [
    # The post-processor adds the first token, as in Llama and Gemma.
    (7, {}, (7,), 1),
    (7, {"bos_token": "t7"}, (7,), 7),
    # Nothing adds a first token, as in Qwen. The prefix comes from config.json.
    (None, {"bos_token": None, "eos_token": "t9"}, (), 1),
    # tokenizer_config.json overrides the post-processor.
    (None, {"add_bos_token": True, "bos_token": {"content": "t7"}}, (7,), 7),
    (7, {"add_bos_token": False, "bos_token": "t7"}, (), 7),
    # If the named token does not exist, config.json's token is added.
    (None, {"add_bos_token": True, "bos_token": "no token"}, (1,), 1),
  ],
)
def test_files_determine_first_tokens_and_prefix(
  tmp_path, begin, config, first, prefix
):
  text = FolderText(with_tokenizer(tmp_path / "x", begin=begin, config=config))
  assert (text.first_tokens, text.prefix_token) == (first, prefix)
  assert text.encode("t3 t4") == [3, 4]
  assert text.encode_from_start("t3 t4") == [*first, 3, 4]
  # If a text already begins with the token, no second one is added.
  assert text.encode_from_start("t7 t3")[-2:] == [7, 3]
  assert len(text.encode_from_start("t7 t3")) == 2 + (first == (1,))


def test_prefix_is_the_end_token_if_no_first_token_is_named(tmp_path):
  config = {"eos_token": "t9"}
  folder = with_tokenizer(tmp_path / "x", config=config, **NONE)
  assert FolderText(folder).prefix_token == 9
  # Older folders name their tokens in another file.
  write_json(folder / "special_tokens_map.json", bos_token={"content": "t8"})
  assert FolderText(folder).prefix_token == 8
  folder = with_tokenizer(tmp_path / "y", **NONE)
  assert FolderText(folder).prefix_token is None


def test_texts_end_at_any_end_token_that_the_files_name(tmp_path):
  folder = with_tokenizer(tmp_path / "x", eos_token_id=2)
  assert FolderText(folder).stop_tokens == (2,)
  generation = folder / "generation_config.json"
  write_json(generation, eos_token_id=[5, 9])
  assert FolderText(folder).stop_tokens == (2, 5, 9)
  write_json(generation, eos_token_id=7)
  assert FolderText(folder).stop_tokens == (2, 7)
  # If neither file names one, the tokenizer's end token is used.
  config = {"chat_template": "", "eos_token": "t4"}
  folder = with_tokenizer(tmp_path / "y", config=config, **NONE)
  assert FolderText(folder).stop_tokens == (4,)


def test_given_tokenizer_replaces_the_folders_tokenizer(tmp_path):
  other = with_tokenizer(tmp_path / "other", begin=7)
  folder = with_tokenizer(tmp_path / "x", eos_token_id=5)
  text = FolderText(folder, str(other / "tokenizer.json"))
  # The model decides what ends a text, the tokenizer what begins it.
  assert (text.stop_tokens, text.first_tokens) == ((5,), (7,))


@pytest.mark.parametrize("found", ["2", [2, None, "3"], -1, True, [[2]]])
def test_end_tokens_that_are_not_ids_are_refused(tmp_path, found):
  folder = with_tokenizer(tmp_path / "x")
  write_json(folder / "generation_config.json", eos_token_id=found)
  with pytest.raises(ValueError, match="eos_token_id must be a token id or"):
    FolderText(folder)


def test_decode_after_other_tokens_keeps_the_space(tmp_path):
  text = FolderText(with_tokenizer(tmp_path / "x"))
  assert text.decode([3, 4]) == "t3 t4"
  assert text.decode_after([1, 2], [3, 4]) == " t3 t4"
  assert text.decode_after([], [3]) == "t3"
