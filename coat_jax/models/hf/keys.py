# SPDX-License-Identifier: Apache-2.0
"""Reads and writes single keys of a config.json.

A key that is neither in the family's table nor in `WITHOUT_EFFECT` raises an
error, because the loaded model could be wrong if the key were ignored.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

CONFIG = "config.json"
# transformers 5 writes the first key, transformers 4 the second.
DTYPE_KEYS = ("dtype", "torch_dtype")
# The context length that the model was trained with.
LONGEST = "max_position_embeddings"
# Keys that do not change what any model computes.
WITHOUT_EFFECT = {
  # The file's origin.
  *("model_type", "architectures", "_name_or_path", "transformers_version"),
  # How new random weights are initialized.
  "initializer_range",
  # How transformers runs the model, or what its calls return.
  *("pretraining_tp", "use_cache", "return_dict", "output_attentions"),
  *("output_hidden_states", "torchscript", "_attn_implementation_autoset"),
  *("use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward"),
  # How text is generated.
  *("bos_token_id", "eos_token_id", "pad_token_id", "do_sample"),
  *("temperature", "top_k", "top_p", "max_length"),
  # Keys for fine-tuning on tasks such as classification.
  *("id2label", "label2id", "problem_type", "finetuning_task"),
}
_TYPES = {bool: "true or false", int: "a whole number", float: "a number"}
_COPY = "copy the file again"
NOT_SUPPORTED = "other values are not supported yet"
# Marks keys without a default, which every file must contain.
_REQUIRED: Any = object()


def wrong(
  file: Path, key: str, rule: str, got: Any, remedy: str = _COPY
) -> ValueError:
  """Makes the error for a key whose value breaks `rule`."""
  return ValueError(
    f"load_hf: {file}: {key} must be {rule}, got {str(got)[:80]}; {remedy}"
  )


def choose(file: Path, key: str, value: Any, choices: Mapping[str, Any]) -> Any:
  """Translates a value; raises ValueError if it is not one of `choices`."""
  if isinstance(value, str) and value in choices:
    return choices[value]
  raise wrong(file, key, f"one of {', '.join(choices)}", value, NOT_SUPPORTED)


def check_known(file: Path, found: dict, known: Iterable[str]) -> None:
  """Raises ValueError if a file has a key that is not known."""
  known = {*DTYPE_KEYS, *WITHOUT_EFFECT, *known}
  for key, value in found.items():
    if key in known:
      continue
    if key == "quantization_config":
      raise ValueError(
        f"load_hf: {file}: {key} means that another library quantized the "
        "weights; pass the original checkpoint in BF16, F16 or F32"
      )
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ValueError(
      f"load_hf: {file}: {key} is not supported, got {str(value)[:40]}; {meant}"
      f"load a copy without {key} if it does not change what the model computes"
    )


def dtype_of(file: Path, found: dict) -> np.dtype:
  """Returns the tensors' dtype; raises ValueError if it is not supported."""
  names = [found[key] for key in DTYPE_KEYS if found.get(key) is not None]
  name = names[0] if names else "float32"
  if name not in ("float32", "bfloat16", "float16"):
    rule = "float32, bfloat16 or float16"
    raise wrong(file, "dtype", rule, name, "save the model in one of these")
  return np.dtype(jnp.dtype(name))


class Key:
  """A key that is ignored, and the base class of all other keys."""

  def read(self, file: Path, key: str, found: dict) -> dict[str, Any]:
    """Returns fields of the configuration; errors mention `file`."""
    return {}

  def write(self, key: str, config: Any, found: dict) -> None:
    """Updates `found`, the content of a config.json."""


@dataclasses.dataclass(frozen=True)
class Field(Key):
  """A key for the field `name` of a configuration, of type `kind`.

  `kind` is bool, int or float. `default` is the value that transformers assumes
  if the key is absent.
  """

  name: str
  kind: type
  default: Any = _REQUIRED

  def read(self, file: Path, key: str, found: dict) -> dict[str, Any]:
    value = found.get(key, self.default)
    if value is _REQUIRED:
      raise ValueError(f"load_hf: {file} must have {key}; {_COPY}")
    if value is not None and type(value) is not self.kind:
      if self.kind is not float or type(value) is not int:
        raise wrong(file, key, _TYPES[self.kind], value)
      value = float(value)
    return {self.name: value}

  def write(self, key: str, config: Any, found: dict) -> None:
    found[key] = getattr(config, self.name)


