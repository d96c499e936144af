# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders with a tokenizer, for tests of the commands."""

import json

import tokenizers

from tests.models.hf.folders import copied
from tests.models.hf.folders import expected as expected

VOCAB_SIZE = 384


def words(ids):
  """Returns the text that `with_tokenizer`'s tokenizer encodes as these ids."""
  return " ".join(f"t{i}" for i in ids)


def with_tokenizer(path, name="llama", *, begin=None, config=None, **keys):
  """Copies a checkpoint and adds a word tokenizer; the word t5 has id 5.

  Args:
    path: The folder to create.
    name: The name of the checkpoint.
    begin: The id that the post-processor adds before a text, if any.
    config: The contents of tokenizer_config.json.
    **keys: Keys of config.json, as in `copied`.
  """
  folder = copied(path, name, **keys)
  save_tokenizer(folder, begin)
  (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
  return folder


def save_tokenizer(folder, begin=None):
  """Writes the tokenizer.json of `with_tokenizer`; returns its path."""
  model = tokenizers.models.WordLevel(
    {f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t0"
  )
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  if begin is not None:
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
      single=f"t{begin} $A", special_tokens=[(f"t{begin}", begin)]
    )
  tokenizer.save(str(folder / "tokenizer.json"))
  return folder / "tokenizer.json"


def write_json(file, **keys):
  """Writes a JSON object; returns the file."""
  file.write_text(json.dumps(keys))
  return file
