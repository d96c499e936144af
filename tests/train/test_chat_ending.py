# SPDX-License-Identifier: Apache-2.0
"""The token that ends a turn, in what transformers generates by."""

import json
import shutil

import pytest

from train.data.chat.ending import write_stop_token
from train.data.chat.published import PUBLISHED

QWEN, END_OF_TEXT, IM_END = "tests/data/chat/qwen2_5", 320, 322


@pytest.mark.parametrize(
  "before, after",
  [
    (None, {"eos_token_id": [END_OF_TEXT, IM_END]}),
    (
      {"eos_token_id": 7, "top_p": 0.5},
      {"eos_token_id": [7, IM_END], "top_p": 0.5},
    ),
    ({"eos_token_id": [IM_END, 7]}, {"eos_token_id": [IM_END, 7]}),
  ],
)
def test_end_of_a_turn_stops_transformers(before, after, tmp_path):
  shutil.copy(f"{QWEN}/tokenizer.json", tmp_path)
  config = json.dumps({"eos_token": "<|endoftext|>"})
  (tmp_path / "tokenizer_config.json").write_text(config)
  (tmp_path / "config.json").write_text("{}")
  (tmp_path / "chat_template.jinja").write_text(PUBLISHED["chatml"])
  file = tmp_path / "generation_config.json"
  if before is not None:
    file.write_text(json.dumps(before))
  write_stop_token(tmp_path)
  assert json.loads(file.read_text()) == after


def test_turn_that_ends_with_text_names_no_token(tmp_path):
  shutil.copy("tests/data/chat/llama3/tokenizer.json", tmp_path)
  (tmp_path / "chat_template.jinja").write_text(PUBLISHED["chatml"])
  write_stop_token(tmp_path)
  assert not (tmp_path / "generation_config.json").exists()
