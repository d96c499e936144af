# SPDX-License-Identifier: Apache-2.0
"""Defines how each family's config.json is read and written, a row per family.

To add a family, add a row to `CONFIGS`, and a table of its tensors to
`tensor_tables.TENSORS`.
"""

import dataclasses
from typing import Any

from coat_jax.models.config import ModelConfig
from coat_jax.models.hf.keys import LONGEST
from coat_jax.models.hf.layer_keys import (
  FULL_LAYERS,
  PARTIAL_ROPE,
  ROPE,
  WINDOW_ROPE,
  layer_types,
)
from coat_jax.models.hf.schema import (
  Alias,
  Choice,
  ConfigTable,
  Derived,
  InnerWidth,
  Keys,
  Labels,
  SubConfig,
)
from coat_jax.models.vision.config import VisionConfig
from coat_jax.models.vision_language import VisionLanguageConfig

_NONE: dict[str, Any] = {}
_SHAPE = {
  "num_hidden_layers": "num_layers",
  "hidden_size": "d_model",
  "num_attention_heads": "num_heads",
  "num_key_value_heads": "num_kv_heads",
  "head_dim": "head_dim",
  "vocab_size": "vocab_size",
  "tie_word_embeddings": "tied_embeddings",
}
_RMS = {"rms_norm_eps": "norm_eps"}
_DENSE = _SHAPE | {"intermediate_size": "d_ff"} | _RMS
_WINDOW = {"sliding_window": "window"}
_DEFAULTS = {
  "num_key_value_heads": None,
  "head_dim": None,
  "tie_word_embeddings": False,
  "rms_norm_eps": 1e-6,
}
_ONE_STACK = {"is_encoder_decoder": False, "add_cross_attention": False}


def decoder_table(
  architecture: str,
  *,
  fields: dict[str, str] = _DENSE,
  defaults: dict[str, Any] = _NONE,
  fixed: dict[str, Any] = _NONE,
  ignored: tuple[str, ...] = (),
  groups: tuple[Keys, ...] = (ROPE,),
) -> ConfigTable:
  """Makes a decoder's row from what distinguishes it from Llama."""
  always = {"hidden_act": "silu", "attention_dropout": 0, **_ONE_STACK}
  return ConfigTable(
    kind=ModelConfig,
    architectures=(architecture,),
    fields=fields,
    defaults=_DEFAULTS | defaults,
    fixed=always | fixed,
    ignored=(LONGEST, *ignored),  # Plain RoPE has no maximum position.
    groups=groups,
  )


