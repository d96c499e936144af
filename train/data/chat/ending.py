# SPDX-License-Identifier: Apache-2.0
"""What ends a turn by a folder's chat template ends generated text too."""

import json
from pathlib import Path

import numpy as np

from train.data.chat.encoder import ChatEncoder, open_template
from train.data.chat.formats import Conversation
from train.data.folder import FolderText

_TOKENIZER, _GENERATION = "tokenizer.json", "generation_config.json"
_SAID = [
  {"role": "user", "content": "a"},
  {"role": "assistant", "content": "a"},
]


def write_stop_token(folder: Path) -> None:
  """Names the token that ends a turn in a folder's generation_config.json.

  Nothing is written where it is named already, or where the template ends a
  turn with text.

  Args:
    folder: Of a checkpoint, with a tokenizer and a chat template.

  Raises:
    FileNotFoundError, ValueError: files are missing or damaged, or there is no
      template.
  """
  encoder = ChatEncoder(folder / _TOKENIZER, open_template(folder, None))
  row = Conversation(messages=_SAID, tools=None, trained=(1,))
  ((ids, mask, _),) = encoder.encode([encoder.render(row)])
  end = int(ids[np.flatnonzero(mask)[-1]])
  text = FolderText(folder)
  if text.decode([end]) or end in text.stop_tokens:
    return
  file = folder / _GENERATION
  found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
  found["eos_token_id"] = sorted({*text.stop_tokens, end})
  file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
