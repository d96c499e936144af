# SPDX-License-Identifier: Apache-2.0
"""Reads a decoder's config.json into a `ModelConfig`, and writes it.

A family is a row of `rows.CONFIGS`. transformers 5 and 4 have different keys
for RoPE and the dtype: we read both, and write both if they do not exclude each
other.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from coat_jax.models.config import ModelConfig
from coat_jax.models.hf.keys import (
  CONFIG,
  DTYPE_KEYS,
  LONGEST,
  WITHOUT_EFFECT,
  check_known,
  choose,
  typed,
  wrong,
)
from coat_jax.models.hf.layers import (
  LAYER_TYPES,
  PARTIAL,
  PATTERNS,
  WINDOW_BASE,
  read_full_every,
  read_rope,
  read_ropes,
  write_layer_types,
  write_rope,
  write_ropes,
)
from coat_jax.models.hf.rows import CONFIGS, ConfigRow

# Keys of all families. Only keys that also have a default may be absent.
_FIELDS = {
  "num_hidden_layers": "num_layers",
  "hidden_size": "d_model",
  "intermediate_size": "d_ff",
  "num_attention_heads": "num_heads",
  "num_key_value_heads": "num_kv_heads",
  "head_dim": "head_dim",
  "vocab_size": "vocab_size",
  "tie_word_embeddings": "tied_embeddings",
}
_DEFAULTS = {
  "num_key_value_heads": None,
  "head_dim": None,
  "tie_word_embeddings": False,
  "rms_norm_eps": 1e-6,
  "clip_qkv": None,
  "sliding_window": None,
}
_FIXED = {
  "hidden_act": "silu",
  "attention_dropout": 0,
  "is_encoder_decoder": False,
  "add_cross_attention": False,
}
_FLOATS = (
  *("rms_norm_eps", "clip_qkv", "layer_norm_epsilon"),
  *("attn_logit_softcapping", "final_logit_softcapping"),
  "router_aux_loss_coef",
)
_CHOICES = ("tie_word_embeddings", "norm_topk_prob")
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")


def parse_text_config(file: Path, found: dict) -> ModelConfig:
  """Parses a file's content; `file` is for error messages."""
  family: Any = found.get("model_type")
  row: ConfigRow = choose(file, "model_type", family, CONFIGS)
  named = found.get("architectures") or [row.architecture]
  if named != [row.architecture]:
    rule, remedy = f"[{row.architecture}]", "only language models can be read"
    raise wrong(file, "architectures", rule, named, remedy)
  fixed = row.of_all(_FIXED) | row.fixed
  defaults = row.of_all(_DEFAULTS) | row.defaults
  fields = row.of_all(_FIELDS) | row.fields
  known = {*fields, *fixed, *row.ignored, *row.choices, *DTYPE_KEYS}
  known |= WITHOUT_EFFECT.difference(row.lacks)
  known |= {*_ROPE} if row.has_rope else set()
  known |= {PARTIAL} if row.has_partial_rope else set()
  known |= {LAYER_TYPES, *PATTERNS} if row.full_every else set()
  known |= {WINDOW_BASE} if row.has_ropes else set()
  found = _without_aliases(file, row, found)
  check_known(file, found, known)
  for key, value in fixed.items():
    got = found.get(key, defaults.get(key, value))
    if (got or None) != (value or None) and not _is_all_full(key, got):
      remedy = f"a {family} with another one cannot be had here yet"
      raise wrong(file, key, str(value), got, remedy)
  missing = [key for key in fields if key not in {**defaults, **found}]
  if missing:
    raise ValueError(
      f"load_hf: {file} must have {', '.join(missing)}; copy the file again"
    )
  values = {
    field: _number(file, key, found.get(key, defaults.get(key)))
    for key, field in fields.items()
  }
  for key, (field, choices) in row.choices.items():
    value = found.get(key, next(iter(choices)))
    values[field] = choose(file, key, value, choices)
  if row.has_ropes:
    values |= read_ropes(file, found)
  elif row.has_rope:
    values |= read_rope(file, found, has_partial=row.has_partial_rope)
  if row.full_every:
    values["full_every"] = read_full_every(file, found, row.full_every)
  return _model_config(file, family, values)


