# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the keys of a config.json for sliding windows and RoPE.

  setting           transformers 5   transformers 4
  sliding windows   layer_types      layer_types or sliding_window_pattern
  RoPE's scaling    rope_parameters  rope_scaling
  RoPE's base       rope_parameters  rope_theta
    with a window   rope_parameters  rope_local_base_freq

We read the keys of both versions. For RoPE, we also write both. If RoPE differs
between layers with and without a window, `rope_parameters` contains an object
for each kind of layer. `layer_types` must be periodic: every n-th layer attends
to all keys, and the others to a window.
"""

import dataclasses
from pathlib import Path
from typing import Any

from coat_jax.models.hf.keys import LONGEST, NOT_SUPPORTED, Key, ignored, wrong
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
_ROPE, _SCALING = "rope_parameters", "rope_scaling"
# The key for the fraction of each head's channels that RoPE rotates.
PARTIAL = "partial_rotary_factor"
_WINDOW_BASE = "rope_local_base_freq"


def _are_full(types: Any) -> bool:
  """Returns whether `layer_types` lists only layers that attend to all keys."""
  return isinstance(types, list) and all(x == _FULL for x in types)


class _FullLayers(Key):
  """The key `layer_types` in families that do not mix kinds of layers."""

  def read(self, file: Path, key: str, found: dict) -> dict[str, Any]:
    types = found.get(_LAYER_TYPES)
    if types and not _are_full(types):
      rule = f"absent or all {_FULL}"
      raise wrong(file, _LAYER_TYPES, rule, types, NOT_SUPPORTED)
    return {}


@dataclasses.dataclass(frozen=True)
class _LayerTypes(Key):
  """The key `layer_types` in families where every n-th layer has no window."""

  default: int  # The value of n if the file states none.

  def read(self, file: Path, key: str, found: dict) -> dict[str, Any]:
    """Reads n, the value of `ModelConfig.full_every`.

    If there are fewer than n layers, `layer_types` does not reveal n. So
    `sliding_window_pattern` or the default is tried first.
    """
    stated = [x for key in _PATTERNS if (x := found.get(key))]
    pattern = stated[0] if stated else self.default
    if type(pattern) is not int or pattern < 1:
      raise wrong(file, _PATTERNS[0], "a whole number above 0", pattern)
    types = found.get(_LAYER_TYPES)
    if types is None:
      return {"full_every": pattern}
    count = found.get("num_hidden_layers")
    if not isinstance(types, list) or len(types) != count:
      rule = f"a list of {str(count)[:20]} types, one per layer"
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

  def write(self, key: str, config: Any, found: dict) -> None:
    every = config.full_every
    if every is None:  # All layers are the same.
      every = 1 if config.window is None else config.num_layers + 1
    found[_LAYER_TYPES] = _layer_types(every, config.num_layers)


def _layer_types(full_every: int, num_layers: int) -> list[str]:
  """Lists the kind of each layer, spelled as in config.json."""
  return [_KINDS[i % full_every == 0] for i in range(1, num_layers + 1)]


@dataclasses.dataclass(frozen=True)
class _Rope(Key):
  """RoPE that all layers share; `has_partial` allows a `PARTIAL` below 1."""

  has_partial: bool = False

  def read(self, file: Path, key: str, found: dict) -> dict[str, Any]:
    return _read_rope(file, found, has_partial=self.has_partial)

  def write(self, key: str, config: Any, found: dict) -> None:
    share = None
    if self.has_partial and config.rotary_dim is not None:
      share = config.rotary_dim / config.head_width
    # `found` may contain old values, copied from another config.json.
    for old in (PARTIAL, _SCALING):
      found.pop(old, None)
    found |= _rope_keys(config.rope_theta, config.scaling, share)


class _WindowRope(_Rope):
  """RoPE that may differ between layers with and without a window."""

  def read(self, file: Path, key: str, found: dict) -> dict[str, Any]:
    ropes = found.get(_ROPE) or {}
    if not isinstance(ropes, dict) or ropes.keys() - _KINDS:
      rule = f"an object with no keys but {' and '.join(_KINDS)}"
      raise wrong(file, _ROPE, rule, ropes)
    window, full = (ropes.get(name) or {} for name in _KINDS)
    full = _read_rope(file, found | {_ROPE: full}, 1e6)
    base = {"rope_theta": found[_WINDOW_BASE]} if _WINDOW_BASE in found else {}
    window = _read_rope(file, base | {_ROPE: window})
    if window == full:
      return full | {"window_rope_theta": None}
    if (scaling := window["rope_scaling"]) is not None:
      remedy = "scaled RoPE in layers with a window is not supported yet"
      name = f"{_ROPE} of {_SLIDING}"
      raise wrong(file, name, "of type 'default'", scaling, remedy)
    return full | {"window_rope_theta": window["rope_theta"]}

  def write(self, key: str, config: Any, found: dict) -> None:
    super().write(key, config, found)
    window = full = found[_ROPE]
    if config.window_rope_theta is not None:
      window = _rope_keys(config.window_rope_theta, None)[_ROPE]
    found[_ROPE] = {_SLIDING: window, _FULL: full}
    found[_WINDOW_BASE] = window["rope_theta"]


def _read_rope(
  file: Path,
  found: dict,
  default_base: float = 1e4,
  *,
  has_partial: bool = False,
) -> dict[str, Any]:
  """Reads RoPE's base and scaling and, if `has_partial`, `PARTIAL`."""
  key = _ROPE if found.get(_ROPE) else _SCALING
  rope, old = (_with_type(file, x, found.get(x)) for x in (key, _SCALING))
  # A file may have the keys of both versions of transformers.
  if found.get(_SCALING) and any(rope.get(x) != old[x] for x in old):
    remedy = "delete the one that is wrong"
    raise wrong(file, _SCALING, f"equal to {_ROPE}", old, remedy)

  def number(name: str, default: float) -> float:
    """Reads a number from `rope` or `found`, which must not differ."""
    values: list[Any] = [x[name] for x in (rope, found) if name in x]
    values = values or [default]
    if not all(type(x) in (int, float) and x == values[0] for x in values):
      raise wrong(file, name, "one number", values)
    return float(values[0])

  fields: dict[str, Any] = {
    "rope_theta": number("rope_theta", default_base),
    "rope_scaling": None,
  }
  if has_partial and (share := number(PARTIAL, 1.0)) != 1:
    if not 0 < share < 1:
      raise wrong(file, PARTIAL, "above 0 and at most 1", share)
    fields[PARTIAL] = share
  name = str(rope.pop("rope_type"))
  rope.pop("rope_theta", None)
  if has_partial or rope.get(PARTIAL) == 1:
    rope.pop(PARTIAL, None)
  if rope.get("truncate") is True:
    rope.pop("truncate")
  for field, value in rope.items():
    if type(value) not in (int, float):
      raise wrong(file, f"{field} of {key}", "a number", value)
  if name == "default" and rope:
    raise ValueError(
      f"load_hf: {file}: {', '.join(rope)} of {key} is not supported yet "
      "with plain RoPE (type 'default')"
    )
  if name == "default":
    return fields
  if name not in SCALINGS:
    raise ValueError(
      f"load_hf: {file}: {key} of type {name[:40]!r} is not supported yet; the "
      f"supported types are 'default' (plain RoPE), {', '.join(SCALINGS)}"
    )
  longest = found.get(LONGEST)
  if name == "yarn" and type(longest) is int:  # The default of transformers.
    rope.setdefault("original_max_position_embeddings", longest)
  try:
    scaling = scaling_of(name, {x: float(value) for x, value in rope.items()})
  except ValueError as error:
    raise ValueError(f"load_hf: {file}: {key}: {error}") from error
  return fields | {"rope_scaling": write_scaling(scaling)}


