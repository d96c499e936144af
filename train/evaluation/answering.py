# SPDX-License-Identifier: Apache-2.0
"""Conversations, of text or with images, as a model sees them."""

from pathlib import Path

from coat_jax.models import ModelConfig
from train.conversations import open_images
from train.data.chat.documents import Documents, load_documents
from train.data.chat.encoder import ChatEncoder, open_template
from train.source import Source


def read_conversations(
  source: Source,
  files: list[str],
  *,
  length: int,
  tokenizer: str | None = None,
  template: str | None = None,
  images: Path | None = None,
) -> Documents:
  """Reads conversations as a model sees them.

  Args:
    source: The model that sees them.
    files: As for `load_documents`.
    length: Tokens that the model sees at a time.
    tokenizer: As for `open_source`.
    template: As for `open_template`; None for the tokenizer's own.
    images: The folder that names of images are relative to; None for that of
      each file of conversations.

  Raises:
    FileNotFoundError, ValueError: a file, row or image cannot be used.
  """
  file = Path(tokenizer or source.files / "tokenizer.json").expanduser()
  if not file.is_file():
    raise FileNotFoundError(
      f"evaluate: conversations need a tokenizer.json, got none in "
      f"{file.parent}; pass --tokenizer with one"
    )
  shape, reader = source.config, None
  if not isinstance(shape, ModelConfig):
    reader = open_images(source.files, shape, str(images or ""))
  # A template that a run keeps is beside its own tokenizer.
  beside = file.parent if tokenizer else source.files
  return load_documents(
    files,
    ChatEncoder(file, open_template(beside, template)),
    seq=length,
    vocab_size=source.decoder_config.vocab_size,
    skip_bad=None,
    images=reader,
  )
