# SPDX-License-Identifier: Apache-2.0
"""Reads single keys of a config.json.

There are three kinds of keys: keys that describe the model; keys that are known
not to affect what it computes (`WITHOUT_EFFECT`); and unknown keys. We refuse
an unknown key with an error that names it, because ignoring it could load a
different model.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

CONFIG = "config.json"
# transformers 5 writes the first, version 4 the second.
DTYPE_KEYS = ("dtype", "torch_dtype")
# The context length that the model was trained with.
LONGEST = "max_position_embeddings"
WITHOUT_EFFECT = {
  # The file's origin.
  *("model_type", "architectures", "_name_or_path", "transformers_version"),
  # How new random weights are initialized.
  "initializer_range",
  # How transformers computes the model, or what its calls return.
  *("pretraining_tp", "use_cache", "return_dict", "output_attentions"),
  *("output_hidden_states", "torchscript", "_attn_implementation_autoset"),
  *("use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward"),
  # How text is generated.
  *("bos_token_id", "eos_token_id", "pad_token_id", "do_sample"),
  *("temperature", "top_k", "top_p", "max_length"),
  # Keys of other tasks.
  *("id2label", "label2id", "problem_type", "finetuning_task"),
}
_TYPES = {bool: "true or false", int: "a whole number", float: "a number"}
_COPY = "copy the file again"
NOT_SUPPORTED = "other values are not supported yet"


def wrong(
  file: Path, key: str, rule: str, got: Any, remedy: str = _COPY
) -> ValueError:
  """Makes the error for a key whose value breaks `rule`."""
  return ValueError(
    f"load_hf: {file}: {key} must be {rule}, got {str(got)[:80]}; {remedy}"
  )


def choose(file: Path, key: str, value: Any, choices: Mapping[str, Any]) -> Any:
  """Translates a value; raises ValueError if it is not one of `choices`."""
  if isinstance(value, str) and value in choices:
    return choices[value]
  raise wrong(file, key, f"one of {', '.join(choices)}", value, NOT_SUPPORTED)


def typed(file: Path, key: str, value: Any, kind: type) -> Any:
  """Checks that a value is a bool, int or float; accepts an int as a float."""
  if type(value) is kind or (kind is float and type(value) is int):
    return kind(value)
  raise wrong(file, key, _TYPES[kind], value)


def check_known(file: Path, found: dict, known: set[str]) -> None:
  """Raises ValueError if a file has a key that is not known."""
  for key, value in found.items():
    if key in known:
      continue
    if key == "quantization_config":
      raise ValueError(
        f"load_hf: {file}: {key} means that another library quantized the "
        "weights; pass the original checkpoint in BF16, F16 or F32"
      )
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ValueError(
      f"load_hf: {file}: {key} is not supported, got {str(value)[:40]}; {meant}"
      "if it does not change what the model computes, delete it from a copy"
    )


def dtype_of(file: Path, found: dict) -> np.dtype:
  """Returns the tensors' dtype; raises ValueError if it is not supported."""
  names = [found[key] for key in DTYPE_KEYS if found.get(key) is not None]
  name = names[0] if names else "float32"
  if name not in ("float32", "bfloat16", "float16"):
    rule = "float32, bfloat16 or float16"
    raise wrong(file, "dtype", rule, name, "save the model in one of these")
  return np.dtype(jnp.dtype(name))
