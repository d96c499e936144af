# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the keys of a config.json for sliding windows and RoPE.

transformers 5 lists in `layer_types` which layers have a sliding window, and
stores RoPE's base and scaling in `rope_parameters`, with one object per kind of
layer if they differ. transformers 4 may store only `sliding_window_pattern`,
and stores RoPE in `rope_theta`, `rope_scaling` and `rope_local_base_freq` (the
base of layers with a window). We read and write both forms. Lists must be
periodic: every n-th layer attends to all keys, and the others to a window.
"""

import dataclasses
from pathlib import Path
from typing import Any

from coat_jax.models.hf.keys import LONGEST, NOT_SUPPORTED, wrong
from coat_jax.models.hf.schema import Keys
from coat_jax.models.rope import (
  SCALINGS,
  scaling_fields,
  scaling_of,
  write_scaling,
)
from coat_jax.ops.rope import RopeScaling

_LAYER_TYPES = "layer_types"
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
_SLIDING, _FULL = _KINDS = ("sliding_attention", "full_attention")
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
_TYPES = ("rope_type", "type")
_LENGTH = "original_max_position_embeddings"
# The share of each head's channels that are rotated.
PARTIAL = "partial_rotary_factor"
_WINDOW_BASE = "rope_local_base_freq"


def _are_full(types: Any) -> bool:
  """Returns whether a list states that all layers attend to all keys."""
  return isinstance(types, list) and all(x == _FULL for x in types)


class FullLayers(Keys):
  """`layer_types` of a family that has no layers with a window."""

  def read(self, file: Path, found: dict) -> dict[str, Any]:
    types = found.get(_LAYER_TYPES)
    if types and not _are_full(types):
      raise wrong(file, _LAYER_TYPES, "None", types, NOT_SUPPORTED)
    return {}


@dataclasses.dataclass(frozen=True)
class LayerTypes(Keys):
  """Keys for windows in all layers but every n-th; `default` is the usual n."""

  default: int

  def read(self, file: Path, found: dict) -> dict[str, Any]:
    """Reads `full_every` of a `ModelConfig`.

    If the list of layers is too short to show a period, the period comes from
    another key, or is the default. If no layer attends to all keys, the period
    is one more than the number of layers.
    """
    stated = [x for key in _PATTERNS if (x := found.get(key))]
    pattern = stated[0] if stated else self.default
    if type(pattern) is not int or pattern < 1:
      raise wrong(file, _PATTERNS[0], "a whole number from 1 on", pattern)
    types = found.get(_LAYER_TYPES)
    if types is None:
      return {"full_every": pattern}
    count = found.get("num_hidden_layers")
    if not isinstance(types, list) or len(types) != count:
      rule = f"a list of all {str(count)[:20]} layers"
      raise wrong(file, _LAYER_TYPES, rule, types)
    if found.get("sliding_window", 0) is None and _are_full(types):
      return {"full_every": None}
    first = (types.index(_FULL) if _FULL in types else len(types)) + 1
    for every in (pattern, first):
      if types == _layer_types(every, len(types)):
        return {"full_every": every}
    rule = f"{_SLIDING} except for every n-th, which is {_FULL}"
    remedy = "layers in another order are not supported yet"
    raise wrong(file, _LAYER_TYPES, rule, types, remedy)

  def write(self, config: Any, found: dict) -> None:
    every = config.full_every
    if every is None:  # All layers are the same.
      every = 1 if config.window is None else config.num_layers + 1
    found[_LAYER_TYPES] = _layer_types(every, config.num_layers)


def _layer_types(full_every: int, num_layers: int) -> list[str]:
  """Lists the kind of each layer, as a config.json names them."""
  return [_KINDS[i % full_every == 0] for i in range(1, num_layers + 1)]


class Rope(Keys):
  """Keys for RoPE that all layers share."""

  def read(self, file: Path, found: dict) -> dict[str, Any]:
    return _read_rope(file, found, has_partial=PARTIAL in self.names)

  def write(self, config: Any, found: dict) -> None:
    share = None
    if PARTIAL in self.names and config.rotary_dim is not None:
      share = config.rotary_dim / config.head_width
    found.pop(PARTIAL, None)
    if config.scaling is None:
      found.pop("rope_scaling", None)
    found |= _rope_keys(config.rope_theta, config.scaling, share)


class WindowRope(Rope):
  """Keys for RoPE that may differ between layers with and without a window."""

  def read(self, file: Path, found: dict) -> dict[str, Any]:
    ropes = found.get("rope_parameters") or {}
    if not isinstance(ropes, dict) or ropes.keys() - _KINDS:
      rule = f"an object with {' and '.join(_KINDS)}"
      raise wrong(file, "rope_parameters", rule, ropes)
    window, full = (ropes.get(name) or {} for name in _KINDS)
    old = {k: v for k, v in found.items() if k != "rope_parameters"}
    full = _read_rope(file, old | {"rope_parameters": full}, 1e6)
    base = {"rope_theta": found[_WINDOW_BASE]} if _WINDOW_BASE in found else {}
    window = _read_rope(file, base | {"rope_parameters": window})
    if window == full:
      return full | {"window_rope_theta": None}
    if window["rope_scaling"] is not None:
      key, got = f"rope_parameters of {_SLIDING}", window["rope_scaling"]
      remedy = "scaled RoPE in layers with a window is not supported yet"
      raise wrong(file, key, "of type 'default'", got, remedy)
    return full | {"window_rope_theta": window["rope_theta"]}

  def write(self, config: Any, found: dict) -> None:
    super().write(config, found)
    window = full = found["rope_parameters"]
    if config.window_rope_theta is not None:
      window = _rope_keys(config.window_rope_theta, None)["rope_parameters"]
    found["rope_parameters"] = {_SLIDING: window, _FULL: full}
    found[_WINDOW_BASE] = window["rope_theta"]


def _read_rope(
  file: Path,
  found: dict,
  default_base: float = 1e4,
  *,
  has_partial: bool = False,
) -> dict[str, Any]:
  """Reads `rope_theta` and `rope_scaling`, and `PARTIAL` if it is below 1."""
  key = "rope_parameters" if found.get("rope_parameters") else "rope_scaling"
  rope = found.get(key) or {}
  if not isinstance(rope, dict):
    raise wrong(file, key, "an object", rope)
  # A file of version 5 may also have version 4's key, if both agree.
  old = found.get("rope_scaling")
  if key != "rope_scaling" and isinstance(old, dict):
    named = {_TYPES[0]: rope.get(_TYPES[1], "default"), **rope}
    if any(
      named.get(_TYPES[0] if field in _TYPES else field) != value
      for field, value in old.items()
    ):
      remedy = "delete the one that is wrong"
      raise wrong(file, "rope_scaling", "as rope_parameters", old, remedy)
  names = {str(rope[each]) for each in _TYPES if each in rope} or {"default"}
  name = " and ".join(sorted(names))
  if name != "default" and name not in SCALINGS:
    raise ValueError(
      f"load_hf: {file}: {key} of type {name[:40]!r} is not supported yet; "
      f"plain RoPE (type 'default') is, and {', '.join(SCALINGS)}"
    )
  values = {}
  for field, value in rope.items():
    is_plain = field == PARTIAL and (has_partial or value == 1)
    if field in ("rope_theta", *_TYPES) or is_plain or value is None:
      continue
    if field == "truncate" and value is True:
      continue
    if type(value) not in (int, float):
      raise wrong(file, f"{field} of {key}", "a number", value)
    values[field] = float(value)
  theta = _one(file, "rope_theta", rope, found, default_base)
  shared: dict[str, Any] = dict(rope_theta=theta, rope_scaling=None)
  if has_partial and (share := _one(file, PARTIAL, rope, found, 1.0)) != 1:
    if not 0 < share < 1:
      raise wrong(file, PARTIAL, "above 0 and at most 1", share)
    shared[PARTIAL] = share
  if name == "default":
    if values:
      raise ValueError(
        f"load_hf: {file}: {', '.join(values)} of {key} is not supported yet "
        "with plain RoPE (type 'default')"
      )
    return shared
  longest = found.get(LONGEST)
  if name == "yarn" and type(longest) is int:  # The default of transformers.
    values.setdefault(_LENGTH, float(longest))
  try:
    scaling = scaling_of(name, values)
  except ValueError as error:
    raise ValueError(f"load_hf: {file}: {key}: {error}") from error
  return shared | dict(rope_scaling=write_scaling(scaling))


def _one(
  file: Path, key: str, rope: dict, found: dict, default: float
) -> float:
  """Reads a number from `rope` or `found`; if both have it, they must agree."""
  values = [each[key] for each in (rope, found) if key in each] or [default]
  if not all(type(x) in (int, float) and x == values[0] for x in values):
    raise wrong(file, key, "one number", values)
  return float(values[0])


def _rope_keys(
  theta: float, scaling: RopeScaling | None, share: float | None = None
) -> dict[str, Any]:
  """Returns the keys of both versions: base, scaling, and rotated share."""
  name, fields = "default", {}
  if scaling is not None:
    name, fields = scaling_fields(scaling)
  rope = {"rope_type": name, **fields}
  own = {"rope_theta": theta} | ({} if share is None else {PARTIAL: share})
  keys = own | {"rope_parameters": rope | own}
  return keys if scaling is None else keys | {"rope_scaling": rope}


FULL_LAYERS = FullLayers((_LAYER_TYPES,))
ROPE = Rope(_ROPE)
PARTIAL_ROPE = Rope((*_ROPE, PARTIAL))
WINDOW_ROPE = WindowRope((*_ROPE, _WINDOW_BASE))


def layer_types(default: int) -> LayerTypes:
  """Makes the keys for windows in all layers except every n-th."""
  return LayerTypes((_LAYER_TYPES, *_PATTERNS), default)
