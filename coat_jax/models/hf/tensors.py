# SPDX-License-Identifier: Apache-2.0
"""Maps the tensors of a checkpoint to parameters, family by family.

A row names the tensors of one parameter (of one layer, if layers are stacked)
and how they are laid out in it. Families whose tensors have other names, or are
fused differently, have their own tables.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from coat_jax.models.config import ModelConfig
from coat_jax.models.hf.layouts import (
  EXPERTS_GATE_UP,
  EXPERTS_TRANSPOSED,
  GATE_UP,
  GATE_UP_OF_PHI,
  QKV,
  QKV_OF_GPT2,
  QKV_OF_PHI,
  SAME,
  TRANSPOSED,
  Row,
)
from coat_jax.models.hf.vision_tensors import vision_table
from coat_jax.models.vision import VisionConfig
from coat_jax.models.vision_language import VisionLanguageConfig

_LAYER = "model.layers.{i}."
_LLAMA = {
  "embedding": Row(SAME, ("model.embed_tokens.weight",)),
  "layers/attention/qkv/norm/scale": Row(
    SAME, (_LAYER + "input_layernorm.weight",)
  ),
  "layers/attention/qkv/linear/kernel": Row(
    QKV, tuple(f"{_LAYER}self_attn.{x}_proj.weight" for x in "qkv")
  ),
  "layers/attention/qkv/linear/bias": Row(
    QKV, tuple(f"{_LAYER}self_attn.{x}_proj.bias" for x in "qkv")
  ),
  "layers/attention/out/kernel": Row(
    TRANSPOSED, (_LAYER + "self_attn.o_proj.weight",)
  ),
  "layers/mlp/norm/scale": Row(
    SAME, (_LAYER + "post_attention_layernorm.weight",)
  ),
  "layers/mlp/gate_up/kernel": Row(
    GATE_UP, tuple(f"{_LAYER}mlp.{x}_proj.weight" for x in ("gate", "up"))
  ),
  "layers/mlp/down/kernel": Row(TRANSPOSED, (_LAYER + "mlp.down_proj.weight",)),
  "norm/scale": Row(SAME, ("model.norm.weight",)),
  "head": Row(TRANSPOSED, ("lm_head.weight",)),
}
_NORMS_OF_QK = {
  f"layers/attention/{x}_norm/scale": Row(
    SAME, (f"{_LAYER}self_attn.{x}_norm.weight",)
  )
  for x in "qk"
}
# OLMo 2 has norms after its blocks; other families have them before.
_OLMO2 = {
  path: row for path, row in _LLAMA.items() if not path.endswith("/norm/scale")
} | {
  "layers/attention/post_norm/scale": Row(
    SAME, (_LAYER + "post_attention_layernorm.weight",)
  ),
  "layers/mlp/post_norm/scale": Row(
    SAME, (_LAYER + "post_feedforward_layernorm.weight",)
  ),
  "norm/scale": _LLAMA["norm/scale"],
}
_PHI = _LLAMA | {
  "layers/attention/qkv/linear/kernel": Row(
    QKV_OF_PHI, (_LAYER + "self_attn.qkv_proj.weight",)
  ),
  "layers/mlp/gate_up/kernel": Row(
    GATE_UP_OF_PHI, (_LAYER + "mlp.gate_up_proj.weight",)
  ),
}
_GEMMA = _LLAMA | {
  "layers/attention/post_norm/scale": Row(
    SAME, (_LAYER + "post_attention_layernorm.weight",)
  ),
  "layers/mlp/norm/scale": Row(
    SAME, (_LAYER + "pre_feedforward_layernorm.weight",)
  ),
  "layers/mlp/post_norm/scale": Row(
    SAME, (_LAYER + "post_feedforward_layernorm.weight",)
  ),
}
_GPT2_LAYER = "transformer.h.{i}."
# The last parts of both names: kernel or scale, and bias, per product and norm.
_GPT2 = {
  "embedding": Row(SAME, ("transformer.wte.weight",)),
  "position_embedding": Row(SAME, ("transformer.wpe.weight",)),
  **{
    f"{path}/{own}": Row(layout, (f"{name}.{end}",))
    for path, name, layout, weight in (
      ("layers/attention/qkv/norm", _GPT2_LAYER + "ln_1", SAME, "scale"),
      (
        "layers/attention/qkv/linear",
        _GPT2_LAYER + "attn.c_attn",
        QKV_OF_GPT2,
        "kernel",
      ),
      ("layers/attention/out", _GPT2_LAYER + "attn.c_proj", SAME, "kernel"),
      ("layers/mlp/norm", _GPT2_LAYER + "ln_2", SAME, "scale"),
      ("layers/mlp/up", _GPT2_LAYER + "mlp.c_fc", SAME, "kernel"),
      ("layers/mlp/down", _GPT2_LAYER + "mlp.c_proj", SAME, "kernel"),
      ("norm", "transformer.ln_f", SAME, "scale"),
    )
    for own, end in ((weight, "weight"), ("bias", "bias"))
  },
  "head": _LLAMA["head"],
}
_EXPERTS = _LAYER + "mlp.experts.{e}."
_MOE = _LLAMA | {
  "layers/mlp/router": Row(TRANSPOSED, (_LAYER + "mlp.gate.weight",)),
  "layers/mlp/gate_up": Row(
    EXPERTS_GATE_UP,
    tuple(f"{_EXPERTS}{x}_proj.weight" for x in ("gate", "up")),
  ),
  "layers/mlp/down": Row(EXPERTS_TRANSPOSED, (_EXPERTS + "down_proj.weight",)),
}
# By the family's name; a model uses the rows of the parameters that it has.
TENSORS: dict[str, dict[str, Row]] = {
  "llama": _LLAMA,
  "olmo": _LLAMA,
  "qwen2": _LLAMA,
  "mistral": _LLAMA,
  "qwen3": _LLAMA | _NORMS_OF_QK,
  "olmo2": _OLMO2 | _NORMS_OF_QK,
  "phi3": _PHI,
  "gemma2": _GEMMA,
  "gemma3_text": _GEMMA | _NORMS_OF_QK,
  "gpt2": _GPT2,
  "qwen3_moe": _MOE | _NORMS_OF_QK,
}

# Old checkpoints also store buffers that follow from the configuration: Llama's
# RoPE frequencies, and GPT-2's causal masks.
IGNORED_ENDS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# A prefix that the names in a checkpoint may lack, as in GPT-2's published
# checkpoints.
PREFIXES = {"gpt2": "transformer."}


type AnyConfig = ModelConfig | VisionConfig | VisionLanguageConfig

# The rows of the projector between a tower and a decoder.
_PROJECTOR = {
  f"linear_{i}/{own}": Row(layout, (f"linear_{i}.{end}",))
  for i in (1, 2)
  for own, end, layout in (
    ("kernel", "weight", TRANSPOSED),
    ("bias", "bias", SAME),
  )
}


class Section(NamedTuple):
  """A part of a model that has its own table; most models are a single section.

  Attributes:
    path: prefix of its parameters' paths, such as "decoder/", or empty.
    prefix: prefix of its tensors' names.
    config: the section's configuration; None if its table needs none.
  """

  path: str
  prefix: str
  config: ModelConfig | VisionConfig | None

  @property
  def table(self) -> dict[str, Row]:
    """The section's rows; it uses those whose parameters it has."""
    if self.config is None:
      return _PROJECTOR
    if isinstance(self.config, VisionConfig):
      return vision_table(self.config)
    return TENSORS[self.config.family]

  def params(self, params: Any) -> Any:
    """Returns the section's part of a model's parameters, as nested dicts."""
    return params[self.path.rstrip("/")] if self.path else params


