# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face config.json into a `VisionConfig`, and writes it.

As in `config`, a key is a number of the tower, known to have no effect, or
refused by name. If the file describes a whole CLIP or SigLIP with its text
model, we read only the tower's part.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coat_jax.models.hf.config import CONFIG, WITHOUT_EFFECT
from coat_jax.models.hf.files import check_folder, read_json
from coat_jax.models.hf.keys import DTYPE_KEYS, dtype_of, refusal
from coat_jax.models.vision import VisionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
  """How a family's config.json is read.

  Attributes:
    model_type: model_type of the tower alone.
    whole: model_type of a model that contains the tower, or None.
    architectures: classes of transformers; the first one is written.
    defaults: what transformers assumes for absent keys.
    fixed: keys that must have a certain value.
    fields: further fields of `VisionConfig`, by key.
  """

  model_type: str
  whole: str | None = None
  architectures: tuple[str, ...]
  defaults: dict[str, Any]
  fixed: dict[str, Any]
  fields: dict[str, str] = dataclasses.field(default_factory=dict)


_FIELDS = {
  "num_hidden_layers": "num_layers",
  "hidden_size": "d_model",
  "intermediate_size": "d_ff",
  "num_attention_heads": "num_heads",
  "image_size": "image_size",
  "patch_size": "patch_size",
  "num_channels": "num_channels",
  "layer_norm_eps": "norm_eps",
}
_BASE = {
  "num_hidden_layers": 12,
  "hidden_size": 768,
  "intermediate_size": 3072,
  "num_attention_heads": 12,
  "image_size": 224,
  "patch_size": 16,
  "num_channels": 3,
}
_ROWS = {
  "vit": _Row(
    model_type="vit",
    architectures=("ViTForImageClassification", "ViTModel"),
    defaults=_BASE | {"layer_norm_eps": 1e-12},
    fixed={"hidden_act": "gelu", "qkv_bias": True, "pooler_act": "tanh"},
  ),
  "clip_vision": _Row(
    model_type="clip_vision_model",
    whole="clip",
    architectures=("CLIPVisionModel", "CLIPModel"),
    defaults=_BASE | {"layer_norm_eps": 1e-5, "patch_size": 32},
    fixed={"hidden_act": "quick_gelu", "attention_dropout": 0},
  ),
  "siglip_vision": _Row(
    model_type="siglip_vision_model",
    whole="siglip",
    architectures=("SiglipVisionModel", "SiglipModel"),
    defaults=_BASE | {"layer_norm_eps": 1e-6, "vision_use_head": True},
    fixed={"hidden_act": "gelu_pytorch_tanh", "attention_dropout": 0},
    fields={"vision_use_head": "has_pool"},
  ),
}
VISION_TYPES = {row.model_type: family for family, row in _ROWS.items()}
_WHOLE = {row.whole: family for family, row in _ROWS.items() if row.whole}
_WITHOUT_EFFECT = WITHOUT_EFFECT | {
  # The initialization of new weights, other ends of the model, and dropout,
  # which only matters in training.
  *("initializer_factor", "projection_dim", "encoder_stride"),
  *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"),
  *("num_labels", "pooler_output_size"),
  # Keys for text generation, which version 4 wrote for every model.
  *("add_cross_attention", "bad_words_ids", "begin_suppress_tokens"),
  *("cross_attention_hidden_size", "decoder_start_token_id"),
  *("diversity_penalty", "early_stopping", "encoder_no_repeat_ngram_size"),
  *("exponential_decay_length_penalty", "forced_bos_token_id"),
  *("forced_eos_token_id", "is_decoder", "is_encoder_decoder", "prefix"),
  *("length_penalty", "min_length", "no_repeat_ngram_size", "output_scores"),
  *("num_beam_groups", "num_beams", "num_return_sequences", "pruned_heads"),
  *("remove_invalid_values", "repetition_penalty", "return_dict_in_generate"),
  *("sep_token_id", "suppress_tokens", "task_specific_params", "typical_p"),
  *("tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class"),
}


def read_vision_config(folder: Path) -> tuple[VisionConfig, np.dtype]:
  """Reads the config.json of a checkpoint that has a vision tower.

  Args:
    folder: the checkpoint's folder.

  Returns:
    The tower's shape, and the dtype that the file states for its tensors.

  Raises:
    ValueError: the file is missing or damaged, or its tower is not supported.
  """
  check_folder(folder)
  return parse_vision_config(folder / CONFIG, read_json(folder / CONFIG))


