# SPDX-License-Identifier: Apache-2.0
"""Maps each family's parameters to tensor names of Hugging Face checkpoints.

A table has two kinds of keys:

  - a module, such as `layers/mlp/down`: the value is a tensor's name without
    the ending `.weight` or `.bias`
  - a parameter, such as `embedding`: the value is the full name of its tensor

If a parameter combines several tensors, the value is a tuple of names. `{i}`
stands for the index of the layer, and `{e}` for the index of the expert. A
model need not use all entries of its table.
"""

from collections.abc import Callable
from typing import Any

from coat_jax.models.vision.config import VisionConfig

type Table = dict[str, str | tuple[str, ...]]

_QKV = "layers/attention/qkv"
_LAYER = "model.layers.{i}."
_LLAMA: Table = {
  "embedding": "model.embed_tokens.weight",
  f"{_QKV}/norm": _LAYER + "input_layernorm",
  f"{_QKV}/linear": tuple(f"{_LAYER}self_attn.{x}_proj" for x in "qkv"),
  "layers/attention/out": _LAYER + "self_attn.o_proj",
  "layers/mlp/norm": _LAYER + "post_attention_layernorm",
  "layers/mlp/gate_up": (_LAYER + "mlp.gate_proj", _LAYER + "mlp.up_proj"),
  "layers/mlp/down": _LAYER + "mlp.down_proj",
  "norm": "model.norm",
  "head": "lm_head.weight",
}
_NORMS_OF_QK: Table = {
  f"layers/attention/{x}_norm": f"{_LAYER}self_attn.{x}_norm" for x in "qk"
}
# OLMo 2 has norms only after attention and the MLP, Gemma before and after.
_POST_NORMS: Table = {
  "layers/attention/post_norm": _LAYER + "post_attention_layernorm",
  "layers/mlp/post_norm": _LAYER + "post_feedforward_layernorm",
}
_GEMMA = (
  _LLAMA
  | _POST_NORMS
  | {"layers/mlp/norm": _LAYER + "pre_feedforward_layernorm"}
)
_PHI = _LLAMA | {
  f"{_QKV}/linear": _LAYER + "self_attn.qkv_proj",
  "layers/mlp/gate_up": _LAYER + "mlp.gate_up_proj",
}
_BLOCK = "transformer.h.{i}."
_GPT2: Table = {
  "embedding": "transformer.wte.weight",
  "position_embedding": "transformer.wpe.weight",
  f"{_QKV}/norm": _BLOCK + "ln_1",
  f"{_QKV}/linear": _BLOCK + "attn.c_attn",
  "layers/attention/out": _BLOCK + "attn.c_proj",
  "layers/mlp/norm": _BLOCK + "ln_2",
  "layers/mlp/up": _BLOCK + "mlp.c_fc",
  "layers/mlp/down": _BLOCK + "mlp.c_proj",
  "norm": "transformer.ln_f",
  "head": "lm_head.weight",
}
_EXPERT = _LAYER + "mlp.experts.{e}."
_MOE = _LLAMA | {
  "layers/mlp/router": _LAYER + "mlp.gate.weight",
  "layers/mlp/gate_up": (
    _EXPERT + "gate_proj.weight",
    _EXPERT + "up_proj.weight",
  ),
  "layers/mlp/down": _EXPERT + "down_proj.weight",
}
# The projector between LLaVA's tower and decoder.
PROJECTOR: Table = {name: name for name in ("linear_1", "linear_2")}
# CLIP and SigLIP share most names.
_ENCODER = "encoder.layers.{i}."
_CLIP: Table = {
  "patches/class_embed": "embeddings.class_embedding",
  "patches/linear": "embeddings.patch_embedding",
  "patches/position_embed": "embeddings.position_embedding.weight",
  "pre_norm": "pre_layrnorm",  # Misspelled in transformers.
  f"{_QKV}/norm": _ENCODER + "layer_norm1",
  f"{_QKV}/linear": tuple(f"{_ENCODER}self_attn.{x}_proj" for x in "qkv"),
  "layers/attention/out": _ENCODER + "self_attn.out_proj",
  "layers/mlp/norm": _ENCODER + "layer_norm2",
  "layers/mlp/up": _ENCODER + "mlp.fc1",
  "layers/mlp/down": _ENCODER + "mlp.fc2",
  "norm": "post_layernorm",
  "pool/probe": "head.probe",
  "pool/qkv/kernel": "head.attention.in_proj_weight",
  "pool/qkv/bias": "head.attention.in_proj_bias",
  "pool/out": "head.attention.out_proj",
  "pool/mlp/norm": "head.layernorm",
  "pool/mlp/up": "head.mlp.fc1",
  "pool/mlp/down": "head.mlp.fc2",
}


