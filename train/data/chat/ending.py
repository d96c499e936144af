# SPDX-License-Identifier: Apache-2.0
"""What ends a turn of the conversations ends generated text too."""

import json
from pathlib import Path

import numpy as np

from train.data.chat.documents import Documents
from train.data.folder import CONFIG, GENERATION, FolderText, read_ids

_KEY = "eos_token_id"


def write_stop_tokens(folder: Path, documents: Documents) -> None:
  """Names the tokens that end turns in a folder's generation_config.json.

  transformers stops at the tokens that this file names, without it at those of
  config.json, and where that names none at the default of the model's class,
  which for Llama is token 2; it does not ask the tokenizer. Nothing is written
  where the tokens are named already, or where turns end with text.

  Args:
    folder: Of a checkpoint, with a tokenizer.
    documents: Conversations, tokenized by it.

  Raises:
    FileNotFoundError, ValueError: files are missing or damaged.
  """
  text = FolderText(folder)
  ends = {x for x in last_tokens(documents) if not text.decode([x])}
  file = folder / GENERATION
  named = file if file.is_file() else folder / CONFIG
  if ends <= {*read_ids(named, _KEY)}:
    return
  found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
  found[_KEY] = sorted({*text.stop_tokens, *ends})
  file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def last_tokens(documents: Documents) -> list[int]:
  """Lists the tokens that the parts to be learned end with, each once."""
  mask = documents.mask  # False for the first token of each document.
  is_last = mask & ~np.append(mask[1:], False)
  return np.unique(documents.tokens[is_last]).tolist()