_GEMMA2 = decoder_table(
  "Gemma2ForCausalLM",
  fields=_DENSE
  | _WINDOW
  | {
    "query_pre_attn_scalar": "query_scalar",
    "attn_logit_softcapping": "attention_soft_cap",
    "final_logit_softcapping": "logits_soft_cap",
  },
  fixed={
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
  },
  defaults={
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
  },
  ignored=("cache_implementation", "sliding_window_size"),
  groups=(ROPE, layer_types(2)),
)
_GEMMA3 = dataclasses.replace(
  _GEMMA2,
  architectures=("Gemma3ForCausalLM",),
  fields={
    key: field
    for key, field in _GEMMA2.fields.items()
    if key != "attn_logit_softcapping"
  },
  # transformers' Gemma 3 models do not read this key.
  fixed={**_GEMMA2.fixed, "attn_logit_softcapping": None},
  defaults={
    **_GEMMA2.defaults,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
  },
  groups=(WINDOW_ROPE, layer_types(6)),
)
_GPT2 = ConfigTable(
  kind=ModelConfig,
  architectures=("GPT2LMHeadModel",),
  fields={
    "n_layer": "num_layers",
    "n_embd": "d_model",
    "n_head": "num_heads",
    "n_positions": "max_positions",
    "layer_norm_epsilon": "norm_eps",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tied_embeddings",
  },
  fixed={
    **_ONE_STACK,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
  },
  defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
  ignored=(
    # Dropout only matters in training, and we have none.
    *("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    # Keys for classifiers, and keys of older versions.
    *("summary_activation", "summary_first_dropout", "summary_type"),
    *("summary_proj_to_labels", "summary_use_proj"),
    *("n_ctx", "task_specific_params"),
  ),
  groups=(
    InnerWidth(("n_inner",)),
    Choice(
      ("activation_function",),
      "gelu",
      {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf"},
    ),
  ),
)
_TOWER = {
  "num_hidden_layers": "num_layers",
  "hidden_size": "d_model",
  "intermediate_size": "d_ff",
  "num_attention_heads": "num_heads",
  "image_size": "image_size",
  "patch_size": "patch_size",
  "num_channels": "num_channels",
  "layer_norm_eps": "norm_eps",
}
_BASE = {
  "num_hidden_layers": 12,
  "hidden_size": 768,
  "intermediate_size": 3072,
  "num_attention_heads": 12,
  "image_size": 224,
  "patch_size": 16,
  "num_channels": 3,
}
_IGNORED_IN_TOWERS = (
  LONGEST,
  "vocab_size",  # In a LLaVA's file this belongs to the text model.
  # Keys for the initialization of new weights, for parts of the model that a
  # tower lacks, and for dropout, which only matters in training.
  *("initializer_factor", "projection_dim", "encoder_stride"),
  *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"),
  *("num_labels", "pooler_output_size"),
  # Keys for text generation, which version 4 wrote for every model.
  *("add_cross_attention", "bad_words_ids", "begin_suppress_tokens"),
  *("cross_attention_hidden_size", "decoder_start_token_id"),
  *("diversity_penalty", "early_stopping", "encoder_no_repeat_ngram_size"),
  *("exponential_decay_length_penalty", "forced_bos_token_id"),
  *("forced_eos_token_id", "is_decoder", "is_encoder_decoder", "prefix"),
  *("length_penalty", "min_length", "no_repeat_ngram_size", "output_scores"),
  *("num_beam_groups", "num_beams", "num_return_sequences", "pruned_heads"),
  *("remove_invalid_values", "repetition_penalty", "return_dict_in_generate"),
  *("sep_token_id", "suppress_tokens", "task_specific_params", "typical_p"),
  *("tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class"),
)
_VIT = ConfigTable(
  kind=VisionConfig,
  architectures=("ViTForImageClassification", "ViTModel"),
  fields=_TOWER,
  defaults=_BASE | {"layer_norm_eps": 1e-12},
  fixed={"hidden_act": "gelu", "qkv_bias": True, "pooler_act": "tanh"},
  ignored=_IGNORED_IN_TOWERS,
  groups=(Labels(("id2label", "label2id", "num_labels")),),
)
_CLIP = dataclasses.replace(
  _VIT,
  architectures=("CLIPVisionModel", "CLIPModel"),
  model_type="clip_vision_model",
  whole="clip",
  defaults=_BASE | {"layer_norm_eps": 1e-5, "patch_size": 32},
  fixed={"hidden_act": "quick_gelu", "attention_dropout": 0},
  groups=(),
)
_SIGLIP = dataclasses.replace(
  _CLIP,
  architectures=("SiglipVisionModel", "SiglipModel"),
  model_type="siglip_vision_model",
  whole="siglip",
  fields=_TOWER | {"vision_use_head": "has_pool"},
  defaults=_BASE | {"layer_norm_eps": 1e-6, "vision_use_head": True},
  fixed={"hidden_act": "gelu_pytorch_tanh", "attention_dropout": 0},
  optional=("vision_use_head",),
)
_LLAVA = ConfigTable(
  kind=VisionLanguageConfig,
  architectures=("LlavaForConditionalGeneration",),
  fields={
    "image_token_index": "image_token",
    "vision_feature_layer": "feature_layer",
    "multimodal_projector_bias": "projector_bias",
  },
  defaults={
    "image_token_index": 32000,
    "vision_feature_layer": -2,
    "multimodal_projector_bias": True,
    "projector_hidden_act": "gelu",
  },
  fixed={"projector_hidden_act": "gelu"},
  ignored=(LONGEST, "ignore_index", "vocab_size"),
  groups=(
    Derived(("image_seq_length",), "tokens_each"),
    Choice(
      ("vision_feature_select_strategy",),
      "feature_select",
      {"default": "default", "full": "full"},
    ),
  ),
  parts={
    "text_config": SubConfig(
      field="text",
      kind=ModelConfig,
      # The values of Llama 7B: LLaVA 1.5's files omit only these keys.
      defaults={
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
      },
      inherited=("tie_word_embeddings",),
    ),
    "vision_config": SubConfig(
      field="vision",
      kind=VisionConfig,
      defaults={"model_type": "clip_vision_model"},
    ),
  },
)
_NO_BIAS = {"attention_bias": False}
_NO_WINDOW = {"use_sliding_window": False}
_WINDOW_KEYS = ("sliding_window", "max_window_layers")
# Keyed by family name.
CONFIGS: dict[str, ConfigTable] = {
  "llama": decoder_table(
    "LlamaForCausalLM", fixed={"attention_bias": False, "mlp_bias": False}
  ),
  "mistral": decoder_table(
    "MistralForCausalLM",
    fields=_DENSE | _WINDOW,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    groups=(ROPE, FULL_LAYERS),
  ),
  "phi3": decoder_table(
    "Phi3ForCausalLM",
    fields=_DENSE | _WINDOW,
    fixed={"embd_pdrop": 0, "resid_pdrop": 0, "attention_bias": False},
    defaults={"rms_norm_eps": 1e-5, "sliding_window": None},
    # Only longrope uses this context length, and longrope is refused.
    ignored=("original_max_position_embeddings",),
    groups=(PARTIAL_ROPE,),
  ),
  "olmo2": decoder_table(
    "Olmo2ForCausalLM", fixed=_NO_BIAS, defaults={"rms_norm_eps": 1e-5}
  ),
  "olmo": decoder_table(
    "OlmoForCausalLM",
    fields=_SHAPE | {"intermediate_size": "d_ff", "clip_qkv": "clip_qkv"},
    fixed=_NO_BIAS,
    defaults={"clip_qkv": None},
  ),
  "qwen3": decoder_table(
    "Qwen3ForCausalLM",
    fixed=_NO_BIAS | _NO_WINDOW,
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    ignored=_WINDOW_KEYS,
    groups=(ROPE, FULL_LAYERS),
  ),
  "qwen2": decoder_table(
    "Qwen2ForCausalLM",
    fixed=_NO_WINDOW,
    defaults={"num_key_value_heads": 32},
    ignored=_WINDOW_KEYS,
    groups=(ROPE, FULL_LAYERS),
  ),
  "gemma2": _GEMMA2,
  "gemma3_text": _GEMMA3,
  "gpt2": _GPT2,
  "qwen3_moe": decoder_table(
    "Qwen3MoeForCausalLM",
    fields=_SHAPE
    | _RMS
    | {
      "moe_intermediate_size": "d_ff",
      "num_experts": "num_experts",
      "num_experts_per_tok": "experts_per_token",
      "norm_topk_prob": "normalize_experts",
      "router_aux_loss_coef": "auxiliary_loss",
    },
    fixed={
      **(_NO_BIAS | _NO_WINDOW),
      "decoder_sparse_step": 1,
      "mlp_only_layers": [],
    },
    defaults={
      "num_key_value_heads": 4,
      "moe_intermediate_size": 768,
      "num_experts": 128,
      "num_experts_per_tok": 8,
      "norm_topk_prob": False,
      "router_aux_loss_coef": 0.001,
    },
    ignored=(
      *_WINDOW_KEYS,
      "intermediate_size",  # The width of layers without experts.
      # Whether transformers adds the auxiliary loss; we always add it.
      "output_router_logits",
    ),
    # The name of `num_experts` in transformers 5.
    groups=(ROPE, Alias(("num_local_experts",), "num_experts", "num_experts")),
  ),
  "vit": _VIT,
  "clip_vision": _CLIP,
  "siglip_vision": _SIGLIP,
  "llava": _LLAVA,
}
