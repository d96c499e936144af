# SPDX-License-Identifier: Apache-2.0
"""Reads and writes windows and RoPE of layers, in a config.json.

transformers 5 lists in `layer_types` which layers have a sliding window, and
has RoPE's base and scaling in `rope_parameters`, one object per kind of layer
if kinds differ. Version 4 may only state `sliding_window_pattern`, and has
`rope_theta`, `rope_scaling` and `rope_local_base_freq`, the base of layers with
a window. We read both and write both. Lists must have a period: every n-th
layer sees all keys, the others a window.
"""

from pathlib import Path
from typing import Any

from coat_jax.models.hf.keys import LONGEST, wrong
from coat_jax.models.rope import (
  SCALINGS,
  scaling_fields,
  scaling_of,
  write_scaling,
)
from coat_jax.ops.rope import RopeScaling

LAYER_TYPES = "layer_types"
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
_KINDS = ("sliding_attention", "full_attention")
_TYPES = ("rope_type", "type")
_LENGTH = "original_max_position_embeddings"
# The share of each head's channels that are rotated.
PARTIAL = "partial_rotary_factor"
WINDOW_BASE = "rope_local_base_freq"


def read_full_every(
  file: Path, found: dict[str, Any], default: int
) -> int | None:
  """Reads `full_every` of a `ModelConfig`, how often a layer sees all keys.

  A list that is too short to show a period gets the period that the file also
  states, or the default. If no layer sees all keys, the result is one more than
  the number of layers.
  """
  (pattern, *_) = [x for k in PATTERNS if (x := found.get(k))] or [default]
  if type(pattern) is not int or pattern < 1:
    raise wrong(file, PATTERNS[0], "a whole number from 1 on", pattern)
  types = found.get(LAYER_TYPES)
  if types is None:
    return pattern
  count = found.get("num_hidden_layers")
  if not isinstance(types, list) or len(types) != count:
    raise wrong(
      file, LAYER_TYPES, f"a list of all {str(count)[:20]} layers", types
    )
  full = _KINDS[1]
  if found.get("sliding_window", 0) is None and set(types) == {full}:
    return None
  first = types.index(full) + 1 if full in types else len(types) + 1
  for every in (pattern, first):
    if types == _layer_types(every, len(types)):
      return every
  rule = f"{_KINDS[0]} but for each n-th, which is {full}"
  remedy = "layers in another order cannot be had here yet"
  raise wrong(file, LAYER_TYPES, rule, types, remedy)


def _layer_types(full_every: int, num_layers: int) -> list[str]:
  """Lists the names of the layers' kinds, as a config.json has them."""
  return [_KINDS[i % full_every == 0] for i in range(1, num_layers + 1)]


def write_layer_types(
  full_every: int | None, window: int | None, num_layers: int
) -> dict[str, Any]:
  """Returns the key of a config.json that states what each layer sees."""
  if full_every is None:  # All layers are alike.
    full_every = 1 if window is None else num_layers + 1
  return {LAYER_TYPES: _layer_types(full_every, num_layers)}


def read_ropes(file: Path, found: dict) -> dict[str, Any]:
  """Reads RoPE if layers with a window may have another than the others.

  Returns `rope_theta`, `rope_scaling` and `window_rope_theta` of a
  `ModelConfig`.
  """
  ropes = found.get("rope_parameters") or {}
  if not isinstance(ropes, dict) or ropes.keys() - _KINDS:
    rule = f"an object with {' and '.join(_KINDS)}"
    raise wrong(file, "rope_parameters", rule, ropes)
  window, full = (ropes.get(name) or {} for name in _KINDS)
  old = {k: v for k, v in found.items() if k != "rope_parameters"}
  full = read_rope(file, old | {"rope_parameters": full}, 1e6)
  base = {"rope_theta": found[WINDOW_BASE]} if WINDOW_BASE in found else {}
  window = read_rope(file, base | {"rope_parameters": window})
  if window == full:
    return full | {"window_rope_theta": None}
  if window["rope_scaling"] is not None:
    key, got = f"rope_parameters of {_KINDS[0]}", window["rope_scaling"]
    remedy = "layers that see a window cannot scale RoPE differently here yet"
    raise wrong(file, key, "of type 'default'", got, remedy)
  return full | {"window_rope_theta": window["rope_theta"]}


def read_rope(
  file: Path,
  found: dict,
  default_base: float = 1e4,
  *,
  has_partial: bool = False,
) -> dict[str, Any]:
  """Reads `rope_theta` and `rope_scaling` of a `ModelConfig`.

  Args:
    file: for error messages.
    found: the content of config.json.
    default_base: the base if config.json states none.
    has_partial: whether RoPE may rotate only a part of each head; the result
      then has that share under its own key, if it is below 1.
  """
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
      remedy = "take out the one that is wrong"
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
  shared = dict(rope_theta=theta)
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
    return shared | dict(rope_scaling=None)
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
  """Returns a number that is in either place, or the same in both."""
  values = [each[key] for each in (rope, found) if key in each] or [default]
  if not all(type(x) in (int, float) and x == values[0] for x in values):
    raise wrong(file, key, "one number", values)
  return float(values[0])


def write_rope(
  theta: float, scaling: RopeScaling | None, share: float | None = None
) -> dict[str, Any]:
  """Returns the keys of a config.json: base, scaling, and rotated share."""
  name, fields = "default", {}
  if scaling is not None:
    name, fields = scaling_fields(scaling)
  rope = {"rope_type": name, **fields}
  own = {"rope_theta": theta} | ({} if share is None else {PARTIAL: share})
  keys = own | {"rope_parameters": rope | own}
  return keys if scaling is None else keys | {"rope_scaling": rope}


def write_ropes(
  theta: float, scaling: RopeScaling | None, window_theta: float | None
) -> dict[str, Any]:
  """Returns the keys of a config.json with one RoPE per kind of layer."""
  keys = write_rope(theta, scaling)
  full = keys["rope_parameters"]
  window = full
  if window_theta is not None:
    window = write_rope(window_theta, None)["rope_parameters"]
  ropes = dict(zip(_KINDS, (window, full), strict=True))
  return keys | {"rope_parameters": ropes, WINDOW_BASE: window["rope_theta"]}
