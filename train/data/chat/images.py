# SPDX-License-Identifier: Apache-2.0
"""Finds and reads the images in conversations in LLaVA's JSON format.

The key `image` or `images` of a row contains a path or a list of paths. The
user's text contains one `<image>` for each path, in the same order. The
tokenizer turns `<image>` into a single token. We repeat this token: once for
each feature vector that the model computes from the image.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.data.chat.formats import Completion, Conversation, Row
from train.data.images import Preprocessing
from train.data.sources import BadData

TOKEN = "<image>"
_KEYS = ("image", "images")


class RowImage(NamedTuple):
  """An image of a row."""

  name: str  # The image's path as written in the row.
  path: Path
  row: str  # The file and line of the row; errors show them.


@dataclasses.dataclass(frozen=True)
class ChatImages:
  """Finds and reads the images of conversations, and adds image tokens."""

  preprocessing: Preprocessing
  token: int  # The id of `<image>`.
  tokens_each: int  # Number of tokens per image.
  # Image paths are relative to this folder. If `folder` is None, they are
  # relative to the folder of the row's file.
  folder: str | Path | None = None

  def of_row(
    self, row: Row, parsed: Conversation | Completion
  ) -> tuple[RowImage, ...]:
    """Finds the images of a row and checks their headers."""
    names = _names(row.value)
    asked, answered = _texts(parsed)
    if TOKEN in answered:
      raise BadData(
        "image in an answer",
        f"expected {TOKEN} only in the user's text, got it in an answer",
      )
    if (count := asked.count(TOKEN)) != len(names):
      raise BadData(
        "wrong number of images",
        f"expected one {TOKEN} for each image of the row, got {count} in the "
        f"text for {len(names)} images",
      )
    folder = Path(self.folder or row.file.parent)
    where = f"chat: {row.file} line {row.line}"
    found = tuple(RowImage(name, folder / name, where) for name in names)
    for image in found:
      try:
        self.preprocessing.check([image.path])
      except BadData as error:
        if error.reason == "missing image":
          got = f", not {self.folder}" if self.folder else ""
          error.remedy = (
            "pass --images with the folder that image names are relative "
            f"to{got}"
          )
        raise
    return found

  def expand(
    self, tokens: np.ndarray, mask: np.ndarray, ends: list[int], *, images: int
  ) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Repeats `<image>` tokens and their mask; moves the ends of targets."""
    is_image = tokens == self.token
    if (count := int(is_image.sum())) != images:
      raise BadData(
        "images lost",
        f"expected one token {self.token} for each {TOKEN} in the text, "
        f"{images} in all, got {count} after the chat template was applied and "
        "the text was tokenized",
        "use another template, or the checkpoint's tokenizer",
      )
    times = np.where(is_image, self.tokens_each, 1)
    lengths = np.concatenate([[0], np.cumsum(times)])
    return (
      np.repeat(tokens, times),
      np.repeat(mask, times),
      [int(lengths[end]) for end in ends],
    )

  def count(self, tokens: np.ndarray) -> int:
    """Counts the images in tokens [n] that `expand` returned."""
    return int(np.sum(tokens == self.token)) // self.tokens_each

  def read(self, images: Sequence[RowImage], *, slots: int) -> np.ndarray:
    """Reads images as f32 [slots, 3, H, W]; unused slots are zero."""
    out = np.zeros((slots, 3, *self.preprocessing.shape), np.float32)
    for place, image in enumerate(images):
      try:
        out[place] = self.preprocessing.read(image.path)
      except BadData as error:
        raise ValueError(
          f"{image.row}: {error}; replace the image, or remove the row"
        ) from error
    return out


def _names(row: dict[str, Any]) -> list[str]:
  """Lists the paths of images in a row."""
  given = [row[key] for key in _KEYS if row.get(key) is not None]
  if not given:
    return []
  names = [given[0]] if isinstance(given[0], str) else given[0]
  are_names = isinstance(names, list) and all(
    isinstance(name, str) and name and "\0" not in name for name in names
  )
  if not are_names or len(given) > 1:
    raise BadData(
      "wrong format",
      'expected either the key "image" or the key "images", with a path or a '
      f"list of paths, got {str(given)[:80]}",
    )
  return names


def _texts(parsed: Conversation | Completion) -> tuple[str, str]:
  """Joins the messages of a conversation into two texts.

  The first text is from all roles except the assistant, the second from the
  assistant.
  """
  if isinstance(parsed, Completion):
    return parsed.prompt, parsed.completion
  asked, answered = [], []
  for message in parsed.messages:
    said = answered if message["role"] == "assistant" else asked
    said.append(message["content"] or "")
  # `<image>` cannot span two messages, because of the separator.
  return "\0".join(asked), "\0".join(answered)
