# SPDX-License-Identifier: Apache-2.0
"""Reads folders of safetensors, one tensor at a time.

A safetensors file consists of the header's length (8 bytes), the header (JSON
with the offset of each tensor), and the tensors. All headers are checked before
a tensor is read.

If a checkpoint has several files (shards), an index in the same folder lists
them. Shards may be links to files elsewhere, as in huggingface_hub's cache.
"""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from coat_jax.models.hf.keys import CONFIG

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
}
_LARGEST_HEADER = 100_000_000  # Bytes, as in the safetensors package.
_MOST_DIGITS = 300


def _refusal(
  file: Path, rule: str, got: Any, remedy: str = "copy it again"
) -> ValueError:
  """Makes the error for a file that breaks `rule`."""
  return ValueError(f"load_hf: {file} must {rule}, got {got}; {remedy}")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor that starts at byte `offset` of a file."""

  file: Path
  name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  offset: int

  @property
  def nbytes(self) -> int:
    """The tensor's size in the file, in bytes."""
    return self.dtype.itemsize * math.prod(self.shape)

  def read(self, index: Any = ...) -> np.ndarray:
    """Reads the part that a NumPy index selects, through a memory map."""
    mapped = np.memmap(self.file, self.dtype, "r", self.offset, self.shape)
    return np.asarray(mapped[index])


def read_json(file: Path) -> dict:
  """Reads a file; raises ValueError unless it holds a JSON object."""
  try:
    return _parse_object(file.read_bytes())
  except (OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or str(error)
    remedy = "copy the whole folder of the checkpoint again"
    raise _refusal(file, "hold a JSON object", reason, remedy) from error


def _parse_object(data: bytes) -> dict:
  """Parses a JSON object; raises ValueError for bad JSON or a repeated key."""

  def pairs(found):
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
      twice = next(name for name in names if names.count(name) > 1)
      raise ValueError(f"the key {twice!r} twice")
    return dict(found)

  def whole_number(digits):
    if len(digits) > _MOST_DIGITS:
      raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)

  try:
    found = json.loads(data, object_pairs_hook=pairs, parse_int=whole_number)
  except RecursionError as error:
    raise ValueError("brackets nested too deeply") from error
  if not isinstance(found, dict):
    raise ValueError(f"a {type(found).__name__}")
  return found


def check_folder(folder: Path) -> None:
  """Raises ValueError unless `folder` is a folder that is not empty."""
  if folder.is_dir() and any(folder.iterdir()):
    return
  got = "a file" if folder.is_file() else "nothing of that name"
  got = "an empty folder" if folder.is_dir() else got
  remedy = "pass a folder that transformers' save_pretrained wrote"
  raise _refusal(folder, f"be a folder with {CONFIG} and {MODEL}", got, remedy)


def split_experts(
  tensors: dict[str, StoredTensor],
) -> dict[str, StoredTensor]:
  """Splits tensors that contain all experts into one tensor per matrix.

  experts.gate_up_proj [E, 2 F, D]  ->  experts.{e}.gate_proj.weight [F, D]
                                        experts.{e}.up_proj.weight [F, D]
  experts.down_proj [E, D, F]       ->  experts.{e}.down_proj.weight [D, F]
  """
  found = {}
  for name, x in tensors.items():
    start, _, end = name.rpartition(".experts.")
    parts = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(end)
    if not parts or len(x.shape) != 3 or x.shape[1] % len(parts):
      found[name] = x
      continue
    shape = x.shape[1] // len(parts), x.shape[2]
    offset = x.offset
    for expert, part in itertools.product(range(x.shape[0]), parts):
      each = dataclasses.replace(x, shape=shape, offset=offset)
      found[f"{start}.experts.{expert}.{part}_proj.weight"] = each
      offset += each.nbytes
  return found


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
  """Reads the headers of a checkpoint; returns its tensors by name."""
  check_folder(folder)
  if (folder / MODEL).is_file():
    return read_header(folder / MODEL)
  if (folder / INDEX).is_file():
    return _open_shards(folder)
  pickles = [f for end in ("bin", "pt", "pth") for f in folder.glob(f"*.{end}")]
  got = "neither"
  if pickles:
    got = (
      f"{min(pickles).name}, a pickle, which can run arbitrary code when loaded"
    )
  remedy = (
    "save the model again with save_pretrained of transformers, which writes "
    "safetensors"
  )
  raise _refusal(folder, f"hold {MODEL} or {INDEX}", got, remedy)


