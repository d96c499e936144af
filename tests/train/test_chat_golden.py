# SPDX-License-Identifier: Apache-2.0
"""Compares token ids and masks of chats with those of transformers.

tests/data/chat/make_chat.py writes the expected values. Its masks come from
{% generation %} blocks, which most templates tested here do not have.
"""

import dataclasses
import importlib.util
import json
from pathlib import Path
from random import Random

import pytest

from train.data.chat.encoder import ChatEncoder
from train.data.chat.formats import Conversation, parse
from train.data.chat.targets import TargetFinder
from train.data.chat.template import PUBLISHED, ChatTemplate

DATA = Path(__file__).parents[1] / "data" / "chat"


def encode(folder, template, rows):
  encoder = ChatEncoder(DATA / folder / "tokenizer.json", template)
  rendered = [encoder.render(parse(row, "messages")) for row in rows]
  return list(encoder.encode(rendered))


@pytest.mark.parametrize("folder", ["llama3", "qwen2_5", "llama2", "qwen3"])
def test_ids_and_masks_match_transformers(folder):
  rows = json.loads((DATA / folder / "golden.json").read_text())
  template = ChatTemplate.load(DATA / folder)
  for row, found in zip(rows, encode(folder, template, rows), strict=True):
    ids, mask, _ = found
    assert ids.tolist() == row["ids"], row["messages"]
    assert "".join(map(str, mask.astype(int))) == row["mask"], row["messages"]


@pytest.mark.parametrize("name", ["llama3", "llama2", "chatml"])
def test_named_templates_are_the_published_ones(name):
  if name != "chatml":
    own = ChatTemplate.load(DATA / name)
    assert own.source == PUBLISHED[name]
    assert own == ChatTemplate.load(DATA / name, name)
    return
  # Qwen's template equals ChatML if there is a system turn and no tool.
  folder = "qwen2_5"
  rows = json.loads((DATA / folder / "golden.json").read_text())
  rows = [
    row
    for row in rows
    if row["messages"][0]["role"] == "system" and not row["tools"]
  ]
  assert len(rows) == 3
  template = ChatTemplate.load(DATA / folder, name)
  for row, found in zip(rows, encode(folder, template, rows), strict=True):
    assert found[0].tolist() == row["ids"]
    assert "".join(map(str, found[1].astype(int))) == row["mask"]


@pytest.fixture(scope="module")
def templates():
  source = importlib.util.spec_from_file_location(
    "templates", DATA / "templates.py"
  )
  module = importlib.util.module_from_spec(source)
  source.loader.exec_module(module)
  return module


def test_generation_blocks_give_the_masks_of_transformers(templates):
  marked = templates.with_generation(templates.QWEN3, templates.QWEN3_EDITS)
  own = ChatTemplate.load(DATA / "qwen3")
  assert own.source == templates.QWEN3
  rows = json.loads((DATA / "qwen3" / "golden.json").read_text())
  template = dataclasses.replace(own, source=marked)
  for row, found in zip(rows, encode("qwen3", template, rows), strict=True):
    assert found[0].tolist() == row["ids"]
    assert "".join(map(str, found[1].astype(int))) == row["mask"]


SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
PIECES = [
  *SPECIAL,
  "a",
  " ",
  "\n",
  "\n\n",
  "[INST] ",
  " [/INST]",
  "assistant\n",
]
PIECES += ["user", "<tool_call>", "<|eot_id|>", "<|end_header_id|>\n\n", "é"]


def draw(random):
  """Samples text from the words that templates write and search for."""
  text = "".join(random.choices(PIECES, k=random.randint(1, 6)))
  return text if text.strip() else "x" + text


@pytest.mark.parametrize("name", ["LLAMA3", "LLAMA2", "QWEN2_5", "QWEN3"])
def test_masks_of_random_chats_equal_those_of_generation_blocks(
  templates, name
):
  source = getattr(templates, name)
  marked = templates.with_generation(
    source, getattr(templates, f"{name}_EDITS")
  )
  special = {"bos_token": "<s>", "eos_token": "</s>"}
  finders = [
    TargetFinder(ChatTemplate(each, special), SPECIAL)
    for each in (source, marked)
  ]
  random = Random(7)
  for _ in range(60):
    messages = []
    for _ in range(random.randint(1, 3)):
      messages.append({"role": "user", "content": draw(random)})
      if "QWEN" in name and random.random() < 0.3:
        function = {"name": "f", "arguments": {"x": draw(random)}}
        calls = [{"type": "function", "function": function}]
        text = random.choice(["", draw(random)])
        messages.append(
          {"role": "assistant", "content": text, "tool_calls": calls}
        )
        messages.append({"role": "tool", "content": draw(random)})
      messages.append({"role": "assistant", "content": draw(random)})
      if random.random() < 0.2:
        messages[-1]["reasoning_content"] = draw(random)
    turns = [i for i, x in enumerate(messages) if x["role"] == "assistant"]
    row = Conversation(messages, None, tuple(turns))
    found, expected = (x.find(row) for x in finders)
    assert found == expected, messages
