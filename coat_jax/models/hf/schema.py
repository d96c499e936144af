# SPDX-License-Identifier: Apache-2.0
"""Describes the keys of a config.json: plain fields, and groups of keys.

`ConfigTable` describes a family's file. Subclasses of `Keys` read and write
keys that are not plain fields; those for windows and RoPE are in `layer_keys`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coat_jax.models.hf.keys import choose, typed, wrong


@dataclasses.dataclass(frozen=True)
class Keys:
  """One or several keys that are read and written together.

  Attributes:
    names: the keys, all optional.
  """

  names: tuple[str, ...]

  def read(self, file: Path, found: dict) -> dict[str, Any]:
    """Returns fields of the configuration; `file` is for error messages."""
    return {}

  def write(self, config: Any, found: dict) -> None:
    """Updates `found`, the content of a config.json."""


@dataclasses.dataclass(frozen=True)
class Choice(Keys):
  """A key with a few known values; the first one is the default."""

  field: str
  values: Mapping[str, Any]

  def read(self, file: Path, found: dict) -> dict[str, Any]:
    (key,) = self.names
    value = found.get(key, next(iter(self.values)))
    return {self.field: choose(file, key, value, self.values)}

  def write(self, config: Any, found: dict) -> None:
    (key,) = self.names
    value = getattr(config, self.field)
    spellings = [name for name, x in self.values.items() if x == value]
    if found.get(key) not in spellings:
      found[key] = spellings[0]


@dataclasses.dataclass(frozen=True)
class Alias(Keys):
  """Another name for the key `key`, whose value is a whole number."""

  key: str
  field: str

  def read(self, file: Path, found: dict) -> dict[str, Any]:
    (alias,) = self.names
    if alias not in found:
      return {}
    value = found[alias]
    if self.key in found and found[self.key] != value:
      rule, remedy = f"{self.key}, which is {found[self.key]}", "correct one"
      raise wrong(file, alias, rule, value, remedy)
    return {self.field: typed(file, alias, value, int)}

  def write(self, config: Any, found: dict) -> None:
    found[self.names[0]] = getattr(config, self.field)


@dataclasses.dataclass(frozen=True)
class Derived(Keys):
  """A key that states a property of the configuration; reading ignores it."""

  field: str

  def write(self, config: Any, found: dict) -> None:
    found.setdefault(self.names[0], getattr(config, self.field))


class InnerWidth(Keys):
  """GPT-2's MLP width; null means four times `n_embd`."""

  def read(self, file: Path, found: dict) -> dict[str, Any]:
    value = found.get("n_inner")
    if value is None:
      value = 4 * typed(file, "n_embd", found.get("n_embd"), int)
    return {"d_ff": typed(file, "n_inner", value, int)}

  def write(self, config: Any, found: dict) -> None:
    is_usual = config.d_ff == 4 * config.d_model
    found["n_inner"] = None if is_usual else config.d_ff


class Labels(Keys):
  """The names of a classifier's classes; a ViTModel has no classes."""

  def read(self, file: Path, found: dict) -> dict[str, Any]:
    if found.get("architectures") == ["ViTModel"]:
      return {}
    names = found.get("id2label")
    if isinstance(names, dict) and names:
      return {"num_classes": len(names)}
    count = found.get("num_labels", 2)  # The default of transformers.
    if names is None and type(count) is int:
      return {"num_classes": count}
    raise wrong(file, "id2label", "names of the classes", names)

  def write(self, config: Any, found: dict) -> None:
    if config.num_classes is None:
      found["architectures"] = ["ViTModel"]
    elif "id2label" not in found:  # Name them as transformers does.
      found |= labeled([f"LABEL_{i}" for i in range(config.num_classes)])


def labeled(names: Iterable[str]) -> dict[str, dict]:
  """Returns the keys that name a classifier's classes."""
  pairs = [*enumerate(names)]
  return {
    "id2label": {str(i): name for i, name in pairs},
    "label2id": {name: i for i, name in pairs},
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubConfig:
  """A configuration inside another one, such as LLaVA's `text_config`.

  Attributes:
    field: field of the outer configuration.
    kind: class of the inner configuration.
    defaults: the model_type to assume if the file states none, and the values
      that transformers assumes for absent keys of that type.
    inherited: keys that the outer file may state for the inner one.
  """

  field: str
  kind: type
  defaults: dict[str, Any]
  inherited: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigTable:
  """Describes how a family's config.json is read and written.

  Attributes:
    kind: class of the configuration.
    architectures: classes of transformers; the first one is written.
    model_type: the file's model_type; None for the family's name.
    whole: model_type of the full model whose `vision_config` is this tower.
    fields: maps each key to the configuration's field.
    defaults: values that transformers assumes for absent keys. All other keys
      of `fields` are required.
    fixed: keys that must have a certain value. An absent key counts as having
      this value, unless `defaults` states another one.
    ignored: keys that have no effect if the `fixed` keys have their values.
    optional: keys that are written only if they differ from the default.
    groups: readers and writers of all other keys.
    parts: configurations inside this one, by key.
  """

  kind: type
  architectures: tuple[str, ...]
  model_type: str | None = None
  whole: str | None = None
  fields: dict[str, str]
  defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
  fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
  ignored: tuple[str, ...] = ()
  optional: tuple[str, ...] = ()
  groups: tuple[Keys, ...] = ()
  parts: dict[str, SubConfig] = dataclasses.field(default_factory=dict)
