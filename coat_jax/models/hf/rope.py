# SPDX-License-Identifier: Apache-2.0
"""Reads and writes RoPE in a config.json: its base and frequency scaling.

transformers 5 has `rope_parameters`, which includes the base; version 4 had
`rope_theta`, and `rope_scaling` if frequencies are scaled. We read both and
write both.

If layers with a sliding window have their own RoPE, `rope_parameters` has one
object for each kind of layer. Version 4 had `rope_local_base_freq` for such
layers and the other keys for layers that see all keys.
"""

from pathlib import Path
from typing import Any

from coat_jax.models.rope import (
  SCALINGS,
  scaling_fields,
  scaling_of,
  write_scaling,
)
from coat_jax.ops.rotary import RopeScaling

_TYPES = ("rope_type", "type")
_LENGTH = "original_max_position_embeddings"
# The share of each head's channels that are rotated.
PARTIAL = "partial_rotary_factor"
_BY_KIND = ("sliding_attention", "full_attention")
WINDOW_BASE = "rope_local_base_freq"


def read_ropes(file: Path, found: dict) -> dict[str, Any]:
  """Reads RoPE of layers that see a window, and of layers that see all keys.

  Args:
    file: for error messages.
    found: the content of config.json.

  Returns:
    `rope_theta`, `rope_scaling` and `window_rope_theta` of a `ModelConfig`.

  Raises:
    ValueError: as for `read_rope`; or layers that see a window scale RoPE in
      another way than the other layers.
  """
  ropes = found.get("rope_parameters") or {}
  if not isinstance(ropes, dict) or ropes.keys() - _BY_KIND:
    raise ValueError(
      f"load_hf: {file}: rope_parameters must have {' and '.join(_BY_KIND)}, "
      f"got {str(ropes)[:80]}; copy the file again"
    )
  window, full = (ropes.get(name) or {} for name in _BY_KIND)
  old = {k: v for k, v in found.items() if k != "rope_parameters"}
  full = read_rope(file, old | {"rope_parameters": full}, 1e6)
  base = {"rope_theta": found[WINDOW_BASE]} if WINDOW_BASE in found else {}
  window = read_rope(file, base | {"rope_parameters": window})
  if window == full:
    return full | {"window_rope_theta": None}
  if window["rope_scaling"] is not None:
    raise ValueError(
      f"load_hf: {file}: rope_parameters of {_BY_KIND[0]} must be of type "
      f"'default', got {window['rope_scaling'][:80]}; layers that see a window "
      "cannot stretch RoPE in a way of their own here yet"
    )
  return full | {"window_rope_theta": window["rope_theta"]}


def read_rope(
  file: Path,
  found: dict,
  default_base: float = 1e4,
  *,
  has_partial: bool = False,
) -> dict[str, Any]:
  """Reads RoPE.

  Args:
    file: for error messages.
    found: the content of config.json.
    default_base: the base if config.json states none.
    has_partial: whether RoPE may rotate only a part of each head.

  Returns:
    `rope_theta` and `rope_scaling` of a `ModelConfig`; with `has_partial` also
    the share of a head that is rotated, under its own key, if it is below 1.

  Raises:
    ValueError: the scaling is not supported, or its numbers are missing.
  """
  key = "rope_parameters" if found.get("rope_parameters") else "rope_scaling"
  rope = found.get(key) or {}
  if not isinstance(rope, dict):
    raise ValueError(
      f"load_hf: {file}: {key} must be an object, got {str(rope)[:40]}; copy "
      "the file again"
    )
  # A file of version 5 may also have version 4's key, if both agree.
  old = found.get("rope_scaling")
  if key != "rope_scaling" and isinstance(old, dict):
    named = {_TYPES[0]: rope.get(_TYPES[1], "default"), **rope}
    if any(
      named.get(_TYPES[0] if field in _TYPES else field) != value
      for field, value in old.items()
    ):
      raise ValueError(
        f"load_hf: {file}: rope_scaling must be as rope_parameters, got "
        f"{str(old)[:80]}; take out the one that is wrong"
      )
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
      raise ValueError(
        f"load_hf: {file}: {field} of {key} must be a number, got "
        f"{str(value)[:40]}; copy the file again"
      )
    values[field] = float(value)
  theta = _one(file, "rope_theta", rope, found, default_base)
  shared = dict(rope_theta=theta)
  if has_partial and (share := _one(file, PARTIAL, rope, found, 1.0)) != 1:
    if not 0 < share < 1:
      raise ValueError(
        f"load_hf: {file}: {PARTIAL} must be above 0 and at most 1, got {share}"
      )
    shared[PARTIAL] = share
  if name == "default":
    if values:
      raise ValueError(
        f"load_hf: {file}: {', '.join(values)} of {key} is not supported yet "
        "with plain RoPE (type 'default')"
      )
    return shared | dict(rope_scaling=None)
  longest = found.get("max_position_embeddings")
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
    raise ValueError(
      f"load_hf: {file}: {key} must be one number, got {str(values)[:80]}; "
      "copy the file again"
    )
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
  ropes = dict(zip(_BY_KIND, (window, full), strict=True))
  return keys | {"rope_parameters": ropes, WINDOW_BASE: window["rope_theta"]}