class UnlessDefault(Field):
  """A key that is not written if its field has the default value."""

  def write(self, key: str, config: Any, found: dict) -> None:
    if getattr(config, self.name) != self.default:
      super().write(key, config, found)


class HeadWidth(Field):
  """A width whose field may be None, which means the width of a head."""

  def write(self, key: str, config: Any, found: dict) -> None:
    width = getattr(config, self.name)
    if width is None and self.default is None:
      return
    found[key] = width or config.head_width


@dataclasses.dataclass(frozen=True)
class Renamed(Field):
  """A field whose key was renamed to `new` in transformers 5."""

  new: str = ""

  def read(self, file: Path, key: str, found: dict) -> dict[str, Any]:
    if self.new not in found:
      return super().read(file, key, found)
    value = found[self.new]
    if key in found and found[key] != value:
      rule = f"equal to {key} ({found[key]})"
      raise wrong(file, self.new, rule, value, "correct the wrong one")
    return super().read(file, self.new, found)

  def write(self, key: str, config: Any, found: dict) -> None:
    found[key] = found[self.new] = getattr(config, self.name)


@dataclasses.dataclass(frozen=True)
class Fixed(Key):
  """A key that must be absent or have a certain value.

  False, 0, None and [] are not written, because transformers assumes them.
  """

  value: Any

  def read(self, file: Path, key: str, found: dict) -> dict[str, Any]:
    value = found.get(key, self.value)
    if (value or None) != (self.value or None):
      raise wrong(file, key, str(self.value), value, NOT_SUPPORTED)
    return {}

  def write(self, key: str, config: Any, found: dict) -> None:
    if self.value:
      found.setdefault(key, self.value)


@dataclasses.dataclass(frozen=True)
class Choice(Key):
  """A key with a few allowed values; the first one is the default."""

  field: str
  values: Mapping[str, Any]

  def read(self, file: Path, key: str, found: dict) -> dict[str, Any]:
    value = found.get(key, next(iter(self.values)))
    return {self.field: choose(file, key, value, self.values)}

  def write(self, key: str, config: Any, found: dict) -> None:
    value = getattr(config, self.field)
    spellings = [name for name, x in self.values.items() if x == value]
    if found.get(key) not in spellings:
      found[key] = spellings[0]


@dataclasses.dataclass(frozen=True)
class Derived(Key):
  """A key that is written from a configuration's property, and never read."""

  name: str

  def write(self, key: str, config: Any, found: dict) -> None:
    found.setdefault(key, getattr(config, self.name))


class InnerWidth(Field):
  """GPT-2's MLP width; null means four times `n_embd`."""

  def read(self, file: Path, key: str, found: dict) -> dict[str, Any]:
    fields = super().read(file, key, found)
    width: Any = found.get("n_embd")
    is_usual = fields[self.name] is None and type(width) is int
    return {self.name: 4 * width} if is_usual else fields

  def write(self, key: str, config: Any, found: dict) -> None:
    is_usual = config.d_ff == 4 * config.d_model
    found[key] = None if is_usual else config.d_ff


class Labels(Key):
  """The names of a classifier's classes; a ViTModel has no classes."""

  def read(self, file: Path, key: str, found: dict) -> dict[str, Any]:
    if found.get("architectures") == ["ViTModel"]:
      return {}
    names = found.get(key)
    if isinstance(names, dict) and names:
      return {"num_classes": len(names)}
    count = found.get("num_labels", 2)  # The default of transformers.
    if names is None and type(count) is int:
      return {"num_classes": count}
    raise wrong(file, key, "an object of class names by number", names)

  def write(self, key: str, config: Any, found: dict) -> None:
    if config.num_classes is None:
      found["architectures"] = ["ViTModel"]
    elif key not in found:  # Name the classes as transformers does.
      found |= labeled([f"LABEL_{i}" for i in range(config.num_classes)])


def labeled(names: Iterable[str]) -> dict[str, dict]:
  """Returns the keys that name a classifier's classes."""
  pairs = [*enumerate(names)]
  return {
    "id2label": {str(i): name for i, name in pairs},
    "label2id": {name: i for i, name in pairs},
  }


def ignored(*names: str) -> dict[str, Key]:
  """Returns keys that are ignored, as entries of a table."""
  return dict.fromkeys(names, Key())