def parse_vision_config(
  file: Path, found: dict
) -> tuple[VisionConfig, np.dtype]:
  """Parses the file's content for `read_vision_config`."""
  dtype = dtype_of(file, found)
  kind = found.get("model_type")
  family = VISION_TYPES.get(kind) if isinstance(kind, str) else None
  named = found.get("architectures")
  if family is None and isinstance(kind, str) and kind in _WHOLE:
    family, found = _WHOLE[kind], _part(file, found)
  if family is None:
    raise ValueError(
      f"load_hf: {file}: model_type must be one of {', '.join(VISION_TYPES)}, "
      f"{' or '.join(_WHOLE)}, got {str(kind)[:40]}; other towers cannot be "
      "read yet"
    )
  row = _ROWS[family]
  if named is not None and named not in [[x] for x in row.architectures]:
    raise ValueError(
      f"load_hf: {file}: architectures must be [{row.architectures[0]}] or "
      f"[{row.architectures[1]}], got {str(named)[:80]}; others cannot be read"
    )
  fields = _FIELDS | row.fields
  known = {*fields, *row.fixed, *DTYPE_KEYS, *_WITHOUT_EFFECT}
  for key, value in found.items():
    if key not in known:
      raise refusal(file, key, value, known)
  for key, value in row.fixed.items():
    if (found.get(key, value) or None) != (value or None):
      raise ValueError(
        f"load_hf: {file}: {key} must be {value}, got {str(found[key])[:40]}; "
        f"a {kind} with another one cannot be had here yet"
      )
  values = {
    field: _value(file, key, found.get(key, row.defaults[key]), row)
    for key, field in fields.items()
  }
  if family == "vit" and named != ["ViTModel"]:
    values["num_classes"] = _count_classes(file, found)
  try:
    return VisionConfig(family=family, **values), dtype
  except ValueError as error:
    raise ValueError(f"load_hf: {file}: {error}") from error


def _part(file: Path, found: dict) -> dict:
  """Returns the tower's part of a whole model's keys."""
  part = found.get("vision_config")
  if isinstance(part, dict):
    return part
  raise ValueError(
    f"load_hf: {file}: vision_config must hold the keys of the tower, got "
    f"{str(part)[:40]}; copy the file again"
  )


def _value(file: Path, key: str, value: Any, row: _Row) -> Any:
  """Checks a value's type; `VisionConfig` checks its range."""
  wanted = type(row.defaults[key])
  if type(value) is wanted or (wanted is float and type(value) is int):
    return wanted(value)
  kind = {bool: "true or false", int: "a whole number"}.get(wanted, "a number")
  raise ValueError(
    f"load_hf: {file}: {key} must be {kind}, got {str(value)[:40]}; copy the "
    "file again"
  )


def _count_classes(file: Path, found: dict) -> int:
  """Returns the number of classes that a file names."""
  names = found.get("id2label")
  if isinstance(names, dict) and names:
    return len(names)
  count = found.get("num_labels", 2)  # The default of transformers.
  if names is None and type(count) is int:
    return count
  raise ValueError(
    f"load_hf: {file}: id2label must name the classes, got {str(names)[:40]}; "
    "copy the file again"
  )


def write_vision_config(
  config: VisionConfig,
  dtype: np.dtype,
  like: dict | None = None,
  *,
  labels: Sequence[str] | None = None,
) -> dict:
  """Writes the config.json of a tower.

  Args:
    config: the tower's shape.
    dtype: dtype of its tensors.
    like: a config.json of the same shape; its other keys are kept. If it is a
      whole model's, the keys of its tower are kept.
    labels: names of the classes; None for those of `like`, or without `like`
      for LABEL_0 and so on, as transformers names them.

  Returns:
    The content of the file.

  Raises:
    ValueError: the number of different labels is not the number of classes.
  """
  row = _ROWS[config.family]
  like = like or {}
  found = dict(like.get("vision_config", like))
  is_pooling = config.family == "vit" and config.num_classes is None
  found |= {
    "model_type": row.model_type,
    "architectures": [row.architectures[is_pooling]],
    "hidden_act": row.fixed["hidden_act"],
  }
  for key, field in _FIELDS.items():
    found[key] = getattr(config, field)
  for key, field in row.fields.items():
    if getattr(config, field) != found.get(key, row.defaults[key]):
      found[key] = getattr(config, field)
  count = config.num_classes or 0
  if labels is not None and not len(set(labels)) == len(labels) == count:
    raise ValueError(
      f"save_hf: labels must be a name for each of the {count} classes, got "
      f"{len(labels)}, {len(set(labels))} of them different; leave them out"
    )
  if count and (labels is not None or "id2label" not in found):
    names = labels or [f"LABEL_{i}" for i in range(count)]
    found["id2label"] = {str(i): name for i, name in enumerate(names)}
    found["label2id"] = {name: i for i, name in enumerate(names)}
  found |= dict.fromkeys(DTYPE_KEYS, dtype.name)
  return found
