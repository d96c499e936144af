# SPDX-License-Identifier: Apache-2.0
"""Which layers see a window, in a config.json.

transformers 5 lists the layers in `layer_types`; version 4 may have the period
alone, as `sliding_window_pattern`. Read are lists with a period: each n-th
layer sees all keys, the others a window.
"""

from pathlib import Path
from typing import Any

LAYER_TYPES = "layer_types"
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
_NAMES = ("sliding_attention", "full_attention")


def read_full_every(
  file: Path, found: dict[str, Any], default: int
) -> int | None:
  """Reads how often a layer sees all keys.

  Args:
    file: for messages.
    found: what config.json holds.
    default: the period of the family.

  Returns:
    `full_every` of a `ModelConfig`. Lists that are too short to tell have the
    period that is written beside them or the default, and where no layer sees
    all keys one above the number of layers.

  Raises:
    ValueError: a list without a period, or of another length than the model.
  """
  (pattern, *_) = [x for k in PATTERNS if (x := found.get(k))] or [default]
  if type(pattern) is not int or pattern < 1:
    raise ValueError(
      f"load_hf: {file}: {PATTERNS[0]} must be a whole number from 1 on, got "
      f"{str(pattern)[:40]}; copy the file again"
    )
  types = found.get(LAYER_TYPES)
  if types is None:
    return pattern
  count = found.get("num_hidden_layers")
  if not isinstance(types, list) or len(types) != count:
    raise ValueError(
      f"load_hf: {file}: {LAYER_TYPES} must name all {str(count)[:20]} layers, "
      f"got {str(types)[:80]}; copy the file again"
    )
  full = _NAMES[1]
  if found.get("sliding_window", 0) is None and set(types) == {full}:
    return None
  first = types.index(full) + 1 if full in types else len(types) + 1
  for every in (pattern, first):
    if types == layer_types(every, len(types)):
      return every
  raise ValueError(
    f"load_hf: {file}: {LAYER_TYPES} must be {_NAMES[0]} but for each n-th, "
    f"which is {full}, got {str(types)[:80]}; layers in another order cannot "
    "be had here yet"
  )


def layer_types(full_every: int, num_layers: int) -> list[str]:
  """The names of the layers' kinds, as a config.json lists them."""
  return [_NAMES[i % full_every == 0] for i in range(1, num_layers + 1)]


def write_layer_types(
  full_every: int | None, window: int | None, num_layers: int
) -> dict[str, Any]:
  """The key of a config.json that says what each layer sees."""
  if full_every is None:  # All layers alike.
    full_every = 1 if window is None else num_layers + 1
  return {LAYER_TYPES: layer_types(full_every, num_layers)}
