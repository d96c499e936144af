# SPDX-License-Identifier: Apache-2.0
"""Models become checkpoints that transformers reads.

Layer by layer parameters are unpacked on their devices and cast there; a
parameter of one layer is in the host's memory at a time.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax.checks import (
  COUNT,
  Range,
  check_kind,
  check_whole,
  dtype_of,
)
from coat_jax.models.decoder import Decoder
from coat_jax.models.hf.config import CONFIG, parse_config, write_config
from coat_jax.models.hf.files import DTYPES, INDEX, MODEL, read_json
from coat_jax.models.hf.llava_config import (
  parse_llava_config,
  write_llava_config,
)
from coat_jax.models.hf.tensors import AnyConfig, Part, parts, path_of
from coat_jax.models.hf.vision_config import (
  parse_vision_config,
  write_vision_config,
)
from coat_jax.models.vision import VisionTower
from coat_jax.models.vision_language import VisionLanguageModel

# What a tokenizer or a generating program reads.
CARRIED = (
  "tokenizer.json",
  "tokenizer.model",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  "generation_config.json",
)
# The images that come with them are preprocessed as these say.
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# How config.json is read and written.
_CONFIG_OF: dict[type, tuple[Callable, Callable]] = {
  Decoder: (parse_config, write_config),
  VisionTower: (parse_vision_config, write_vision_config),
  VisionLanguageModel: (parse_llava_config, write_llava_config),
}


def carry(source: Path, target: Path, *others: str) -> None:
  """Copies the files of `CARRIED`, and others, that a folder has to another."""
  for name in (*CARRIED, *others):
    if (source / name).is_file():
      shutil.copyfile(source / name, target / name)


def save_hf(
  model: Decoder | VisionTower | VisionLanguageModel,
  folder: str | Path,
  *,
  like: str | Path | None = None,
  dtype: DTypeLike | None = None,
  max_length: int | None = None,
  labels: Sequence[str] | None = None,
  max_shard_size: int = 5 * 10**9,
) -> None:
  """Saves a model as a checkpoint that transformers reads.

  Example usage::

    model = load_hf("Llama-2-7b-hf")
    ...  # Train it.
    save_hf(model, "trained", like="Llama-2-7b-hf")

  Args:
    model: of a class that `load_hf` loads, on one device or on a mesh of this
      process.
    folder: to create.
    like: a folder with the config.json of such a model: the keys that do not
      follow from the model's shape, tokenizer and generation settings are
      copied from it. None for none.
    dtype: of the tensors, float32, bfloat16 or float16; None for that of
      `like`, or without one that of the model's weights.
    max_length: of a Decoder, tokens of the longest sequence it was trained
      with, for config.json where `like` does not say it; None leaves it out.
    labels: of a VisionTower with classes, their names; None for those of
      `like`, or without one LABEL_0 and so on.
    max_shard_size: bytes of tensors a file; a larger model is split, and gets
      an index. The parameter of one layer is not split.

  Raises:
    TypeError: an argument of another kind.
    ValueError: `max_length` or `max_shard_size` is below 1; the folder exists,
      `like` is of another model, transformers has no such model, or there are
      not as many labels as classes.
    OSError: it cannot be written; nothing is left of it then.
  """
  _check(model, folder, like, max_length, labels, max_shard_size)
  folder = Path(folder)
  if os.path.lexists(folder):
    raise ValueError(
      f"save_hf: {folder} must not exist, because nothing is replaced, got "
      "one; pass another folder"
    )
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  config = model.config
  parse, write = _CONFIG_OF[type(model)]
  keys = None
  if like is not None:
    file = Path(like) / CONFIG
    keys = read_json(file)
    described, of_like = parse(file, keys)
    if described != config:
      raise ValueError(
        f"save_hf: {file} must be of the model that is saved, got {described}; "
        "pass the folder that it was loaded from"
      )
    dtype = of_like if dtype is None else dtype
  if dtype is None:
    text = params.get("decoder", params)
    dtype = text["layers"]["attention"]["out"]["kernel"].dtype
  stored = dtype_of(dtype)
  if stored not in _NAMES:
    raise ValueError(
      "save_hf: dtype must be float32, bfloat16 or float16, got "
      f"{repr(dtype) if stored is None else stored}; pass one of these"
    )
  options: dict[str, Any] = {}
  if isinstance(model, Decoder):
    options["max_length"] = max_length
  if isinstance(model, VisionTower):
    options["labels"] = labels
  elif labels is not None:
    raise ValueError(
      "save_hf: labels are of a VisionTower with classes, got them with a "
      f"{type(model).__name__}; leave them out"
    )
  keys = write(config, stored, keys, **options)
  folder.absolute().parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    prefix=f"{folder.name}.", dir=folder.absolute().parent
  ) as temporary:
    written = Path(temporary) / folder.name
    written.mkdir()
    _write_tensors(written, config, params, stored, max_shard_size)
    _write_json(written / CONFIG, keys)
    if like is not None:
      others = () if isinstance(model, Decoder) else PROCESSORS
      carry(Path(like), written, *others)
    written.rename(folder)


def _check(model, folder, like, max_length, labels, max_shard_size) -> None:
  """Raises where arguments are of other kinds, or numbers out of range."""
  op, paths = "save_hf", (str, os.PathLike)
  remedy = "pass what load_hf loaded, or made like it"
  check_kind(op, "model", model, tuple(_CONFIG_OF), remedy)
  check_kind(op, "folder", folder, paths, "pass a path")
  if like is not None:
    check_kind(op, "like", like, paths, "pass a path")
  if max_length is not None:
    check_whole(op, "max_length", max_length, COUNT, "None leaves it out")
  if max_length is not None and not isinstance(model, Decoder):
    raise ValueError(
      f"{op}: max_length is of a Decoder, got it with a "
      f"{type(model).__name__}; leave it out"
    )
  if labels is not None:
    kinds, remedy = (list, tuple), "pass a list of names"
    check_kind(op, "labels", labels, kinds, remedy)
    for label in labels:
      check_kind(op, "a label", label, str, remedy)
  allowed, remedy = Range(1, 2**63 - 1), "5 * 10**9 is the default"
  check_whole(op, "max_shard_size", max_shard_size, allowed, remedy)


class _Shard(NamedTuple):
  """Parts of the model that are in one file, and their tensors' bytes."""

  parts: list[Part]
  size: int


