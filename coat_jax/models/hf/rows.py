# SPDX-License-Identifier: Apache-2.0
"""How each family's config.json is read, and what its keys mean here."""

import dataclasses
from typing import Any

from coat_jax.models.hf.layers import LAYER_TYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigRow:
  """How a family's config.json is read.

  Attributes:
    architecture: the class of transformers.
    fields: keys only of this family that are fields of `ModelConfig`.
    fixed: keys only of this family that must have a certain value. An absent
      key has this value too, unless `defaults` has another one.
    defaults: what transformers assumes for absent keys, if that differs from
      the other families.
    ignored: keys that have no effect, given the `fixed` ones.
    full_every: if some layers see a window and others see all keys, the default
      period of the latter; None if all layers are alike.
    has_ropes: whether these two kinds of layers have different RoPE.
    lacks: keys of all other families that this family does not have.
    has_rope: whether the family has the keys of RoPE.
    choices: by key, the field of `ModelConfig` and what each value becomes
      there; the first value is the default.
    has_partial_rope: whether RoPE may rotate only a part of each head.
    d_ff_multiple: `d_ff` over `d_model` if a file does not state `d_ff`.
    aliases: further names of keys; they are read and written too.
  """

  architecture: str
  fields: dict[str, str] = dataclasses.field(default_factory=dict)
  fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
  defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
  ignored: tuple[str, ...] = ()
  full_every: int | None = None
  has_ropes: bool = False
  lacks: tuple[str, ...] = ()
  has_rope: bool = True
  has_partial_rope: bool = False
  choices: dict[str, tuple[str, dict[str, Any]]] = dataclasses.field(
    default_factory=dict
  )
  d_ff_multiple: int | None = None
  aliases: dict[str, str] = dataclasses.field(default_factory=dict)

  def of_all(self, keys: dict[str, Any]) -> dict[str, Any]:
    """Returns the shared keys without those that this family lacks."""
    return {key: x for key, x in keys.items() if key not in self.lacks}


_RMS = {"rms_norm_eps": "norm_eps"}
_WINDOW = {"sliding_window": "window"}
_ONLY_FULL = {LAYER_TYPES: None}
_GEMMA2 = ConfigRow(
  architecture="Gemma2ForCausalLM",
  fields=_RMS
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
  full_every=2,
)
_GEMMA3 = dataclasses.replace(
  _GEMMA2,
  architecture="Gemma3ForCausalLM",
  fields={
    key: field
    for key, field in _GEMMA2.fields.items()
    if key != "attn_logit_softcapping"
  },
  # transformers' Gemma 3 models do not read this key.
  fixed=_GEMMA2.fixed | {"attn_logit_softcapping": None},
  defaults=_GEMMA2.defaults
  | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
  full_every=6,
  has_ropes=True,
)
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
    # The context length that longrope stretches; longrope is refused.
    ignored=("original_max_position_embeddings",),
    has_partial_rope=True,
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
  "gemma2": _GEMMA2,
  "gemma3_text": _GEMMA3,
  "gpt2": ConfigRow(
    architecture="GPT2LMHeadModel",
    fields={
      "n_layer": "num_layers",
      "n_embd": "d_model",
      "n_inner": "d_ff",
      "n_head": "num_heads",
      "n_positions": "max_positions",
      "layer_norm_epsilon": "norm_eps",
    },
    fixed={
      "scale_attn_weights": True,
      "scale_attn_by_inverse_layer_idx": False,
      "reorder_and_upcast_attn": False,
    },
    defaults={
      "n_inner": None,
      "layer_norm_epsilon": 1e-5,
      "tie_word_embeddings": True,
    },
    ignored=(
      # Dropout only matters in training, and we have none.
      *("attn_pdrop", "embd_pdrop", "resid_pdrop"),
      # Keys of a classifier, and of older versions.
      *("summary_activation", "summary_first_dropout", "summary_type"),
      *("summary_proj_to_labels", "summary_use_proj"),
      *("n_ctx", "task_specific_params"),
    ),
    lacks=(
      *("num_hidden_layers", "hidden_size", "intermediate_size"),
      *("num_attention_heads", "num_key_value_heads", "head_dim"),
      *("hidden_act", "attention_dropout", "max_position_embeddings"),
    ),
    has_rope=False,
    choices={
      "activation_function": (
        "gelu",
        {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf"},
      )
    },
    d_ff_multiple=4,
  ),
  "qwen3_moe": ConfigRow(
    architecture="Qwen3MoeForCausalLM",
    fields=_RMS
    | {
      "moe_intermediate_size": "d_ff",
      "num_experts": "num_experts",
      "num_experts_per_tok": "experts_per_token",
      "norm_topk_prob": "normalize_experts",
      "router_aux_loss_coef": "auxiliary_loss",
    },
    fixed={
      "attention_bias": False,
      "use_sliding_window": False,
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
      *("sliding_window", "max_window_layers"),
      "intermediate_size",  # Of layers without experts.
      # Whether transformers adds the auxiliary loss; our training adds it.
      "output_router_logits",
    ),
    lacks=("intermediate_size",),
    aliases={"num_local_experts": "num_experts"},  # From transformers 5.
  ),
}
