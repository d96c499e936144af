# SPDX-License-Identifier: Apache-2.0
"""Model families: rows of a table, and Qwen2 against transformers' own."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipe as recipes
from coat_jax.models import config as configs
from coat_jax.models.config import Family, ModelConfig
from coat_jax.models.decoder import Decoder, loss_fn
from coat_jax.models.specs import param_spec

# Written by transformers 5.17 (torch 2.11, CPU, f32) with random weights;
# logits of every sixth position, norms of each parameter's gradient.
GOLDEN = Path(__file__).parents[1] / "data" / "hf_qwen2.npz"
SIZES = dict(num_layers=2, d_model=64, d_ff=160, num_heads=4, num_kv_heads=2)
QWEN2 = ModelConfig(
  family="qwen2", vocab_size=384, rope_theta=1e6, norm_eps=1e-6, **SIZES
)


def shapes(config):
  """Parameters by path."""
  model = nnx.eval_shape(
    lambda: Decoder(config, recipes.coat(), rngs=nnx.Rngs(0))
  )
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): p.shape
    for path, p in jax.tree_util.tree_leaves_with_path(params)
  }


LLAMA = {
  "embedding": (384, 64),
  "head": (64, 384),
  "layers/attention/out/kernel": (2, 64, 64),
  "layers/attention/qkv/linear/kernel": (2, 64, 128),
  "layers/attention/qkv/norm/scale": (2, 64),
  "layers/mlp/down/kernel": (2, 160, 64),
  "layers/mlp/gate_up/kernel": (2, 64, 2, 160),
  "layers/mlp/norm/scale": (2, 64),
  "norm/scale": (64,),
}
BIAS = {"layers/attention/qkv/linear/bias": (2, 128)}
SCALES = [name for name in LLAMA if name.endswith("scale")]


@pytest.mark.parametrize(
  "family, more, less",
  [("llama", {}, []), ("olmo", {}, SCALES), ("qwen2", BIAS, [])],
)
def test_family_chooses_the_parameters(family, more, less):
  config = ModelConfig(family=family, vocab_size=384, **SIZES)
  want = {k: v for k, v in (LLAMA | more).items() if k not in less}
  assert shapes(config) == want
  tied = ModelConfig(
    family=family, vocab_size=384, tied_embeddings=True, **SIZES
  )
  want.pop("head")
  assert shapes(tied) == want


def test_family_is_a_row_of_a_table(monkeypatch):
  own = Family(norm="layer", norm_has_scale=False, qkv_bias=True)
  monkeypatch.setitem(configs.FAMILIES, "own", own)
  config = ModelConfig(family="own", vocab_size=384, **SIZES)
  want = {k: v for k, v in (LLAMA | BIAS).items() if k not in SCALES}
  assert shapes(config) == want


def test_family_that_is_unknown_is_refused():
  with pytest.raises(ValueError, match="'qwen'; did you mean 'qwen2'"):
    ModelConfig(family="qwen", vocab_size=384, **SIZES)


def test_bias_of_qkv_is_split_with_its_columns():
  path = tuple(
    jax.tree_util.DictKey(key) for key in next(iter(BIAS)).split("/")
  )
  assert param_spec(path) == jax.P(None, "tensor")


def as_transformers(params):
  """Our parameters by transformers' names: kernels are [out, in] there."""
  layers = params["layers"]
  names = {
    "model.embed_tokens": params["embedding"],
    "model.norm": params["norm"]["scale"],
    "lm_head": params["head"].T,
  }
  qkv, mlp = layers["attention"]["qkv"], layers["mlp"]
  heads = QWEN2.num_heads // QWEN2.num_kv_heads
  for i in range(QWEN2.num_layers):
    layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
    names |= {
      f"{layer}.input_layernorm": qkv["norm"]["scale"][i],
      f"{layer}.post_attention_layernorm": mlp["norm"]["scale"][i],
      f"{layer}.mlp.gate_proj": mlp["gate_up"]["kernel"][i, :, 0].T,
      f"{layer}.mlp.up_proj": mlp["gate_up"]["kernel"][i, :, 1].T,
      f"{layer}.mlp.down_proj": mlp["down"]["kernel"][i].T,
      f"{attention}.o_proj": layers["attention"]["out"]["kernel"][i].T,
    }
    for kind, x in qkv["linear"].items():
      # By key head: its query heads, its key, its value.
      x = x[i].reshape(-1, QWEN2.num_kv_heads, heads + 2, QWEN2.head_dim)
      parts = dict(q=x[:, :, :heads], k=x[:, :, heads], v=x[:, :, heads + 1])
      for name, part in parts.items():
        part = part.reshape(len(part), -1).T
        end, part = ("", part) if kind == "kernel" else ("bias", part[:, 0])
        names[f"{attention}.{name}_proj{'.' if end else ''}{end}"] = part
  return {
    name if name.endswith(".bias") else f"{name}.weight": x
    for name, x in names.items()
  }


def test_qwen2_is_that_of_transformers():
  golden = np.load(GOLDEN)
  model = nnx.eval_shape(
    lambda: Decoder(QWEN2, recipes.bf16(), dtype=jnp.float32, rngs=nnx.Rngs(0))
  )
  graph, abstract = nnx.split(model, nnx.Param)
  abstract = nnx.to_pure_dict(abstract)
  weights = {
    name.removeprefix("weights/"): jnp.asarray(golden[name])
    for name in golden
    if name.startswith("weights/")
  }
  # Names are a permutation of values: its transpose is its inverse.
  (params,) = jax.linear_transpose(as_transformers, abstract)(weights)
  tokens = jnp.asarray(golden["input_ids"])

  @jax.jit
  def run(params):
    def loss(params):
      return loss_fn(nnx.merge(graph, params), tokens)

    hidden = nnx.merge(graph, params)(tokens)
    return hidden[:, ::6] @ params["head"], jax.value_and_grad(loss)(params)

  logits, (loss, gradients) = run(params)
  # Sums of 64 to 160 products in f32, in another order, through two layers.
  largest = np.max(np.abs(golden["logits"]))
  assert np.max(np.abs(logits - golden["logits"])) < 1e-5 * largest
  np.testing.assert_allclose(loss, golden["loss"], rtol=1e-6)
  norms = jax.tree.map(jnp.linalg.norm, as_transformers(gradients))
  assert len(norms) == 27
  for name, found in norms.items():
    want = golden[f"gradnorm/{name}"]
    np.testing.assert_allclose(found, want, rtol=1e-4, err_msg=name)