def _write_tensors(
  folder: Path,
  config: AnyConfig,
  params: Any,
  dtype: np.dtype,
  max_shard_size: int,
) -> None:
  shards = [_Shard([], 0)]
  for part in parts(config, params):
    size = sum(_bytes(x.shape, dtype) for x in part.tensors.values())
    if shards[-1].parts and shards[-1].size + size > max_shard_size:
      shards.append(_Shard([], 0))
    last = shards[-1]
    shards[-1] = _Shard([*last.parts, part], last.size + size)
  read = _reader(params, dtype)
  places: dict[str, str] = {}
  for i, shard in enumerate(shards):
    name = MODEL
    if len(shards) > 1:
      name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
    _write_file(folder / name, shard.parts, dtype, read)
    places |= {tensor: name for part in shard.parts for tensor in part.tensors}
  if len(shards) > 1:
    size = sum(shard.size for shard in shards)
    _write_json(
      folder / INDEX,
      {"metadata": {"total_size": size}, "weight_map": places},
    )


def _bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
  return math.prod(shape) * dtype.itemsize


def _reader(
  params: Any, dtype: np.dtype
) -> Callable[[Part], Iterator[np.ndarray]]:
  """Builds the function that gives a part's tensors, one after another."""
  leaves = {path_of(keys): x for keys, x in jax.tree.leaves_with_path(params)}
  unpacked: dict[str, Callable] = {}

  def read(part: Part) -> Iterator[np.ndarray]:
    if part.path not in unpacked:  # A function a parameter, not one a layer.
      unpacked[part.path] = jax.jit(_unpacker(part, dtype))
    for x in unpacked[part.path](leaves[part.path], np.int32(part.layer or 0)):
      yield np.asarray(x)

  return read


def _unpacker(part: Part, dtype: np.dtype) -> Callable:
  def unpack(x: Array, i: Array) -> tuple[Array, ...]:
    if part.layer is not None:
      x = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    return part.row.layout.unpack(part.config, x.astype(dtype))

  return unpack


def _write_file(
  file: Path,
  written: list[Part],
  dtype: np.dtype,
  read: Callable[[Part], Iterator[np.ndarray]],
) -> None:
  """Writes one file of safetensors, whose header is known before its data."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  place = 0
  for part in written:
    for name, x in part.tensors.items():
      end = place + _bytes(x.shape, dtype)
      header[name] = {
        "dtype": _NAMES[dtype],
        "shape": list(x.shape),
        "data_offsets": [place, end],
      }
      place = end
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # Tensors begin at multiples of 8 bytes.
  with file.open("xb") as opened:
    opened.write(len(text).to_bytes(8, "little") + text)
    for part in written:
      for x in read(part):
        opened.write(np.ascontiguousarray(x).view(np.uint8).data)
    opened.flush()
    os.fsync(opened.fileno())  # Else a crash may leave the name without it.


def _write_json(file: Path, values: dict) -> None:
  file.write_text(json.dumps(values, indent=2) + "\n")
