# SPDX-License-Identifier: Apache-2.0
"""A small Llama of random weights that transformers 5.17 wrote, as a Decoder.

`data/hf/llama` has config.json, model.safetensors and expected.npz: of
`input_ids` the `logits`, and `greedy`, the first 8 of them with 16 tokens that
transformers added.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from coat_jax import recipe as recipes
from coat_jax.models import Decoder, ModelConfig

DATA = Path(__file__).parents[1] / "data" / "hf" / "llama"


def expected():
  """The arrays that transformers computed."""
  with np.load(DATA / "expected.npz") as arrays:
    return dict(arrays)


def load():
  """The model, computed in f32."""
  theirs = json.loads((DATA / "config.json").read_text())
  config = ModelConfig(
    family="llama",
    num_layers=theirs["num_hidden_layers"],
    d_model=theirs["hidden_size"],
    d_ff=theirs["intermediate_size"],
    num_heads=theirs["num_attention_heads"],
    num_kv_heads=theirs["num_key_value_heads"],
    vocab_size=theirs["vocab_size"],
    rope_theta=theirs["rope_parameters"]["rope_theta"],
    norm_eps=theirs["rms_norm_eps"],
  )
  graph, params = nnx.split(
    nnx.eval_shape(
      lambda: Decoder(config, recipes.bf16(), dtype="float32", rngs=nnx.Rngs(0))
    )
  )
  weights = load_file(DATA / "model.safetensors")
  nnx.replace_by_pure_dict(params, _params(weights, config))
  return nnx.merge(graph, params)


def _params(weights, config):
  def of(name):
    return weights[f"{name}.weight"]

  def stack(make):
    layers = [make(f"model.layers.{i}") for i in range(config.num_layers)]
    return jnp.asarray(np.stack(layers))

  def heads(layer, name):  # [out, in] to [D, K, heads of a key head, H].
    w = of(f"{layer}.self_attn.{name}_proj").T
    return w.reshape(len(w), config.num_kv_heads, -1, config.head_dim)

  def qkv(layer):
    parts = [heads(layer, name) for name in "qkv"]
    return np.concatenate(parts, axis=2).reshape(config.d_model, -1)

  def gate_up(layer):
    names = (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
    return np.stack([of(name).T for name in names], axis=1)

  return {
    "embedding": jnp.asarray(of("model.embed_tokens")),
    "head": jnp.asarray(of("lm_head").T),
    "norm": {"scale": jnp.asarray(of("model.norm"))},
    "layers": {
      "attention": {
        "qkv": {
          "norm": {"scale": stack(lambda x: of(f"{x}.input_layernorm"))},
          "linear": {"kernel": stack(qkv)},
        },
        "out": {"kernel": stack(lambda x: of(f"{x}.self_attn.o_proj").T)},
      },
      "mlp": {
        "norm": {"scale": stack(lambda x: of(f"{x}.post_attention_layernorm"))},
        "gate_up": {"kernel": stack(gate_up)},
        "down": {"kernel": stack(lambda x: of(f"{x}.mlp.down_proj").T)},
      },
    },
  }