def _open_shards(folder: Path) -> dict[str, StoredTensor]:
  index = folder / INDEX
  places = read_json(index).get("weight_map")
  if not isinstance(places, dict) or not places:
    rule = "have a weight_map from tensors to files"
    raise _refusal(index, rule, str(places)[:40])
  files = list(dict.fromkeys(map(str, places.values())))
  for name in files:
    # A name that contains a folder could point outside the checkpoint.
    is_name = name.endswith(".safetensors") and name.isprintable()
    if not is_name or Path(name).name != name or "\\" in name:
      remedy = "shards are called NAME.safetensors, without folders"
      raise _refusal(index, "list files in its folder", repr(name[:80]), remedy)
    if not (folder / name).is_file():
      raise ValueError(
        f"load_hf: {index} lists {name}, which is not in the folder; copy all "
        f"{len(files)} files of the checkpoint"
      )
  shards = {name: read_header(folder / name) for name in files}
  held = {(tensor, name) for name in files for tensor in shards[name]}
  if wrong := held ^ set(places.items()):
    tensor, _ = min(wrong)
    where = [name for each, name in held if each == tensor]
    where = " and ".join(sorted(where)) or "no file"
    got = f"{places.get(tensor)} for {tensor}, which is in {where}"
    rule = "list the file that contains each tensor"
    raise _refusal(index, rule, got, "copy the whole checkpoint again")
  return {tensor: x for name in files for tensor, x in shards[name].items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
  """Reads the header of a safetensors file; returns tensors by name."""
  size = file.stat().st_size
  with file.open("rb") as opened:
    length = int.from_bytes(opened.read(8), "little")
    if size < 8 or length > min(size - 8, _LARGEST_HEADER):
      got = f"{size} bytes with a header of {length} bytes"
      raise _refusal(file, "be a complete safetensors file", got)
    try:
      header = _parse_object(opened.read(length))
    except ValueError as error:
      remedy = "it is damaged or not a safetensors file: copy it again"
      rule = "begin with a JSON header"
      raise _refusal(file, rule, error, remedy) from error
  header.pop("__metadata__", None)
  place = start = 8 + length
  found = {name: _entry(file, name, x, start) for name, x in header.items()}
  remedy = "it was cut short, or damaged: copy it again"
  for x in sorted(found.values(), key=lambda x: x.offset):
    if x.offset != place:
      got = f"one at byte {x.offset - start} instead of byte {place - start}"
      raise _refusal(file, "hold tensors one after another", got, remedy)
    place += x.nbytes
  if place != size:
    rule = f"hold {place - start} bytes of tensors"
    raise _refusal(file, rule, size - start, remedy)
  return found


def _entry(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
  """Parses an entry of a header; offsets in it count from byte `start`."""
  entry = entry if isinstance(entry, dict) else {}
  kind, shape = entry.get("dtype"), entry.get("shape")
  offsets = entry.get("data_offsets")
  if isinstance(kind, str) and kind not in DTYPES:
    rule, remedy = ", ".join(DTYPES), "save the model in one of these dtypes"
    raise _refusal(file, f"hold tensors of {rule}", f"{name} of {kind}", remedy)
  if isinstance(kind, str) and _are_counts(shape) and _are_counts(offsets):
    begin = min(offsets, default=0)
    found = StoredTensor(file, name, DTYPES[kind], tuple(shape), start + begin)
    if found.nbytes and offsets == [begin, begin + found.nbytes]:
      return found
  rule = "state the dtype, shape and data_offsets of each tensor"
  got = f"{name}: {str(entry)[:80]}"
  raise _refusal(file, rule, got, "the header is damaged: copy it again")


def _are_counts(values: Any) -> bool:
  return isinstance(values, list) and all(
    type(value) is int and 0 <= value < 2**48 for value in values
  )
