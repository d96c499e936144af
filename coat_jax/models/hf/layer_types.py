# SPDX-License-Identifier: Apache-2.0
"""Reads and writes which layers have a sliding window, in a config.json.

transformers 5 lists the layers in `layer_types`; version 4 may only state the
period, as `sliding_window_pattern`. We read lists that have a period: every
n-th layer sees all keys, the others a window.
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
    file: for error messages.
    found: the content of config.json.
    default: the family's period.

  Returns:
    `full_every` of a `ModelConfig`. A list that is too short to show a period
    gets the period that the file also states, or the default. If no layer sees
    all keys, the result is one more than the number of layers.

  Raises:
    ValueError: the list has no period, or is not as long as the model.
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
  """Returns the names of the layers' kinds, as a config.json lists them."""
  return [_NAMES[i % full_every == 0] for i in range(1, num_layers + 1)]


def write_layer_types(
  full_every: int | None, window: int | None, num_layers: int
) -> dict[str, Any]:
  """Returns the key of a config.json that states what each layer sees."""
  if full_every is None:  # All layers are alike.
    full_every = 1 if window is None else num_layers + 1
  return {LAYER_TYPES: layer_types(full_every, num_layers)}
