# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint make which parameter, family by family.

A row names the tensors of one parameter, of one layer where layers are stacked,
and how they are laid out in it. Families whose tensors have other names, or are
fused otherwise, are other tables.
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
# Behind its blocks, where others have them in front.
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
# Of each product, and norm, the ends of both paths: kernel or scale, and bias.
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
# By the family's name; a model has those rows whose parameters it has.
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

# Old checkpoints hold what follows from the configuration: of Llama the
# frequencies of RoPE, of GPT-2 which keys queries see.
IGNORED_ENDS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# What the names of a checkpoint may lack in front, as those of GPT-2 that were
# published do.
PREFIXES = {"gpt2": "transformer."}


type AnyConfig = ModelConfig | VisionConfig | VisionLanguageConfig

# Of what is between a tower and a decoder.
_PROJECTOR = {
  f"linear_{i}/{own}": Row(layout, (f"linear_{i}.{end}",))
  for i in (1, 2)
  for own, end, layout in (
    ("kernel", "weight", TRANSPOSED),
    ("bias", "bias", SAME),
  )
}


class Section(NamedTuple):
  """A part of a model that has a table: all of it, if it is not of several.

  Attributes:
    path: in front of those of its parameters, "decoder/", or nothing.
    prefix: in front of its tensors' names.
    config: of the part; None where its table needs none.
  """

  path: str
  prefix: str
  config: ModelConfig | VisionConfig | None

  @property
  def table(self) -> dict[str, Row]:
    """Its rows, of which it has those whose parameters it has."""
    if self.config is None:
      return _PROJECTOR
    if isinstance(self.config, VisionConfig):
      return vision_table(self.config)
    return TENSORS[self.config.family]

  def params(self, params: Any) -> Any:
    """Its part of a model's parameters, nested dicts."""
    return params[self.path.rstrip("/")] if self.path else params


def sections(config: AnyConfig) -> tuple[Section, ...]:
  """The sections of a model."""
  if not isinstance(config, VisionLanguageConfig):
    return (Section("", "", config),)
  return (
    Section("tower/", "vision_tower.", config.vision),
    Section("projector/", "multi_modal_projector.", None),
    Section("decoder/", "language_model.", config.text),
  )


class Part(NamedTuple):
  """What of a model comes from one row: a parameter, or one layer of it.

  Attributes:
    path: the parameter's, `layers/mlp/gate_up/kernel`.
    layer: number of the layer; None of parameters that are not stacked.
    row: of the parameter.
    config: of the section, as layouts take it.
    tensors: name, and shape and dtype of the parameter's, of each tensor.
  """

  path: str
  layer: int | None
  row: Row
  config: ModelConfig | VisionConfig | None
  tensors: dict[str, jax.ShapeDtypeStruct]


def path_of(keys: Any) -> str:
  """Writes the keys that lead to a parameter as tables have them."""
  return jax.tree_util.keystr(keys, simple=True, separator="/")


def is_stacked(path: str) -> bool:
  """Whether a section's parameter has a leading axis of layers."""
  return path.startswith("layers/")


def parts(config: AnyConfig, params: Any) -> Iterator[Part]:
  """Yields what a model is made of, in the order of its layers.

  Args:
    config: the model's.
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
  """Shapes and dtypes of a row's tensors, from its parameter's in one layer."""
  one = jax.ShapeDtypeStruct(shape, dtype)
  return jax.eval_shape(lambda x: row.layout.unpack(config, x), one)
