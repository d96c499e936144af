# SPDX-License-Identifier: Apache-2.0
"""Defines how each family's config.json is read and written.

To add a family, add an entry to `CONFIGS`, and a table of the family's tensors
to `tensor_tables.TENSORS`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from coat_jax.models.config import ModelConfig
from coat_jax.models.hf.keys import (
  LONGEST,
  Choice,
  Derived,
  Field,
  Fixed,
  HeadWidth,
  InnerWidth,
  Key,
  Labels,
  Renamed,
  UnlessDefault,
  ignored,
)
from coat_jax.models.hf.layer_keys import (
  FULL_LAYERS,
  PARTIAL_ROPE,
  ROPE,
  WINDOW_ROPE,
  layer_types,
)
from coat_jax.models.vision.config import VisionConfig
from coat_jax.models.vision_language import VisionLanguageConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubConfig:
  """A configuration inside another one, such as LLaVA's `text_config`.

  `defaults` contains a model_type to assume if the file states none, and values
  of keys that a file with this model_type may omit. Keys in `inherited` may be
  stored in the outer configuration instead.
  """

  field: str
  kind: type
  defaults: dict[str, Any]
  inherited: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigTable:
  """Describes how a family's config.json is read and written.

  Attributes:
    kind: class of the configuration.
    architectures: names of classes in transformers; the first one is written.
    keys: this family's keys, in addition to `parts` and `keys.WITHOUT_EFFECT`.
    model_type: model_type in config.json; None for the family's name.
    whole: model_type of a model that contains this tower, such as "clip". The
      model's config.json describes the tower under `vision_config`.
    parts: nested configurations, by their key in config.json.
  """

  kind: type
  architectures: tuple[str, ...]
  keys: Mapping[str, Key]
  model_type: str | None = None
  whole: str | None = None
  parts: dict[str, SubConfig] = dataclasses.field(default_factory=dict)


_ONE_STACK = {
  "is_encoder_decoder": Fixed(False),
  "add_cross_attention": Fixed(False),
}
_LLAMA = {
  "num_hidden_layers": Field("num_layers", int),
  "hidden_size": Field("d_model", int),
  "intermediate_size": Field("d_ff", int),
  "num_attention_heads": Field("num_heads", int),
  "num_key_value_heads": Field("num_kv_heads", int, None),
  "head_dim": HeadWidth("head_dim", int, None),
  "vocab_size": Field("vocab_size", int),
  "rms_norm_eps": Field("norm_eps", float, 1e-6),
  "tie_word_embeddings": Field("tied_embeddings", bool, False),
  "hidden_act": Fixed("silu"),
  "attention_dropout": Fixed(0),
  **_ONE_STACK,
  **ignored(LONGEST),  # Only YaRN needs this key; `ROPE` reads it.
  **ROPE,
}


def decoder_table(
  architecture: str, keys: Mapping[str, Key] | None = None
) -> ConfigTable:
  """Makes a table for decoders; `keys` are those that differ from Llama's."""
  return ConfigTable(
    kind=ModelConfig,
    architectures=(architecture,),
    keys=_LLAMA | dict(keys or {}),
  )


