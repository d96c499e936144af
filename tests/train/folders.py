# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders with a tokenizer, for tests of the commands."""

import json

import tokenizers

from tests.models.hf.folders import copied
from tests.models.hf.folders import expected as expected

VOCAB_SIZE = 384


def words(ids):
  """The text of token ids, as `with_tokenizer` has it."""
  return " ".join(f"t{i}" for i in ids)


def with_tokenizer(path, name="llama", *, begin=None, config=None, **keys):
  """Copies a checkpoint and gives it a tokenizer of words: t5 has the id 5.

  Args:
    path: the folder to make.
    name: of the checkpoint.
    begin: the id that the post-processor puts in front of a text; None for
      none.
    config: what tokenizer_config.json holds.
    **keys: of config.json, as `copied` takes them.
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
