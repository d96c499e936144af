# SPDX-License-Identifier: Apache-2.0
"""config.json of transformers to a `ModelConfig`, and back.

Each key of a file is one of three: a number or choice of the model; known to
have no effect on what it computes (`_WITHOUT_EFFECT`); or refused by name, for
a model that is read without it would be another one. A family is a row of
`CONFIGS`.

transformers 5 writes RoPE's base into `rope_parameters` and the dtype as
`dtype`; version 4 had `rope_theta`, `rope_scaling` and `torch_dtype`. Both are
read, and both are written where they do not exclude each other.
"""

import dataclasses
import difflib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from coat_jax.models.config import ModelConfig
from coat_jax.models.hf.files import check_folder, read_json
from coat_jax.models.hf.rope import read_rope, write_rope

CONFIG = "config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigRow:
  """How a family's config.json is read.

  Attributes:
    architecture: the class of transformers.
    fields: keys of this family alone that are fields of `ModelConfig`.
    fixed: keys of this family alone that have one value here. Where a file
      leaves them out they have it too, unless `defaults` has another one.
    defaults: what transformers takes where a key is left out, if that differs
      from the other families.
    ignored: keys without an effect, given those that are `fixed`.
  """

  architecture: str
  fields: dict[str, str] = dataclasses.field(default_factory=dict)
  fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
  defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
  ignored: tuple[str, ...] = ()


_RMS = {"rms_norm_eps": "norm_eps"}
_WINDOW = {"sliding_window": "window"}
_ONLY_FULL = {"layer_types": None}
CONFIGS = {
  "llama": ConfigRow(
    architecture="LlamaForCausalLM",
    fields=_RMS,
    fixed={"attention_bias": False, "mlp_bias": False},
  ),
  "mistral": ConfigRow(
    architecture="MistralForCausalLM",
    fields=_RMS | _WINDOW,
    fixed=_ONLY_FULL,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
  ),
  "phi3": ConfigRow(
    architecture="Phi3ForCausalLM",
    fields=_RMS | _WINDOW,
    fixed={"embd_pdrop": 0, "resid_pdrop": 0, "attention_bias": False},
    defaults={"rms_norm_eps": 1e-5},
    # The length that longrope, which is refused, stretches.
    ignored=("original_max_position_embeddings",),
  ),
  "olmo2": ConfigRow(
    architecture="Olmo2ForCausalLM",
    fields=_RMS,
    fixed={"attention_bias": False},
    defaults={"rms_norm_eps": 1e-5},
  ),
  "olmo": ConfigRow(
    architecture="OlmoForCausalLM",
    fields={"clip_qkv": "clip_qkv"},
    fixed={"attention_bias": False},
  ),
  "qwen3": ConfigRow(
    architecture="Qwen3ForCausalLM",
    fields=_RMS,
    fixed={"attention_bias": False, "use_sliding_window": False, **_ONLY_FULL},
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    ignored=("sliding_window", "max_window_layers"),
  ),
  "qwen2": ConfigRow(
    architecture="Qwen2ForCausalLM",
    fields=_RMS,
    fixed={"use_sliding_window": False, **_ONLY_FULL},
    defaults={"num_key_value_heads": 32},
    ignored=("sliding_window", "max_window_layers"),
  ),
}
# Keys of all families. Those of these alone that have a default may be absent.
_FIELDS = {
  "num_hidden_layers": "num_layers",
  "hidden_size": "d_model",
  "intermediate_size": "d_ff",
  "num_attention_heads": "num_heads",
  "num_key_value_heads": "num_kv_heads",
  "head_dim": "head_dim",
  "vocab_size": "vocab_size",
  "tie_word_embeddings": "tied_embeddings",
}
_DEFAULTS = {
  "num_key_value_heads": None,
  "head_dim": None,
  "tie_word_embeddings": False,
  "rms_norm_eps": 1e-6,
  "clip_qkv": None,
  "sliding_window": None,
}
_FIXED = {
  "hidden_act": "silu",
  "attention_dropout": 0,
  "is_encoder_decoder": False,
  "add_cross_attention": False,
}
_FLOATS = ("rms_norm_eps", "clip_qkv")
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
_DTYPE = ("dtype", "torch_dtype")
_WITHOUT_EFFECT = {
  # Where the file comes from.
  *("model_type", "architectures", "_name_or_path", "transformers_version"),
  # The longest text of its training; plain RoPE ends nowhere.
  "max_position_embeddings",
  # Of new random weights.
  "initializer_range",
  # How transformers computes it, or what its calls return.
  *("pretraining_tp", "use_cache", "return_dict", "output_attentions"),
  *("output_hidden_states", "torchscript", "_attn_implementation_autoset"),
  *("use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward"),
  # Of generated text.
  *("bos_token_id", "eos_token_id", "pad_token_id", "do_sample"),
  *("temperature", "top_k", "top_p", "max_length"),
  # Of other tasks.
  *("id2label", "label2id", "problem_type", "finetuning_task"),
}


def read_config(folder: Path) -> tuple[ModelConfig, np.dtype]:
  """Reads the config.json of a checkpoint.

  Args:
    folder: of the checkpoint.

  Returns:
    The model's shape, and the dtype that its tensors are said to have.

  Raises:
    ValueError: it is missing or damaged, or of a model that cannot be had here.
  """
  check_folder(folder)
  return parse_config(folder / CONFIG, read_json(folder / CONFIG))