def sections(config: AnyConfig) -> tuple[Section, ...]:
  """Returns the sections of a model."""
  if not isinstance(config, VisionLanguageConfig):
    return (Section("", "", config),)
  return (
    Section("tower/", "vision_tower.", config.vision),
    Section("projector/", "multi_modal_projector.", None),
    Section("decoder/", "language_model.", config.text),
  )


class Part(NamedTuple):
  """A parameter, or one layer of it, that is made from one row's tensors.

  Attributes:
    path: the parameter's path, such as `layers/mlp/gate_up/kernel`.
    layer: index of the layer; None for parameters that are not stacked.
    row: the parameter's row.
    config: the section's configuration, as layouts take it.
    tensors: for each tensor its name, shape, and the parameter's dtype.
  """

  path: str
  layer: int | None
  row: Row
  config: ModelConfig | VisionConfig | None
  tensors: dict[str, jax.ShapeDtypeStruct]


def path_of(keys: Any) -> str:
  """Writes the keys that lead to a parameter as a path, as tables have it."""
  return jax.tree_util.keystr(keys, simple=True, separator="/")


def is_stacked(path: str) -> bool:
  """Tells whether a section's parameter has a leading axis of layers."""
  return path.startswith("layers/")


def parts(config: AnyConfig, params: Any) -> Iterator[Part]:
  """Yields the parts of a model in the order of its layers.

  Args:
    config: the model's configuration.
    params: its parameters, nested dicts of arrays or `jax.ShapeDtypeStruct`.
  """
  for section in sections(config):
    yield from _parts(section, section.params(params))


def _parts(section: Section, params: Any) -> Iterator[Part]:
  config, table = section.config, section.table
  leaves = {path_of(keys): x for keys, x in jax.tree.leaves_with_path(params)}
  assert leaves.keys() <= table.keys(), leaves.keys() - table.keys()
  tensors = {
    path: _shapes(config, table[path], x.shape[is_stacked(path) :], x.dtype)
    for path, x in leaves.items()
  }

  def part(path: str, layer: int | None = None) -> Part:
    names = table[path].of_layer(config, layer or 0)
    names = [section.prefix + name for name in names]
    named = dict(zip(names, tensors[path], strict=True))
    return Part(section.path + path, layer, table[path], config, named)

  stacked = [path for path in table if path in leaves and is_stacked(path)]
  if "embedding" in leaves:
    yield part("embedding")
  for i in range(config.num_layers if config else 0):
    yield from (part(path, i) for path in stacked)
  for path in table:
    if path in leaves and path not in stacked and path != "embedding":
      yield part(path)


def _shapes(config: Any, row: Row, shape, dtype) -> tuple:
  """Returns shapes and dtypes of a row's tensors from one layer's parameter."""
  one = jax.ShapeDtypeStruct(shape, dtype)
  return jax.eval_shape(lambda x: row.layout.unpack(config, x), one)
