# SPDX-License-Identifier: Apache-2.0
"""Handles single keys of a config.json: what values mean, which are refused."""

import difflib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

DTYPE_KEYS = ("dtype", "torch_dtype")


def choose(file: Path, key: str, value: Any, choices: dict[str, Any]) -> Any:
  """Translates a value; raises ValueError if it is not one of `choices`."""
  if isinstance(value, str) and value in choices:
    return choices[value]
  raise ValueError(
    f"load_hf: {file}: {key} must be one of {', '.join(choices)}, got "
    f"{str(value)[:40]}; a model with another one cannot be had here yet"
  )


def refusal(file: Path, key: str, value: Any, known: set) -> ValueError:
  """Returns the error about an unknown key."""
  if key == "quantization_config":
    return ValueError(
      f"load_hf: {file}: {key} is of weights that another library quantized; "
      "pass the checkpoint that they were made from, in BF16, F16 or F32"
    )
  near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
  meant = f"did you mean {near[0]}? " if near else ""
  return ValueError(
    f"load_hf: {file}: {key} is not supported, got {str(value)[:40]}; {meant}"
    "if it changes nothing of what the model computes, take it out of a copy"
  )


def dtype_of(file: Path, found: dict) -> np.dtype:
  """Returns the tensors' dtype; raises ValueError if it is not supported."""
  names = [found[key] for key in DTYPE_KEYS if found.get(key) is not None]
  name = names[0] if names else "float32"
  if name not in ("float32", "bfloat16", "float16"):
    raise ValueError(
      f"load_hf: {file}: dtype must be float32, bfloat16 or float16, got "
      f"{str(name)[:40]}; save the model in one of these"
    )
  return np.dtype(jnp.dtype(name))