def parse_config(file: Path, found: dict) -> tuple[ModelConfig, np.dtype]:
  """As `read_config`, of what the file holds; its name is for messages."""
  family = found.get("model_type")
  row = CONFIGS.get(family) if isinstance(family, str) else None
  if row is None or not isinstance(family, str):
    raise ValueError(
      f"load_hf: {file}: model_type must be one of {', '.join(CONFIGS)}, got "
      f"{str(family)[:40]}; other families cannot be read yet"
    )
  architectures = found.get("architectures") or [row.architecture]
  if architectures != [row.architecture]:
    raise ValueError(
      f"load_hf: {file}: architectures must be [{row.architecture}], got "
      f"{str(architectures)[:80]}; only language models can be read"
    )
  fixed, defaults = _FIXED | row.fixed, _DEFAULTS | row.defaults
  fields = _FIELDS | row.fields
  known = {*fields, *fixed, *row.ignored, *_ROPE, *_DTYPE, *_WITHOUT_EFFECT}
  for key, value in found.items():
    if key not in known:
      raise _refusal(file, key, value, known)
  for key, value in fixed.items():
    got = found.get(key, defaults.get(key, value))
    if got != value and not _is_all_full(key, got):
      raise ValueError(
        f"load_hf: {file}: {key} must be {value}, got {str(got)[:80]}; "
        f"a {family} with another one cannot be had here yet"
      )
  missing = [key for key in fields if key not in {**defaults, **found}]
  if missing:
    raise ValueError(
      f"load_hf: {file} must have {', '.join(missing)}; copy the file again"
    )
  values = {
    field: _number(file, key, found.get(key, defaults.get(key)))
    for key, field in fields.items()
  }
  values |= read_rope(file, found)
  return _model_config(file, family, values), _dtype(file, found)


def _number(file: Path, key: str, value: Any) -> Any:
  """Checks the kind of a value; `ModelConfig` checks its range."""
  is_choice = key == "tie_word_embeddings"
  allowed = (bool,) if is_choice else (int, float, type(None))
  if type(value) in allowed:
    return float(value) if key in _FLOATS and value is not None else value
  kind = "true or false" if is_choice else "a number"
  raise ValueError(
    f"load_hf: {file}: {key} must be {kind}, got {str(value)[:40]}; copy the "
    "file again"
  )


def _model_config(
  file: Path, family: str, values: dict[str, Any]
) -> ModelConfig:
  if values["num_kv_heads"] is None:
    values["num_kv_heads"] = values["num_heads"]
  try:
    config = ModelConfig(family=family, **values)
  except ValueError as error:
    raise ValueError(f"load_hf: {file}: {error}") from error
  if config.head_dim == config.d_model / config.num_heads:
    return dataclasses.replace(config, head_dim=None)  # One way to say it.
  return config


def _refusal(file: Path, key: str, value: Any, known: set) -> ValueError:
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


def _is_all_full(key: str, value: Any) -> bool:
  """Whether all layers are said to attend to everything."""
  return (
    key == "layer_types"
    and isinstance(value, list)
    and all(each == "full_attention" for each in value)
  )


def _dtype(file: Path, found: dict) -> np.dtype:
  names = [found[key] for key in _DTYPE if found.get(key) is not None]
  name = names[0] if names else "float32"
  if name not in ("float32", "bfloat16", "float16"):
    raise ValueError(
      f"load_hf: {file}: dtype must be float32, bfloat16 or float16, got "
      f"{str(name)[:40]}; save the model in one of these"
    )
  return np.dtype(jnp.dtype(name))


def write_config(
  config: ModelConfig, dtype: np.dtype, like: dict | None = None
) -> dict:
  """Writes the config.json of a model.

  Args:
    config: the model's shape.
    dtype: of its tensors.
    like: a config.json of the same shape, whose other keys are kept.

  Returns:
    What the file holds; transformers 4 and 5 read it alike.

  Raises:
    ValueError: the family's models of transformers have no such shape.
  """
  row = CONFIGS[config.family]
  fixed = _FIXED | row.fixed
  found = {
    "model_type": config.family,
    "architectures": [row.architecture],
    # Those that transformers takes for something else where they are absent.
    **{
      key: fixed[key] for key in ("hidden_act", *row.defaults) if key in fixed
    },
    **(like or {}),
  }
  for key, field in (_FIELDS | row.fields).items():
    value = getattr(config, field)
    if value is not None or key in row.fields:
      found[key] = value
  if "head_dim" in row.defaults:  # Else it would be another one.
    found["head_dim"] = config.head_width
  if config.scaling is None:
    found.pop("rope_scaling", None)
  found |= write_rope(config.rope_theta, config.scaling)
  found |= dict.fromkeys(_DTYPE, dtype.name)
  written, _ = parse_config(Path(CONFIG), found)
  before = dataclasses.asdict(config)
  for name, value in dataclasses.asdict(written).items():
    if value != before[name]:
      raise ValueError(
        f"save_hf: a {config.family} of transformers has {name} {value}, got "
        f"{before[name]}; it has no key for another one"
      )
  return found
