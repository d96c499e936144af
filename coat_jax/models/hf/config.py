# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face config.json into a model's configuration, and writes it.

A LLaVA's `text_config` and `vision_config` are read like the config.json of
their own models.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coat_jax.models.config import ModelConfig
from coat_jax.models.hf.files import check_folder, read_json
from coat_jax.models.hf.keys import (
  CONFIG,
  DTYPE_KEYS,
  WITHOUT_EFFECT,
  check_known,
  choose,
  dtype_of,
  typed,
  wrong,
)
from coat_jax.models.hf.rows import CONFIGS
from coat_jax.models.hf.text_config import (
  parse_text_config,
  write_text_config,
)
from coat_jax.models.hf.vision_config import (
  VISION_TYPES,
  parse_vision_config,
  write_vision_config,
)
from coat_jax.models.vision.config import VisionConfig
from coat_jax.models.vision_language import VisionLanguageConfig

type AnyConfig = ModelConfig | VisionConfig | VisionLanguageConfig

_TYPE, _ARCHITECTURE = "llava", "LlavaForConditionalGeneration"
_TOKEN = "image_token_index"
_SELECT = "vision_feature_select_strategy"
_LAYER, _BIAS = "vision_feature_layer", "multimodal_projector_bias"
_TIED = "tie_word_embeddings"
# What transformers assumes if these keys are absent.
_FIELDS: dict[str, Any] = {_TOKEN: 32000, _LAYER: -2, _BIAS: True}
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


def read_config(folder: Path) -> tuple[Any, np.dtype]:
  """Reads a folder's config.json: the model's shape and its dtype."""
  check_folder(folder)
  return parse_config(folder / CONFIG, read_json(folder / CONFIG))


def parse_config(file: Path, found: dict) -> tuple[Any, np.dtype]:
  """Parses a file's content; `file` is for error messages."""
  parsers: dict[str, Callable[[Path, dict], AnyConfig]] = {
    **dict.fromkeys(CONFIGS, parse_text_config),
    **dict.fromkeys(VISION_TYPES, parse_vision_config),
    _TYPE: _parse_llava,
  }
  parse = choose(file, "model_type", found.get("model_type"), parsers)
  return parse(file, found), dtype_of(file, found)


def write_config(
  config: AnyConfig,
  dtype: np.dtype,
  like: dict | None = None,
  *,
  max_length: int | None = None,
  labels: Sequence[str] | None = None,
) -> dict:
  """Writes the content of a config.json.

  Args:
    config: the model's shape.
    dtype: dtype of its tensors.
    like: a config.json of the same shape; its other keys are kept.
    max_length: context length of a decoder's training, written if `like` has
      none and positions are not learned; None to leave it out.
    labels: names of a tower's classes; None for those of `like`, or without
      `like` for LABEL_0 and so on, as transformers names them.

  Raises:
    ValueError: transformers has no model of this shape in this family, or the
      number of different labels is not the number of classes.
  """
  if isinstance(config, ModelConfig):
    return write_text_config(config, dtype, like, max_length=max_length)
  if isinstance(config, VisionConfig):
    return write_vision_config(config, dtype, like, labels=labels)
  return _write_llava(config, dtype, like or {})


def _parse_llava(file: Path, found: dict) -> VisionLanguageConfig:
  for key, value in _FIXED.items():
    if found.get(key, value) != value:
      raise wrong(file, key, value, found[key], "others cannot be read yet")
  check_known(file, found, _KNOWN)
  values = {
    key: typed(file, key, found.get(key, default), type(default))
    for key, default in _FIELDS.items()
  }
  strategies = {x: x for x in ("default", "full")}
  select = choose(file, _SELECT, found.get(_SELECT, "default"), strategies)
  text, vision = (_part(file, found, x) for x in ("text", "vision"))
  if text.get("model_type", "llama") == "llama":
    text = _LLAMA | text
  if _TIED in found:
    text = {_TIED: found[_TIED]} | text
  vision.pop("vocab_size", None)  # The size of the text model in training.
  vision.setdefault("model_type", "clip_vision_model")
  shapes = parse_text_config(file, text), parse_vision_config(file, vision)
  for part in (text, vision):
    dtype_of(file, part)
  try:
    return VisionLanguageConfig(
      text=shapes[0],
      vision=shapes[1],
      image_token=values[_TOKEN],
      feature_layer=values[_LAYER],
      feature_select=select,
      projector_bias=values[_BIAS],
    )
  except ValueError as error:
    raise ValueError(f"load_hf: {file}: {error}") from error


def _part(file: Path, found: dict, name: str) -> dict:
  part = found.get(f"{name}_config", {})
  if isinstance(part, dict):
    return dict(part)
  raise wrong(file, f"{name}_config", "an object", part)


def _write_llava(
  config: VisionLanguageConfig, dtype: np.dtype, like: dict
) -> dict:
  found = _FIXED | {"image_seq_length": config.tokens_each} | like
  return found | {
    "architectures": [_ARCHITECTURE],
    _TOKEN: config.image_token,
    _LAYER: config.feature_layer,
    _SELECT: config.feature_select,
    _BIAS: config.projector_bias,
    _TIED: config.text.tied_embeddings,
    "text_config": write_text_config(
      config.text, dtype, like.get("text_config")
    ),
    "vision_config": write_vision_config(
      config.vision, dtype, like.get("vision_config")
    ),
    **dict.fromkeys(DTYPE_KEYS, dtype.name),
  }
