# SPDX-License-Identifier: Apache-2.0
"""Converts between a Hugging Face config.json and a model's configuration.

transformers 4 and 5 use different keys for RoPE and the dtype. We read and
write the keys of both versions.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coat_jax.models.config import ModelConfig
from coat_jax.models.hf.config_tables import CONFIGS
from coat_jax.models.hf.files import check_folder, read_json
from coat_jax.models.hf.keys import (
  CONFIG,
  DTYPE_KEYS,
  LONGEST,
  check_known,
  choose,
  dtype_of,
  labeled,
  wrong,
)
from coat_jax.models.hf.layer_keys import PARTIAL
from coat_jax.models.vision.config import VisionConfig
from coat_jax.models.vision_language import VisionLanguageConfig

type AnyConfig = ModelConfig | VisionConfig | VisionLanguageConfig


def read_config(folder: Path) -> tuple[Any, np.dtype]:
  """Reads a folder's config.json; returns the configuration and the dtype."""
  check_folder(folder)
  return parse_config(folder / CONFIG, read_json(folder / CONFIG))


def parse_config(file: Path, found: dict) -> tuple[Any, np.dtype]:
  """Parses a config.json as `read_config` does; errors mention `file`."""
  return _parse(file, found, None), dtype_of(file, found)


def write_config(
  config: AnyConfig,
  dtype: np.dtype,
  like: dict | None = None,
  *,
  max_length: int | None = None,
  labels: Sequence[str] | None = None,
) -> dict:
  """Returns config.json's content; `like` adds keys that `config` lacks."""
  found = _write(config, dtype, like or {})
  has_limit = getattr(config, "max_positions", None) is not None
  if max_length is not None and not has_limit:
    found.setdefault(LONGEST, max_length)
  if labels is None:
    return found
  count = getattr(config, "num_classes", None) or 0
  if not len(set(labels)) == len(labels) == count:
    raise ValueError(
      f"save_hf: labels must be {count} distinct names, one for each class, "
      f"got {len(labels)} names, {len(set(labels))} distinct; "
      "leave labels out for default names"
    )
  return found | (labeled(labels) if count else {})


def _parse(file: Path, found: dict, kind: type | None) -> AnyConfig:
  """Parses a configuration of class `kind`; None allows any class."""
  families = {}
  for family, row in CONFIGS.items():
    if kind is None or row.kind is kind:
      families[row.model_type or family] = family
      families |= {row.whole: family} if row.whole else {}
  model_type: Any = found.get("model_type")
  family = choose(file, "model_type", model_type, families)
  row = CONFIGS[family]
  named = found.get("architectures")
  if named and named not in [[name] for name in row.architectures]:
    rule = " or ".join(f"[{name}]" for name in row.architectures)
    remedy = "other classes are not supported"
    raise wrong(file, "architectures", rule, named, remedy)
  if model_type == row.whole:
    found = _object(file, found, "vision_config")
  inherited = [key for part in row.parts.values() for key in part.inherited]
  check_known(file, found, {*row.keys, *row.parts, *inherited})
  values: dict[str, Any] = {} if row.parts else {"family": family}
  for name, key in row.keys.items():
    values |= key.read(file, name, found)
  for name, part in row.parts.items():
    inner = _object(file, found, name, {})
    usual = part.defaults["model_type"]
    if inner.get("model_type", usual) == usual:
      inner = {**part.defaults, **inner}
    outer = {key: found[key] for key in part.inherited if key in found}
    values[part.field] = _parse(file, outer | inner, part.kind)
    dtype_of(file, inner)
  try:
    return _make(row.kind, values)
  except ValueError as error:
    raise ValueError(f"load_hf: {file}: {error}") from error


def _object(file: Path, found: dict, key: str, default: Any = None) -> dict:
  """Returns the JSON object that a file stores under a key."""
  inner = found.get(key, default)
  if isinstance(inner, dict):
    return inner
  raise wrong(file, key, "an object", inner)


def _make(kind: type, values: dict[str, Any]) -> AnyConfig:
  """Makes a configuration; widths equal to their defaults become None."""
  if kind is not ModelConfig:
    return kind(**values)
  share = values.pop(PARTIAL, None)
  if values.get("num_kv_heads") is None:
    values["num_kv_heads"] = values["num_heads"]
  config = ModelConfig(**values)
  if share is not None:  # Round as transformers does.
    size = int(config.head_width * share)
    config = dataclasses.replace(config, rotary_dim=size)
  if config.head_dim == config.d_model / config.num_heads:
    config = dataclasses.replace(config, head_dim=None)
  if config.query_scalar == config.head_width:
    config = dataclasses.replace(config, query_scalar=None)
  return config


def _write(config: Any, dtype: np.dtype, like: dict) -> dict:
  """Returns config.json's content; `like` adds keys that `config` lacks."""
  row = CONFIGS[config.family]
  if row.whole:
    like = like.get("vision_config", like)
  found = like | {
    "model_type": row.model_type or config.family,
    "architectures": [row.architectures[0]],
    **dict.fromkeys(DTYPE_KEYS, dtype.name),
  }
  for name, key in row.keys.items():
    key.write(name, config, found)
  for name, part in row.parts.items():
    inner = getattr(config, part.field)
    found[name] = _write(inner, dtype, like.get(name, {}))
    found |= {key: found[name][key] for key in part.inherited}
  written = dataclasses.asdict(_parse(Path(CONFIG), found, row.kind))
  for name, value in dataclasses.asdict(config).items():
    if value != written[name]:
      raise ValueError(
        f"save_hf: in a {config.family}, {name} must be {written[name]}, got "
        f"{value}; Hugging Face's config.json cannot store other values"
      )
  return found
