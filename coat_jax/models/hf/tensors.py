# SPDX-License-Identifier: Apache-2.0
"""Maps the tensors of a checkpoint to parameters, family by family.

Families whose tensors have other names, or are fused differently, have their
own tables.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from coat_jax.models.config import ModelConfig
from coat_jax.models.hf.config import AnyConfig
from coat_jax.models.hf.layouts import Row, kernel, plain
from coat_jax.models.hf.vision_tensors import vision_table
from coat_jax.models.params import is_stacked, matrix_split, path_of
from coat_jax.models.vision.config import VisionConfig
from coat_jax.models.vision_language import VisionLanguageConfig
from coat_jax.optimizer.matrices import MatrixSplit

_LAYER = "model.layers.{i}."
_QKV = "layers/attention/qkv/"
_POST_ATTENTION = _LAYER + "post_attention_layernorm.weight"
_POST_MLP = _LAYER + "post_feedforward_layernorm.weight"
_LLAMA = {
  "embedding": plain("model.embed_tokens.weight"),
  _QKV + "norm/scale": plain(_LAYER + "input_layernorm.weight"),
  _QKV + "linear/kernel": kernel(
    *(f"{_LAYER}self_attn.{x}_proj.weight" for x in "qkv")
  ),
  _QKV + "linear/bias": plain(
    *(f"{_LAYER}self_attn.{x}_proj.bias" for x in "qkv")
  ),
  "layers/attention/out/kernel": kernel(_LAYER + "self_attn.o_proj.weight"),
  "layers/mlp/norm/scale": plain(_POST_ATTENTION),
  "layers/mlp/gate_up/kernel": kernel(
    *(f"{_LAYER}mlp.{x}_proj.weight" for x in ("gate", "up"))
  ),
  "layers/mlp/down/kernel": kernel(_LAYER + "mlp.down_proj.weight"),
  "norm/scale": plain("model.norm.weight"),
  "head": kernel("lm_head.weight"),
}
_NORMS_OF_QK = {
  f"layers/attention/{x}_norm/scale": plain(
    f"{_LAYER}self_attn.{x}_norm.weight"
  )
  for x in "qk"
}
# OLMo 2 has norms after its blocks; other families have them before.
_OLMO2 = {
  path: row for path, row in _LLAMA.items() if not path.endswith("/norm/scale")
} | {
  "layers/attention/post_norm/scale": plain(_POST_ATTENTION),
  "layers/mlp/post_norm/scale": plain(_POST_MLP),
  "norm/scale": _LLAMA["norm/scale"],
}
_PHI = _LLAMA | {
  _QKV + "linear/kernel": kernel(_LAYER + "self_attn.qkv_proj.weight"),
  "layers/mlp/gate_up/kernel": kernel(_LAYER + "mlp.gate_up_proj.weight"),
}
_GEMMA = _LLAMA | {
  "layers/attention/post_norm/scale": plain(_POST_ATTENTION),
  "layers/mlp/norm/scale": plain(_LAYER + "pre_feedforward_layernorm.weight"),
  "layers/mlp/post_norm/scale": plain(_POST_MLP),
}
_GPT2_LAYER = "transformer.h.{i}."
# GPT-2's kernels are [inputs, outputs], like ours.
_GPT2 = {
  "embedding": plain("transformer.wte.weight"),
  "position_embedding": plain("transformer.wpe.weight"),
  **{
    f"{path}/{own}": plain(f"{name}.{end}")
    for path, name, weight in (
      (_QKV + "norm", _GPT2_LAYER + "ln_1", "scale"),
      (_QKV + "linear", _GPT2_LAYER + "attn.c_attn", "kernel"),
      ("layers/attention/out", _GPT2_LAYER + "attn.c_proj", "kernel"),
      ("layers/mlp/norm", _GPT2_LAYER + "ln_2", "scale"),
      ("layers/mlp/up", _GPT2_LAYER + "mlp.c_fc", "kernel"),
      ("layers/mlp/down", _GPT2_LAYER + "mlp.c_proj", "kernel"),
      ("norm", "transformer.ln_f", "scale"),
    )
    for own, end in ((weight, "weight"), ("bias", "bias"))
  },
  "head": _LLAMA["head"],
}
_EXPERTS = _LAYER + "mlp.experts.{e}."
_MOE = _LLAMA | {
  "layers/mlp/router": kernel(_LAYER + "mlp.gate.weight"),
  "layers/mlp/gate_up": kernel(
    *(f"{_EXPERTS}{x}_proj.weight" for x in ("gate", "up"))
  ),
  "layers/mlp/down": kernel(_EXPERTS + "down_proj.weight"),
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


# The rows of the projector between a tower and a decoder.
_PROJECTOR = {
  f"linear_{i}/{own}": row(f"linear_{i}.{end}")
  for i in (1, 2)
  for own, end, row in (("kernel", "weight", kernel), ("bias", "bias", plain))
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

  def split(self, path: str) -> MatrixSplit | None:
    """Returns how a parameter of the section is cut into matrices."""
    return matrix_split(self.path + path, self.config)

  def names(self, path: str, layer: int) -> list[str]:
    """Lists the names of the tensors of one layer's parameter."""
    experts = getattr(self.config, "num_experts", None)
    names = self.table[path].of_layer(layer, experts)
    return [self.prefix + name for name in names]

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
    split: how it is cut into matrices.
    tensors: for each tensor its name, shape, and the parameter's dtype.
  """

  path: str
  layer: int | None
  row: Row
  split: MatrixSplit | None
  tensors: dict[str, jax.ShapeDtypeStruct]


def parts(config: AnyConfig, params: Any) -> Iterator[Part]:
  """Yields the parts of a model, its parameters given, layer by layer."""
  for section in sections(config):
    yield from _parts(section, section.params(params))


def _parts(section: Section, params: Any) -> Iterator[Part]:
  table = section.table
  leaves = {path_of(keys): x for keys, x in jax.tree.leaves_with_path(params)}
  assert leaves.keys() <= table.keys(), leaves.keys() - table.keys()
  found = {}
  for path, x in leaves.items():
    one = jax.ShapeDtypeStruct(x.shape[is_stacked(path) :], x.dtype)
    split = section.split(path)
    tensors = jax.eval_shape(lambda x: table[path].unpack(x, split), one)  # noqa: B023
    found[path] = split, tensors

  def part(path: str, layer: int | None = None) -> Part:
    split, tensors = found[path]
    names = section.names(path, layer or 0)
    named = dict(zip(names, tensors, strict=True))
    return Part(section.path + path, layer, table[path], split, named)

  stacked = [path for path in table if path in leaves and is_stacked(path)]
  if "embedding" in leaves:
    yield part("embedding")
  for i in range(section.config.num_layers if section.config else 0):
    yield from (part(path, i) for path in stacked)
  for path in table:
    if path in leaves and path not in stacked and path != "embedding":
      yield part(path)
