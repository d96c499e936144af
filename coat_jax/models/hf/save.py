# SPDX-License-Identifier: Apache-2.0
"""Saves models as checkpoints that transformers reads.

Devices cast the parameters and split them into tensors. The host holds one
parameter of one layer at a time.
"""

import functools
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from coat_jax.models.decoder import Decoder
from coat_jax.models.hf.config import AnyConfig, parse_config, write_config
from coat_jax.models.hf.files import DTYPES, INDEX, MODEL, read_json
from coat_jax.models.hf.keys import CONFIG
from coat_jax.models.hf.tensors import Layout, Part, parts
from coat_jax.models.hf.whole import check_free, written_whole
from coat_jax.models.initialization import check_dtype
from coat_jax.models.vision.tower import VisionTower
from coat_jax.models.vision_language import VisionLanguageModel
from coat_jax.numerics.checks import COUNT, Range, check_kind, check_whole
from coat_jax.optimizer.masks import leaf_path
from coat_jax.optimizer.matrices import MatrixSplit

# The files that transformers reads to tokenize and generate text.
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
# Files that describe how images are preprocessed.
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def carry(source: Path, target: Path, *others: str) -> None:
  """Copies the files named in `CARRIED` and `others`, if `source` has them."""
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
    model: a model of a class that `load_hf` loads, on one device or on a mesh
      of this process.
    folder: the folder to create.
    like: a folder whose config.json describes this model, or None. We copy the
      folder's tokenizer files, generation settings, image processor settings,
      and those keys of config.json that the model's shape does not determine.
    dtype: dtype of the tensors: float32, bfloat16 or float16. None for the
      dtype of `like` or, if `like` is None, of the model's weights.
    max_length: the context length with which a Decoder was trained, written to
      config.json unless `like` states one. Ignored if the model's config has
      `max_positions`.
    labels: the names of a VisionTower's classes. None for the names in `like`
      or, if `like` has no names, LABEL_0, LABEL_1 and so on.
    max_shard_size: largest total size of the tensors in one file, in bytes. A
      larger model is split into several files with an index. The tensors of one
      parameter of one layer are always in the same file.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: an option is outside its range, or does not apply to the class
      of the model; the folder exists; FOLDER.unfinished exists, because another
      process is writing the folder or was killed while writing it; `like`
      describes another model; config.json cannot describe the model; labels are
      not unique, or not one per class; or a weight is not finite in `dtype` (in
      float16, weights above 65504 are infinite).
    OSError: the checkpoint cannot be written; no part of it is left behind.
  """
  _check(model, folder, like, max_length, labels, max_shard_size)
  folder = Path(folder)
  check_free("save_hf", folder)
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  config = model.config
  keys = None
  if like is not None:
    file = Path(like) / CONFIG
    keys = read_json(file)
    described, of_like = parse_config(file, keys)
    if described != config:
      raise ValueError(
        f"save_hf: {file} must describe the model to save, got "
        f"{described}; pass the folder from which the model was loaded"
      )
    dtype = of_like if dtype is None else dtype
  if dtype is None:
    text = params.get("decoder", params)
    dtype = text["layers"]["attention"]["out"]["kernel"].dtype
  dtype = check_dtype("save_hf: dtype", dtype)
  keys = write_config(config, dtype, keys, max_length=max_length, labels=labels)
  with written_whole(folder) as written:
    written.mkdir()
    _write_tensors(written, config, params, dtype, max_shard_size)
    _write_json(written / CONFIG, keys)
    if like is not None:
      others = () if isinstance(model, Decoder) else PROCESSORS
      carry(Path(like), written, *others)


def _check(model, folder, like, max_length, labels, max_shard_size) -> None:
  """Raises an error if an argument has the wrong type or is out of range."""
  op, paths, own = "save_hf", (str, os.PathLike), type(model).__name__
  kinds = (Decoder, VisionTower, VisionLanguageModel)
  check_kind(op, "model", model, kinds, "pass a model that load_hf could load")
  check_kind(op, "folder", folder, paths, "pass a path")
  if like is not None:
    check_kind(op, "like", like, paths, "pass a path")
  for name, value, owner in (
    ("max_length", max_length, Decoder),
    ("labels", labels, VisionTower),
  ):
    if value is not None and not isinstance(model, owner):
      raise ValueError(
        f"{op}: {name} needs a {owner.__name__}, got a {own}; leave {name} out"
      )
  if max_length is not None:
    check_whole(op, "max_length", max_length, COUNT, "None leaves it out")
  if labels is not None:
    remedy = "pass a list of names"
    check_kind(op, "labels", labels, (list, tuple), remedy)
    for label in labels:
      check_kind(op, "a label", label, str, remedy)
  allowed, remedy = Range(1, 2**63 - 1), "5 * 10**9 is the default"
  check_whole(op, "max_shard_size", max_shard_size, allowed, remedy)


def _write_tensors(
  folder: Path,
  config: AnyConfig,
  params: Any,
  dtype: np.dtype,
  max_shard_size: int,
) -> None:
  """Writes the tensors to one file, or to several with an index."""
  shards: list[list[Part]] = [[]]
  size = total = 0
  for part in parts(config, params):
    own = sum(x.size for x in part.tensors.values()) * dtype.itemsize
    if shards[-1] and size + own > max_shard_size:
      shards.append([])
      size = 0
    shards[-1].append(part)
    size, total = size + own, total + own
  leaves = {leaf_path(keys): x for keys, x in jax.tree.leaves_with_path(params)}
  places: dict[str, str] = {}
  for i, shard in enumerate(shards):
    name = MODEL
    if len(shards) > 1:
      name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
    _write_file(folder / name, shard, dtype, leaves)
    places |= {tensor: name for part in shard for tensor in part.tensors}
  if len(shards) > 1:
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write_json(folder / INDEX, index)


@functools.partial(jax.jit, static_argnames=("layout", "split", "dtype"))
def _unpack(
  x: Array,
  layer: Array | None,
  *,
  layout: Layout,
  split: MatrixSplit | None,
  dtype: np.dtype,
) -> tuple[list[Array], Array]:
  """Returns the tensors of a parameter or layer, and whether all are finite."""
  if layer is not None:
    x = jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
  x = x.astype(dtype)
  return layout.unpack(x, split), jnp.all(jnp.isfinite(x))


def _write_file(
  file: Path,
  written: list[Part],
  dtype: np.dtype,
  leaves: dict[str, Array],
) -> None:
  """Writes one safetensors file: the header, then one tensor at a time."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  place = 0
  for part in written:
    for name, x in part.tensors.items():
      end = place + x.size * dtype.itemsize
      header[name] = {
        "dtype": _NAMES[dtype],
        "shape": list(x.shape),
        "data_offsets": [place, end],
      }
      place = end
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # Tensors start at a multiple of 8 bytes.
  with file.open("xb") as opened:
    opened.write(len(text).to_bytes(8, "little") + text)
    for part in written:
      layer = None if part.layer is None else np.int32(part.layer)
      tensors, is_finite = _unpack(
        leaves[part.path],
        layer,
        layout=part.layout,
        split=part.split,
        dtype=dtype,
      )
      if not is_finite:
        raise ValueError(
          f"save_hf: weights must be finite in {dtype}, got NaN or infinity in "
          f"{', '.join(part.tensors)}; save an earlier state if the model has "
          "diverged, else pass another dtype"
        )
      for x in tensors:
        opened.write(np.ascontiguousarray(x).view(np.uint8).data)
    opened.flush()
    os.fsync(opened.fileno())  # Without fsync, a crash may lose the data.


def _write_json(file: Path, values: dict) -> None:
  file.write_text(json.dumps(values, indent=2) + "\n")
