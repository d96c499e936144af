# SPDX-License-Identifier: Apache-2.0
"""Reads LLaVA's config.json into a `VisionLanguageConfig`, and writes it.

`text_config` and `vision_config` are read like the config.json of their own
models. As in `config`, each other key belongs to the model, is known to have no
effect, or is refused by name.
"""

from pathlib import Path
from typing import Any

import numpy as np

from coat_jax.models.hf.config import (
  CONFIG,
  WITHOUT_EFFECT,
  parse_config,
  write_config,
)
from coat_jax.models.hf.files import check_folder, read_json
from coat_jax.models.hf.keys import DTYPE_KEYS, choose, dtype_of, refusal
from coat_jax.models.hf.vision_config import (
  parse_vision_config,
  write_vision_config,
)
from coat_jax.models.vision_language import VisionLanguageConfig

_TYPE, _ARCHITECTURE = "llava", "LlavaForConditionalGeneration"
_TOKEN = "image_token_index"
_SELECT = "vision_feature_select_strategy"
_LAYER, _BIAS = "vision_feature_layer", "multimodal_projector_bias"
_TIED = "tie_word_embeddings"
# Keys with their types, and what transformers assumes if they are absent.
_FIELDS: dict[str, tuple[type, Any]] = {
  _TOKEN: (int, 32000),
  _LAYER: (int, -2),
  _BIAS: (bool, True),
}
_FIXED = {"model_type": _TYPE, "projector_hidden_act": "gelu"}
_KNOWN = {
  *("text_config", "vision_config", "architectures", _SELECT, _TIED),
  *("image_seq_length", "ignore_index", "vocab_size"),
  *(*_FIELDS, *_FIXED, *DTYPE_KEYS, *WITHOUT_EFFECT),
}
# transformers' defaults, which a text_config may omit, as LLaVA 1.5's files do.
# They are those of the 7B; the files state everything else.
_LLAMA = {
  "model_type": "llama",
  "hidden_size": 4096,
  "intermediate_size": 11008,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "vocab_size": 32000,
}


def read_llava_config(folder: Path) -> tuple[VisionLanguageConfig, np.dtype]:
  """Reads the config.json of a checkpoint.

  Args:
    folder: the checkpoint's folder.

  Returns:
    The model's shape, and the dtype that the file states for its tensors.

  Raises:
    ValueError: the file is missing or damaged, or its model is not supported.
  """
  check_folder(folder)
  return parse_llava_config(folder / CONFIG, read_json(folder / CONFIG))


def parse_llava_config(
  file: Path, found: dict
) -> tuple[VisionLanguageConfig, np.dtype]:
  """Parses the file's content for `read_llava_config`."""
  for key, value in _FIXED.items():
    if found.get(key, value) != value or "model_type" not in found:
      raise ValueError(
        f"load_hf: {file}: {key} must be {value}, got "
        f"{str(found.get(key))[:40]}; others cannot be read yet"
      )
  for key, value in found.items():
    if key not in _KNOWN:
      raise refusal(file, key, value, _KNOWN)
  values = {}
  for key, (kind, default) in _FIELDS.items():
    value = found.get(key, default)
    if type(value) is not kind:
      wanted = {int: "a whole number", bool: "true or false"}[kind]
      raise ValueError(
        f"load_hf: {file}: {key} must be {wanted}, got {str(value)[:40]}; "
        "copy the file again"
      )
    values[key] = value
  select = choose(
    file,
    _SELECT,
    found.get(_SELECT, "default"),
    {"default": "default", "full": "full"},
  )
  text, vision = (_part(file, found, x) for x in ("text", "vision"))
  if text.get("model_type", "llama") == "llama":
    text = _LLAMA | text
  if _TIED in found:
    text = {_TIED: found[_TIED]} | text
  vision.pop("vocab_size", None)  # The size of the text model in training.
  vision.setdefault("model_type", "clip_vision_model")
  try:
    config = VisionLanguageConfig(
      text=parse_config(file, text)[0],
      vision=parse_vision_config(file, vision)[0],
      image_token=values[_TOKEN],
      feature_layer=values[_LAYER],
      feature_select=select,
      projector_bias=values[_BIAS],
    )
  except ValueError as error:
    if str(error).startswith("load_hf"):
      raise
    raise ValueError(f"load_hf: {file}: {error}") from error
  return config, dtype_of(file, found)


def _part(file: Path, found: dict, name: str) -> dict:
  part = found.get(f"{name}_config", {})
  if isinstance(part, dict):
    return dict(part)
  raise ValueError(
    f"load_hf: {file}: {name}_config must be an object, got {str(part)[:40]}; "
    "copy the file again"
  )


def write_llava_config(
  config: VisionLanguageConfig, dtype: np.dtype, like: dict | None = None
) -> dict:
  """Writes the config.json of a model.

  Args:
    config: the model's shape.
    dtype: dtype of its tensors.
    like: a config.json of the same shape; its other keys are kept.

  Returns:
    The content of the file.

  Raises:
    ValueError: transformers has no decoder of this shape.
  """
  like = like or {}
  found = _FIXED | {"image_seq_length": config.tokens_each} | like
  return found | {
    "architectures": [_ARCHITECTURE],
    _TOKEN: config.image_token,
    _LAYER: config.feature_layer,
    _SELECT: config.feature_select,
    _BIAS: config.projector_bias,
    _TIED: config.text.tied_embeddings,
    "text_config": write_config(config.text, dtype, like.get("text_config")),
    "vision_config": write_vision_config(
      config.vision, dtype, like.get("vision_config")
    ),
    **dict.fromkeys(DTYPE_KEYS, dtype.name),
  }
