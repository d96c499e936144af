# SPDX-License-Identifier: Apache-2.0
"""RoPE in a config.json: its base, and how frequencies are stretched.

transformers 5 has `rope_parameters` with the base in it; version 4 had
`rope_theta`, and `rope_scaling` where frequencies are stretched. Both are read,
and both are written.
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


def read_rope(file: Path, found: dict) -> dict[str, Any]:
  """Reads RoPE.

  Args:
    file: for messages.
    found: what config.json holds.

  Returns:
    `rope_theta` and `rope_scaling` of a `ModelConfig`.

  Raises:
    ValueError: a scaling that cannot be had here, or one without its numbers.
  """
  key = "rope_parameters" if found.get("rope_parameters") else "rope_scaling"
  rope = found.get(key) or {}
  if not isinstance(rope, dict):
    raise ValueError(
      f"load_hf: {file}: {key} must be an object, got {str(rope)[:40]}; copy "
      "the file again"
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
    is_plain = field == "partial_rotary_factor" and value == 1
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
  theta = _base(file, rope, found)
  if name == "default":
    if values:
      raise ValueError(
        f"load_hf: {file}: {', '.join(values)} of {key} is not supported yet "
        "with plain RoPE (type 'default')"
      )
    return dict(rope_theta=theta, rope_scaling=None)
  longest = found.get("max_position_embeddings")
  if name == "yarn" and type(longest) is int:  # As transformers does.
    values.setdefault(_LENGTH, float(longest))
  try:
    scaling = scaling_of(name, values)
  except ValueError as error:
    raise ValueError(f"load_hf: {file}: {key}: {error}") from error
  return dict(rope_theta=theta, rope_scaling=write_scaling(scaling))


def _base(file: Path, rope: dict, found: dict) -> float:
  bases = [each["rope_theta"] for each in (rope, found) if "rope_theta" in each]
  bases = bases or [1e4]
  if not all(type(base) in (int, float) and base == bases[0] for base in bases):
    raise ValueError(
      f"load_hf: {file}: rope_theta must be one number, got "
      f"{str(bases)[:80]}; copy the file again"
    )
  return float(bases[0])


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
  """The keys of a config.json for a base and a scaling."""
  name, fields = "default", {}
  if scaling is not None:
    name, fields = scaling_fields(scaling)
  rope = {"rope_type": name, **fields}
  keys = {"rope_theta": theta, "rope_parameters": rope | {"rope_theta": theta}}
  return keys if scaling is None else keys | {"rope_scaling": rope}
