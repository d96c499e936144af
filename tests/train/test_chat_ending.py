# SPDX-License-Identifier: Apache-2.0
"""Tests that generation_config.json names the tokens that end turns."""

import json
import shutil

import pytest

from train.data.chat.documents import load_documents
from train.data.chat.encoder import ChatEncoder
from train.data.chat.template import ChatTemplate
from train.data.text import last_tokens, write_stop_tokens

QWEN, LLAMA = "tests/data/chat/qwen2_5", "tests/data/chat/llama3"
END_OF_TEXT, IM_END = 320, 322
ROWS = [
  [
    ("user", "Hi."),
    ("assistant", "Hello."),
    ("user", "A?"),
    ("assistant", "B"),
  ],
  [("user", "What?"), ("assistant", "That."), ("user", "I see.")],
]


def conversations(folder):
  """Encodes `ROWS` with the template chatml: turns end with <|im_end|>."""
  rows = ([{"role": role, "content": x} for role, x in row] for row in ROWS)
  lines = [json.dumps({"messages": messages}) + "\n" for messages in rows]
  (folder / "rows.jsonl").write_text("".join(lines))
  encoder = ChatEncoder(
    folder / "tokenizer.json", ChatTemplate.load(folder, "chatml")
  )
  return load_documents(
    [str(folder / "rows.jsonl")], encoder, seq=64, vocab_size=400
  )


@pytest.mark.parametrize(
  "eos_token, config, before, after",
  [
    ("<|endoftext|>", {}, None, {"eos_token_id": [END_OF_TEXT, IM_END]}),
    # transformers ignores the tokenizer's eos_token.
    ("<|im_end|>", {}, None, {"eos_token_id": [END_OF_TEXT, IM_END]}),
    ("<|im_end|>", {"eos_token_id": IM_END}, None, None),
    (
      "<|im_end|>",
      {"eos_token_id": [IM_END]},
      {"top_p": 0.5},  # This file overrides config.json.
      {"eos_token_id": [IM_END], "top_p": 0.5},
    ),
    (
      "<|endoftext|>",
      {},
      {"eos_token_id": 7, "top_p": 0.5},
      {"eos_token_id": [7, IM_END], "top_p": 0.5},
    ),
    (
      "<|endoftext|>",
      {},
      {"eos_token_id": [IM_END, 7]},
      {"eos_token_id": [IM_END, 7]},
    ),
  ],
)
def test_generation_config_names_the_token_that_ends_turns(
  eos_token, config, before, after, tmp_path
):
  shutil.copy(f"{QWEN}/tokenizer.json", tmp_path)
  tokens = json.dumps({"eos_token": eos_token})
  (tmp_path / "tokenizer_config.json").write_text(tokens)
  (tmp_path / "config.json").write_text(json.dumps(config))
  file = tmp_path / "generation_config.json"
  if before is not None:
    file.write_text(json.dumps(before))
  write_stop_tokens(tmp_path, conversations(tmp_path))
  found = json.loads(file.read_text()) if file.exists() else None
  assert found == after


def test_turn_end_of_several_tokens_is_not_written(tmp_path):
  shutil.copy(f"{LLAMA}/tokenizer.json", tmp_path)
  write_stop_tokens(tmp_path, conversations(tmp_path))
  assert not (tmp_path / "generation_config.json").exists()


def test_last_tokens_are_those_that_end_answers(tmp_path):
  shutil.copy(f"{LLAMA}/tokenizer.json", tmp_path)
  found, want = conversations(tmp_path), set()
  for number in range(len(found)):
    start, end = found.starts[number : number + 2]
    mask = [*found.mask[start:end], False]
    for i, token in enumerate(found.tokens[start:end].tolist()):
      if mask[i] and not mask[i + 1]:
        want.add(token)
  assert len(want) == 1 and last_tokens(found) == [*want]
