# SPDX-License-Identifier: Apache-2.0
"""Maps each family's parameters to tensor names of Hugging Face checkpoints.

Each row of a family's table lists the tensors that make up one parameter, or
one layer of a stacked parameter. Rows of parameters that a model lacks are not
used.
"""

from collections.abc import Callable, Mapping
from typing import Any

from coat_jax.models.hf.layouts import Row, kernel, plain
from coat_jax.models.vision.config import VisionConfig

type Table = dict[str, Row]

_QKV = "layers/attention/qkv"


def rows(
  products: Mapping[str, str | tuple[str, ...]],
  norms: Mapping[str, str],
  *,
  is_transposed: bool = True,
) -> Table:
  """Returns the rows of kernels, norms and their biases.

  Each path is mapped to the prefix of its tensors' names, or to several
  prefixes if a linear layer fuses several tensors. `is_transposed` means
  [outputs, inputs].
  """
  found = {}
  for path, names in products.items():
    names = (names,) if isinstance(names, str) else names
    weights = tuple(f"{name}.weight" for name in names)
    found[f"{path}/kernel"] = Row(weights, is_transposed)
    found[f"{path}/bias"] = plain(*(f"{name}.bias" for name in names))
  for path, name in norms.items():
    found[f"{path}/scale"] = plain(f"{name}.weight")
    found[f"{path}/bias"] = plain(f"{name}.bias")
  return found


_LAYER = "model.layers.{i}."
_LLAMA = {
  "embedding": plain("model.embed_tokens.weight"),
  **rows(
    {
      f"{_QKV}/linear": tuple(f"{_LAYER}self_attn.{x}_proj" for x in "qkv"),
      "layers/attention/out": _LAYER + "self_attn.o_proj",
      "layers/mlp/gate_up": (_LAYER + "mlp.gate_proj", _LAYER + "mlp.up_proj"),
      "layers/mlp/down": _LAYER + "mlp.down_proj",
    },
    {
      f"{_QKV}/norm": _LAYER + "input_layernorm",
      "layers/mlp/norm": _LAYER + "post_attention_layernorm",
      "norm": "model.norm",
    },
  ),
  "head": kernel("lm_head.weight"),
}
_NORMS_OF_QK = rows(
  {},
  {f"layers/attention/{x}_norm": f"{_LAYER}self_attn.{x}_norm" for x in "qk"},
)
# OLMo 2 has norms after its blocks, and Gemma before and after.
_POST_NORMS = rows(
  {},
  {
    "layers/attention/post_norm": _LAYER + "post_attention_layernorm",
    "layers/mlp/post_norm": _LAYER + "post_feedforward_layernorm",
  },
)
_GEMMA = (
  _LLAMA
  | _POST_NORMS
  | rows({}, {"layers/mlp/norm": _LAYER + "pre_feedforward_layernorm"})
)
_PHI = _LLAMA | rows(
  {
    f"{_QKV}/linear": _LAYER + "self_attn.qkv_proj",
    "layers/mlp/gate_up": _LAYER + "mlp.gate_up_proj",
  },
  {},
)
_BLOCK = "transformer.h.{i}."
# GPT-2's kernels are [inputs, outputs], like ours.
_GPT2 = {
  "embedding": plain("transformer.wte.weight"),
  "position_embedding": plain("transformer.wpe.weight"),
  **rows(
    {
      f"{_QKV}/linear": _BLOCK + "attn.c_attn",
      "layers/attention/out": _BLOCK + "attn.c_proj",
      "layers/mlp/up": _BLOCK + "mlp.c_fc",
      "layers/mlp/down": _BLOCK + "mlp.c_proj",
    },
    {
      f"{_QKV}/norm": _BLOCK + "ln_1",
      "layers/mlp/norm": _BLOCK + "ln_2",
      "norm": "transformer.ln_f",
    },
    is_transposed=False,
  ),
  "head": kernel("lm_head.weight"),
}
_EXPERT = _LAYER + "mlp.experts.{e}."
_MOE = _LLAMA | {
  "layers/mlp/router": kernel(_LAYER + "mlp.gate.weight"),
  "layers/mlp/gate_up": kernel(
    _EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"
  ),
  "layers/mlp/down": kernel(_EXPERT + "down_proj.weight"),
}
# The projector between LLaVA's tower and decoder.
PROJECTOR = rows({name: name for name in ("linear_1", "linear_2")}, {})


