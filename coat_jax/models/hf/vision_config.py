# SPDX-License-Identifier: Apache-2.0
"""Reads a tower's config.json into a `VisionConfig`, and writes it.

If the file describes a whole CLIP or SigLIP with its text model, we read only
the tower's part.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coat_jax.models.hf.keys import (
  DTYPE_KEYS,
  WITHOUT_EFFECT,
  check_known,
  choose,
  typed,
  wrong,
)
from coat_jax.models.vision.config import VisionConfig


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
# By the model_type of a tower, or of a model that contains one.
VISION_TYPES = {row.model_type: family for family, row in _ROWS.items()} | {
  row.whole: family for family, row in _ROWS.items() if row.whole
}
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


def parse_vision_config(file: Path, found: dict) -> VisionConfig:
  """Parses a file's content; `file` is for error messages."""
  kind: Any = found.get("model_type")
  family = choose(file, "model_type", kind, VISION_TYPES)
  named = found.get("architectures")
  row = _ROWS[family]
  if kind == row.whole:
    part = found.get("vision_config")
    if not isinstance(part, dict):
      raise wrong(file, "vision_config", "an object", part)
    found = part
  if named is not None and named not in [[x] for x in row.architectures]:
    rule = " or ".join(f"[{x}]" for x in row.architectures)
    remedy = "others cannot be read"
    raise wrong(file, "architectures", rule, named, remedy)
  fields = _FIELDS | row.fields
  check_known(file, found, {*fields, *row.fixed, *DTYPE_KEYS, *_WITHOUT_EFFECT})
  for key, value in row.fixed.items():
    if (found.get(key, value) or None) != (value or None):
      remedy = f"a {kind} with another one cannot be had here yet"
      raise wrong(file, key, str(value), found[key], remedy)
  # `VisionConfig` checks their ranges.
  values = {
    field: typed(
      file, key, found.get(key, row.defaults[key]), type(row.defaults[key])
    )
    for key, field in fields.items()
  }
  if family == "vit" and named != ["ViTModel"]:
    values["num_classes"] = _count_classes(file, found)
  try:
    return VisionConfig(family=family, **values)
  except ValueError as error:
    raise ValueError(f"load_hf: {file}: {error}") from error


def _count_classes(file: Path, found: dict) -> int:
  """Returns the number of classes that a file names."""
  names = found.get("id2label")
  if isinstance(names, dict) and names:
    return len(names)
  count = found.get("num_labels", 2)  # The default of transformers.
  if names is None and type(count) is int:
    return count
  raise wrong(file, "id2label", "names of the classes", names)


def write_vision_config(
  config: VisionConfig,
  dtype: np.dtype,
  like: dict | None = None,
  *,
  labels: Sequence[str] | None = None,
) -> dict:
  """Writes a tower's config.json; a `like` may be of the model around it."""
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