def _vit(config: VisionConfig) -> Table:
  """Returns ViT's table; classifiers add `vit.` to all names but the head's."""
  start, pool = "vit.", "classifier"
  if config.num_classes is None:
    start, pool = "", "pooler.dense"
  layer = start + "encoder.layer.{i}."
  qkv = (f"{layer}attention.attention.{x}" for x in ("query", "key", "value"))
  return {
    "patches/class_embed": start + "embeddings.cls_token",
    "patches/linear": start + "embeddings.patch_embeddings.projection",
    "patches/position_embed": start + "embeddings.position_embeddings",
    f"{_QKV}/norm": layer + "layernorm_before",
    f"{_QKV}/linear": tuple(qkv),
    "layers/attention/out": layer + "attention.output.dense",
    "layers/mlp/norm": layer + "layernorm_after",
    "layers/mlp/up": layer + "intermediate.dense",
    "layers/mlp/down": layer + "output.dense",
    "norm": start + "layernorm",
    "pool/linear": pool,
  }


# Maps each family to its table, or to a function that makes it for a config.
TENSORS: dict[str, Table | Callable[[Any], Table]] = {
  "llama": _LLAMA,
  "olmo": _LLAMA,
  "qwen2": _LLAMA,
  "mistral": _LLAMA,
  "qwen3": _LLAMA | _NORMS_OF_QK,
  "olmo2": _LLAMA | _POST_NORMS | _NORMS_OF_QK,
  "phi3": _PHI,
  "gemma2": _GEMMA,
  "gemma3_text": _GEMMA | _NORMS_OF_QK,
  "gpt2": _GPT2,
  "qwen3_moe": _MOE | _NORMS_OF_QK,
  "vit": _vit,
  "clip_vision": _CLIP,
  "siglip_vision": _CLIP,
}
# Families whose checkpoints store weights as [inputs, outputs], as we do. All
# others store [outputs, inputs].
INPUTS_FIRST = {"gpt2"}
# Shapes of tensors that have more axes than their parameters. A string names an
# attribute of the configuration.
type Shapes = dict[str, tuple[int | str, ...]]
_IMAGE = ("d_model", "num_channels", "patch_size", "patch_size")
_PATCHES: Shapes = {"patches/linear/kernel": _IMAGE}
SHAPES: dict[str, Shapes] = {
  "vit": {
    **_PATCHES,
    "patches/class_embed": (1, 1, "d_model"),
    "patches/position_embed": (1, "num_tokens", "d_model"),
  },
  "clip_vision": _PATCHES,
  "siglip_vision": {**_PATCHES, "pool/probe": (1, 1, "d_model")},
}
# Prefixes that some checkpoints add to tensor names and others omit. Published
# GPT-2 and ViT files exist with and without the prefix. CLIP files have the
# prefix if transformers 4 wrote them, or if they contain the text model.
PREFIXES = {
  "gpt2": "transformer.",
  "vit": "vit.",
  "clip_vision": "vision_model.",
  "siglip_vision": "vision_model.",
}
# Endings of the names of buffers in old checkpoints: Llama's RoPE frequencies
# and GPT-2's causal masks, which follow from the configuration.
IGNORED_ENDS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
