# SPDX-License-Identifier: Apache-2.0
"""A tiny chat model and its conversations, for tests of the commands."""

import json
import shutil

from tests.models.hf.folders import copied

CHAT = "tests/data/chat/llama3"


def make_checkpoint(folder):
  """Makes a Hugging Face folder: weights, a tokenizer and a chat template."""
  copied(folder)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(f"{CHAT}/{name}", folder)
  return folder


def conversation(i):
  sums = [f"What is {i} and {i % 7 + k}?" for k in range(1 + i % 2)]
  turns = []
  for k, question in enumerate(sums):
    turns.append({"role": "user", "content": question})
    turns.append({"role": "assistant", "content": f"It is {2 * i + k}."})
  return {"messages": turns}


def write_conversations(file):
  """Writes 60 conversations, one per line."""
  rows = (json.dumps(conversation(i)) + "\n" for i in range(60))
  file.write_text("".join(rows))
  return file