_NO_BIAS = {"attention_bias": Fixed(False)}
# Qwen's files may state a window that the model does not use.
_NO_WINDOW = {
  "use_sliding_window": Fixed(False),
  **ignored("sliding_window", "max_window_layers"),
  **FULL_LAYERS,
}
_GEMMA2 = {
  "num_key_value_heads": Field("num_kv_heads", int, 4),
  "head_dim": HeadWidth("head_dim", int, 256),
  "sliding_window": Field("window", int, 4096),
  "query_pre_attn_scalar": HeadWidth("query_scalar", int, 256),
  "attn_logit_softcapping": Field("attention_soft_cap", float, 50.0),
  "final_logit_softcapping": Field("logits_soft_cap", float, 30.0),
  "tie_word_embeddings": Field("tied_embeddings", bool, True),
  "hidden_act": Fixed("gelu_pytorch_tanh"),
  "hidden_activation": Fixed("gelu_pytorch_tanh"),
  "use_bidirectional_attention": Fixed(False),
  **_NO_BIAS,
  **ignored("cache_implementation", "sliding_window_size"),
  **layer_types(2),
}
_GEMMA3 = _GEMMA2 | {
  # transformers ignores this key in Gemma 3.
  "attn_logit_softcapping": Fixed(None),
  "final_logit_softcapping": Field("logits_soft_cap", float, None),
  **WINDOW_ROPE,
  **layer_types(6),
}
_GPT2 = {
  "n_layer": Field("num_layers", int),
  "n_embd": Field("d_model", int),
  "n_head": Field("num_heads", int),
  "n_inner": InnerWidth("d_ff", int, None),
  "n_positions": Field("max_positions", int),
  "layer_norm_epsilon": Field("norm_eps", float, 1e-5),
  "vocab_size": Field("vocab_size", int),
  "tie_word_embeddings": Field("tied_embeddings", bool, True),
  "activation_function": Choice(
    "gelu", {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf"}
  ),
  "scale_attn_weights": Fixed(True),
  "scale_attn_by_inverse_layer_idx": Fixed(False),
  "reorder_and_upcast_attn": Fixed(False),
  **_ONE_STACK,
  **ignored(
    # Our layers have no dropout.
    *("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    # Keys for classifiers, and keys from older versions of transformers.
    *("summary_activation", "summary_first_dropout", "summary_type"),
    *("summary_proj_to_labels", "summary_use_proj"),
    *("n_ctx", "task_specific_params"),
  ),
}
_QWEN3_MOE = {
  "num_key_value_heads": Field("num_kv_heads", int, 4),
  "moe_intermediate_size": Field("d_ff", int, 768),
  "num_experts": Renamed("num_experts", int, 128, new="num_local_experts"),
  "num_experts_per_tok": Field("experts_per_token", int, 8),
  "norm_topk_prob": Field("normalize_experts", bool, False),
  "router_aux_loss_coef": Field("auxiliary_loss", float, 0.001),
  "decoder_sparse_step": Fixed(1),
  "mlp_only_layers": Fixed([]),
  **_NO_BIAS,
  **_NO_WINDOW,
  **ignored(
    "num_local_experts",  # `Renamed` reads it.
    "intermediate_size",  # The width of MLPs in layers without experts.
    # Whether transformers adds the auxiliary loss; `loss_fn` ignores this key.
    "output_router_logits",
  ),
}
_TOWER = {
  "num_hidden_layers": Field("num_layers", int, 12),
  "hidden_size": Field("d_model", int, 768),
  "intermediate_size": Field("d_ff", int, 3072),
  "num_attention_heads": Field("num_heads", int, 12),
  "image_size": Field("image_size", int, 224),
  "num_channels": Field("num_channels", int, 3),
  **ignored(
    LONGEST,
    "vocab_size",  # In LLaVA's files, this describes the text model.
    # Keys for initialization, for parts that a tower lacks, and for dropout.
    *("initializer_factor", "projection_dim", "encoder_stride"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"),
    *("num_labels", "pooler_output_size"),
    # Keys of text models, which transformers 4 wrote for every model.
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
  ),
}
_VIT = ConfigTable(
  kind=VisionConfig,
  architectures=("ViTForImageClassification", "ViTModel"),
  keys={
    **_TOWER,
    "patch_size": Field("patch_size", int, 16),
    "layer_norm_eps": Field("norm_eps", float, 1e-12),
    "hidden_act": Fixed("gelu"),
    "qkv_bias": Fixed(True),
    "pooler_act": Fixed("tanh"),
    "id2label": Labels(),
  },
)
_CLIP = ConfigTable(
  kind=VisionConfig,
  architectures=("CLIPVisionModel", "CLIPModel"),
  keys={
    **_TOWER,
    "patch_size": Field("patch_size", int, 32),
    "layer_norm_eps": Field("norm_eps", float, 1e-5),
    "hidden_act": Fixed("quick_gelu"),
    "attention_dropout": Fixed(0),
  },
  model_type="clip_vision_model",
  whole="clip",
)
_SIGLIP = ConfigTable(
  kind=VisionConfig,
  architectures=("SiglipVisionModel", "SiglipModel"),
  keys={
    **_TOWER,
    "patch_size": Field("patch_size", int, 16),
    "layer_norm_eps": Field("norm_eps", float, 1e-6),
    "vision_use_head": UnlessDefault("has_pool", bool, True),
    "hidden_act": Fixed("gelu_pytorch_tanh"),
    "attention_dropout": Fixed(0),
  },
  model_type="siglip_vision_model",
  whole="siglip",
)
_LLAVA = ConfigTable(
  kind=VisionLanguageConfig,
  architectures=("LlavaForConditionalGeneration",),
  keys={
    "image_token_index": Field("image_token", int, 32000),
    "vision_feature_layer": Field("feature_layer", int, -2),
    "vision_feature_select_strategy": Choice(
      "feature_select", {"default": "default", "full": "full"}
    ),
    "multimodal_projector_bias": Field("projector_bias", bool, True),
    "projector_hidden_act": Fixed("gelu"),
    "image_seq_length": Derived("tokens_each"),
    **ignored(LONGEST, "ignore_index", "vocab_size"),
  },
  parts={
    "text_config": SubConfig(
      field="text",
      kind=ModelConfig,
      # Llama 7B's values, which LLaVA 1.5's files omit.
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
# Keyed by family name.
CONFIGS: dict[str, ConfigTable] = {
  "llama": decoder_table(
    "LlamaForCausalLM", _NO_BIAS | {"mlp_bias": Fixed(False)}
  ),
  "mistral": decoder_table(
    "MistralForCausalLM",
    {
      "num_key_value_heads": Field("num_kv_heads", int, 8),
      "sliding_window": Field("window", int, 4096),
      **FULL_LAYERS,
    },
  ),
  "phi3": decoder_table(
    "Phi3ForCausalLM",
    {
      "rms_norm_eps": Field("norm_eps", float, 1e-5),
      "sliding_window": Field("window", int, None),
      "embd_pdrop": Fixed(0),
      "resid_pdrop": Fixed(0),
      **_NO_BIAS,
      # Only longrope uses this key, and longrope is refused.
      **ignored("original_max_position_embeddings"),
      **PARTIAL_ROPE,
    },
  ),
  "olmo2": decoder_table(
    "Olmo2ForCausalLM",
    _NO_BIAS | {"rms_norm_eps": Field("norm_eps", float, 1e-5)},
  ),
  "olmo": ConfigTable(
    kind=ModelConfig,
    architectures=("OlmoForCausalLM",),
    keys={
      **{key: x for key, x in _LLAMA.items() if key != "rms_norm_eps"},
      "clip_qkv": Field("clip_qkv", float, None),
      **_NO_BIAS,
    },
  ),
  "qwen3": decoder_table(
    "Qwen3ForCausalLM",
    {
      "num_key_value_heads": Field("num_kv_heads", int, 32),
      "head_dim": HeadWidth("head_dim", int, 128),
      **_NO_BIAS,
      **_NO_WINDOW,
    },
  ),
  "qwen2": decoder_table(
    "Qwen2ForCausalLM",
    {"num_key_value_heads": Field("num_kv_heads", int, 32), **_NO_WINDOW},
  ),
  "gemma2": decoder_table("Gemma2ForCausalLM", _GEMMA2),
  "gemma3_text": decoder_table("Gemma3ForCausalLM", _GEMMA3),
  "gpt2": ConfigTable(
    kind=ModelConfig, architectures=("GPT2LMHeadModel",), keys=_GPT2
  ),
  "qwen3_moe": decoder_table("Qwen3MoeForCausalLM", _QWEN3_MOE),
  "vit": _VIT,
  "clip_vision": _CLIP,
  "siglip_vision": _SIGLIP,
  "llava": _LLAVA,
}
