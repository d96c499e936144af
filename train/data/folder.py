# SPDX-License-Identifier: Apache-2.0
"""Reads the tokenizer of a Hugging Face folder, and its chat template.

tokenizer.json          how a text becomes tokens
tokenizer_config.json   the special tokens, and whether texts begin with one
generation_config.json  what ends a text; config.json says so too
chat_template.jinja     see `data.chat`
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from coat_jax.models.hf.files import read_json
from coat_jax.models.hf.keys import CONFIG
from train.data.chat.documents import Documents
from train.data.text import TokenizerText

_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
_CONFIGS = (GENERATION, CONFIG)


class FolderText(TokenizerText):
  """Tokenizes as transformers does from a folder that it wrote.

  A text begins with the token that the tokenizer's post-processor puts in front
  of it, or that tokenizer_config.json's `add_bos_token` says. It ends with any
  `eos_token_id` of generation_config.json and config.json; where neither has
  one, with the tokenizer's own.
  """

  def __init__(self, folder: Path, tokenizer: str | None = None):
    """Reads the folder's files."""
    path = folder / _TOKENIZER if tokenizer is None else Path(tokenizer)
    if tokenizer is None and not path.is_file():
      raise FileNotFoundError(
        f"{folder} must have a {_TOKENIZER}, got none; copy it from where the "
        "checkpoint is from, or pass --tokenizer with one"
      )
    super().__init__(str(path))
    config = _read(path.expanduser().parent / _TOKENIZER_CONFIG)
    ends = {x for f in _CONFIGS for x in read_ids(folder / f, "eos_token_id")}
    self.stop_tokens = tuple(sorted(ends)) or self.stop_tokens
    begin, end = (self._id(config, f"{x}_token") for x in ("bos", "eos"))
    known = read_ids(folder / CONFIG, "bos_token_id")
    if begin is None and tokenizer is None:
      begin = known[0] if known else None
    self.first_tokens = self._first_tokens(config.get("add_bos_token"), begin)
    if (first := begin if begin is not None else end) is not None:
      self.prefix_token = first

  def _id(self, config: dict, name: str) -> int | None:
    """The id of a special token that tokenizer_config.json names."""
    token = config.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
      return None
    return self._tokenizer.id_of(token)

  def _first_tokens(self, adds: Any, begin: int | None) -> tuple[int, ...]:
    """Finds the tokens that a text begins with."""
    if isinstance(adds, bool) and begin is not None:
      return (begin,) if adds else ()
    ids, added = self._tokenizer.encode_with_special("a")
    count = added.index(0) if 0 in added else 0
    return tuple(ids[:count])


def has_tokenizer(folder: Path) -> bool:
  """Whether a folder has the tokenizer that `FolderText` reads."""
  return (folder / _TOKENIZER).is_file()


def _read(file: Path) -> dict[str, Any]:
  return read_json(file) if file.is_file() else {}


def read_ids(file: Path, name: str) -> list[int]:
  """Reads the token ids under a key of a file; [] without file or key."""
  value = _read(file).get(name)
  found = value if isinstance(value, list) else [value]
  found = [x for x in found if x is not None]
  if any(type(x) is not int or x < 0 for x in found):
    raise ValueError(
      f"{file}: {name} must be a token id or a list of them, got "
      f"{str(value)[:40]}; copy the file again"
    )
  return found


_KEY = "eos_token_id"


def write_stop_tokens(folder: Path, documents: Documents) -> None:
  """Names the tokens that end turns in a folder's generation_config.json.

  transformers stops at the tokens that this file names, without it at those of
  config.json, and where that names none at the default of the model's class,
  which for Llama is token 2; it does not ask the tokenizer. Nothing is written
  where the tokens are named already, or where turns end with text.
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