def _patches(config: VisionConfig, name: str) -> Table:
  """Returns the rows of the convolution that projects patches."""
  sides = config.patch_size, config.patch_size
  shape = (config.d_model, config.num_channels, *sides)
  return {
    "patches/linear/kernel": Row((f"{name}.weight",), True, shape),
    "patches/linear/bias": plain(f"{name}.bias"),
  }


def _clip(config: VisionConfig) -> Table:
  """Returns the rows of CLIP and SigLIP, which share most names."""
  layer = "encoder.layers.{i}."
  return {
    "patches/class_embed": plain("embeddings.class_embedding"),
    **_patches(config, "embeddings.patch_embedding"),
    "patches/position_embed": plain("embeddings.position_embedding.weight"),
    **rows(
      {
        f"{_QKV}/linear": tuple(f"{layer}self_attn.{x}_proj" for x in "qkv"),
        "layers/attention/out": layer + "self_attn.out_proj",
        "layers/mlp/up": layer + "mlp.fc1",
        "layers/mlp/down": layer + "mlp.fc2",
        "pool/out": "head.attention.out_proj",
        "pool/mlp/up": "head.mlp.fc1",
        "pool/mlp/down": "head.mlp.fc2",
      },
      {
        f"{_QKV}/norm": layer + "layer_norm1",
        "layers/mlp/norm": layer + "layer_norm2",
        "pre_norm": "pre_layrnorm",  # Misspelled in transformers.
        "norm": "post_layernorm",
        "pool/mlp/norm": "head.layernorm",
      },
    ),
    "pool/probe": Row(("head.probe",), shape=(1, 1, config.d_model)),
    "pool/qkv/kernel": kernel("head.attention.in_proj_weight"),
    "pool/qkv/bias": plain("head.attention.in_proj_bias"),
  }


def _vit(config: VisionConfig) -> Table:
  """Returns ViT's rows; in classifiers, only the head's names lack `vit.`."""
  start, pool = "vit.", "classifier"
  if config.num_classes is None:
    start, pool = "", "pooler.dense"
  layer, one = start + "encoder.layer.{i}.", (1, 1, config.d_model)
  attention = layer + "attention."
  qkv = (f"{attention}attention.{x}" for x in ("query", "key", "value"))
  places, embeddings = (
    (1, config.num_tokens, config.d_model),
    start + "embeddings.",
  )
  return {
    "patches/class_embed": Row((embeddings + "cls_token",), shape=one),
    **_patches(config, embeddings + "patch_embeddings.projection"),
    "patches/position_embed": Row(
      (embeddings + "position_embeddings",), shape=places
    ),
    **rows(
      {
        f"{_QKV}/linear": tuple(qkv),
        "layers/attention/out": attention + "output.dense",
        "layers/mlp/up": layer + "intermediate.dense",
        "layers/mlp/down": layer + "output.dense",
        "pool/linear": pool,
      },
      {
        f"{_QKV}/norm": layer + "layernorm_before",
        "layers/mlp/norm": layer + "layernorm_after",
        "norm": start + "layernorm",
      },
    ),
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
  "clip_vision": _clip,
  "siglip_vision": _clip,
}
# Prefixes that some checkpoints use and others omit. Published GPT-2 and ViT
# files come in both forms. CLIP files use the prefix if transformers 4 wrote
# them, or if they contain the text model.
PREFIXES = {
  "gpt2": "transformer.",
  "vit": "vit.",
  "clip_vision": "vision_model.",
  "siglip_vision": "vision_model.",
}
# Buffers in old checkpoints that the configuration determines: Llama's RoPE
# frequencies, and GPT-2's causal masks.
IGNORED_ENDS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