def _without_aliases(file: Path, row: ConfigRow, found: dict) -> dict:
  """Renames aliases, so that each key has a single name."""
  found = dict(found)
  for alias, key in row.aliases.items():
    if alias not in found:
      continue
    value = found.pop(alias)
    if found.setdefault(key, value) != value:
      rule, remedy = f"{key}, which is {found[key]}", "correct the wrong one"
      raise wrong(file, alias, rule, value, remedy)
  return found


def _number(file: Path, key: str, value: Any) -> Any:
  """Checks a value's type; `ModelConfig` checks its range."""
  if key in _CHOICES:
    return typed(file, key, value, bool)
  if value is None or (type(value) is int and key not in _FLOATS):
    return value
  number = typed(file, key, value, float)
  return number if key in _FLOATS else value


def _model_config(
  file: Path, family: str, values: dict[str, Any]
) -> ModelConfig:
  if values.get("num_kv_heads") is None:
    values["num_kv_heads"] = values["num_heads"]
  multiple = CONFIGS[family].d_ff_multiple
  if values["d_ff"] is None and multiple and type(values["d_model"]) is int:
    values["d_ff"] = multiple * values["d_model"]
  share = values.pop(PARTIAL, None)
  try:
    config = ModelConfig(family=family, **values)
    if share is not None:  # Round as transformers does.
      size = int(config.head_width * share)
      config = dataclasses.replace(config, rotary_dim=size)
  except ValueError as error:
    raise ValueError(f"load_hf: {file}: {error}") from error
  if config.head_dim == config.d_model / config.num_heads:
    config = dataclasses.replace(config, head_dim=None)  # The canonical form.
  if config.query_scalar == config.head_width:
    config = dataclasses.replace(config, query_scalar=None)
  return config


def _is_all_full(key: str, value: Any) -> bool:
  """Tells whether the file states that all layers attend to everything."""
  return (
    key == "layer_types"
    and isinstance(value, list)
    and all(each == "full_attention" for each in value)
  )


def write_text_config(
  config: ModelConfig,
  dtype: np.dtype,
  like: dict | None = None,
  *,
  max_length: int | None = None,
) -> dict:
  """Writes a decoder's config.json, which transformers 4 and 5 read alike."""
  row = CONFIGS[config.family]
  fixed = row.of_all(_FIXED) | row.fixed
  found = {
    "model_type": config.family,
    "architectures": [row.architecture],
    # Keys for which transformers assumes another value if they are absent.
    **{
      key: fixed[key] for key in ("hidden_act", *row.defaults) if key in fixed
    },
    **(like or {}),
  }
  for key, field in (row.of_all(_FIELDS) | row.fields).items():
    value = getattr(config, field)
    if field == "d_ff" and value == config.d_model * (row.d_ff_multiple or 0):
      value = None
    if value is not None or key in row.fields:
      found[key] = value
  found |= {alias: found[key] for alias, key in row.aliases.items()}
  if "head_dim" in row.defaults:  # Otherwise transformers would assume another.
    found["head_dim"] = config.head_width
  if "query_pre_attn_scalar" in row.fields and config.query_scalar is None:
    found["query_pre_attn_scalar"] = config.head_width
  for key, (field, choices) in row.choices.items():
    value = getattr(config, field)
    names = [name for name, x in choices.items() if x == value]
    if found.get(key) not in names:
      found[key] = names[0]
  if config.scaling is None:
    found.pop("rope_scaling", None)
  rope = config.rope_theta, config.scaling
  if row.has_ropes:
    found |= write_ropes(*rope, config.window_rope_theta)
  elif row.has_rope:
    share = None
    if config.rotary_dim is not None and row.has_partial_rope:
      share = config.rotary_dim / config.head_width
    found.pop(PARTIAL, None)
    found |= write_rope(*rope, share)
  if row.full_every:
    found |= write_layer_types(
      config.full_every, config.window, config.num_layers
    )
  if max_length is not None and LONGEST not in row.lacks:
    found.setdefault(LONGEST, max_length)
  found |= dict.fromkeys(DTYPE_KEYS, dtype.name)
  written = parse_text_config(Path(CONFIG), found)
  before = dataclasses.asdict(config)
  for name, value in dataclasses.asdict(written).items():
    if value != before[name]:
      raise ValueError(
        f"save_hf: a {config.family} of transformers has {name} {value}, got "
        f"{before[name]}; it has no key for another one"
      )
  return found