def _with_type(file: Path, key: str, rope: Any) -> dict[str, Any]:
  """Copies RoPE's JSON object without nulls; renames `type` to `rope_type`."""
  rope = rope or {}
  if not isinstance(rope, dict):
    raise wrong(file, key, "an object", rope)
  rope = {name: value for name, value in rope.items() if value is not None}
  return {"rope_type": rope.pop("type", "default"), **rope}


def _rope_keys(
  theta: float, scaling: RopeScaling | None, share: float | None = None
) -> dict[str, Any]:
  """Returns the keys for RoPE in both versions of transformers."""
  name, fields = "default", {}
  if scaling is not None:
    name, fields = scaling_fields(scaling)
  rope = {"rope_type": name, **fields}
  own = {"rope_theta": theta} | ({} if share is None else {PARTIAL: share})
  keys = own | {_ROPE: rope | own}
  return keys if scaling is None else keys | {_SCALING: rope}


# Groups of keys for `ConfigTable.keys`. A group's first key reads and writes
# the whole group.
FULL_LAYERS: dict[str, Key] = {_LAYER_TYPES: _FullLayers()}
_OLD = ignored("rope_theta", _SCALING)
ROPE = {_ROPE: _Rope(), **_OLD}
PARTIAL_ROPE = {_ROPE: _Rope(has_partial=True), **_OLD, **ignored(PARTIAL)}
WINDOW_ROPE = {_ROPE: _WindowRope(), **_OLD, **ignored(_WINDOW_BASE)}


def layer_types(default: int) -> dict[str, Key]:
  """Returns the keys of a family where every n-th layer has no window."""
  return {_LAYER_TYPES: _LayerTypes(default), **ignored(*_PATTERNS)}
