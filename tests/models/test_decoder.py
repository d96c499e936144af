# SPDX-License-Identifier: Apache-2.0
"""The decoder against one in NumPy; what presets make of its layers."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import keystr

from coat_jax import recipe
from coat_jax.models.config import ModelConfig
from coat_jax.models.decoder import Decoder
from tests.comparing import assert_close, jit
from train.presets import PRESETS

SMALL = dict(
  num_layers=2,
  d_model=32,
  d_ff=48,
  num_heads=4,
  num_kv_heads=2,
  vocab_size=40,
  # Far from the defaults of any layer, and large enough to show.
  rope_theta=50.0,
  norm_eps=0.1,
)
CONFIGS = {
  "llama": ModelConfig(family="llama", **SMALL),
  "olmo": ModelConfig(
    family="olmo", **SMALL, tied_embeddings=True, clip_qkv=0.5
  ),
}
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 12), np.int32)


def in_numpy(config, params, tokens):
  """The final hidden states, in float64, from the formulas."""
  heads, kv_heads, h = config.num_heads, config.num_kv_heads, config.head_width
  batch, length = tokens.shape

  def norm(x, scale):
    if config.family == "olmo":
      x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
    return x * scale

  def rope(x):  # [B, T, N, H]; pairs are (i, i + H / 2).
    i = np.arange(h // 2)
    angle = np.arange(length)[:, None] * config.rope_theta ** (-2 * i / h)
    turn = np.exp(1j * angle)[None, :, None]
    turned = (x[..., : h // 2] + 1j * x[..., h // 2 :]) * turn
    return np.concatenate([turned.real, turned.imag], -1)

  def attention(x, scale, qkv, out):
    y = norm(x, scale) @ qkv
    if config.clip_qkv is not None:
      y = np.clip(y, -config.clip_qkv, config.clip_qkv)
    shared = heads // kv_heads
    y = y.reshape(batch, length, kv_heads, shared + 2, h)
    q = rope(y[..., :shared, :].reshape(batch, length, heads, h))
    k = rope(y[..., shared, :]).repeat(shared, 2)
    v = y[..., shared + 1, :].repeat(shared, 2)
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(h)
    past = np.tril(np.ones((length, length), bool))
    weights = np.where(past, np.exp(scores), 0)
    weights = weights / weights.sum(-1, keepdims=True)
    y = np.einsum("bnts,bsnh->btnh", weights, v)
    return x + y.reshape(batch, length, heads * h) @ out

  def mlp(x, scale, gate_up, down):
    gate, up = np.einsum("btd,dcf->cbtf", norm(x, scale), gate_up)
    return x + (gate / (1 + np.exp(-gate)) * up) @ down

  x = params["embedding"][tokens]
  a, m = params["layers"]["attention"], params["layers"]["mlp"]
  for i in range(config.num_layers):
    scale = a["qkv"]["norm"]["scale"][i] if "norm" in a["qkv"] else 1
    x = attention(
      x, scale, a["qkv"]["linear"]["kernel"][i], a["out"]["kernel"][i]
    )
    scale = m["norm"]["scale"][i] if "norm" in m else 1
    x = mlp(x, scale, m["gate_up"]["kernel"][i], m["down"]["kernel"][i])
  return norm(x, params["norm"]["scale"] if "norm" in params else 1)


@pytest.mark.parametrize("family", CONFIGS)
def test_decoder_matches_numpy(family):
  config = CONFIGS[family]
  graph, params = nnx.split(
    nnx.eval_shape(
      lambda: Decoder(config, recipe.bf16(), dtype="float32", rngs=nnx.Rngs(0))
    )
  )
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda w: rng.normal(0, 0.25, w.shape).astype(w.dtype), params
  )
  got = jit(lambda params, x: nnx.merge(graph, params)(x))(params, TOKENS)
  pure = jax.tree.map(np.float64, nnx.to_pure_dict(params))
  assert_close(got, in_numpy(config, pure, TOKENS))


def layers_of(name):
  config = PRESETS[name]().model
  model = nnx.eval_shape(
    lambda: Decoder(config, recipe.coat(), rngs=nnx.Rngs(0))
  )
  return model.layers.attention, model.layers.mlp


def test_llama3_8b_has_its_heads_and_base_of_frequencies():
  attention, mlp = layers_of("llama3_8b")
  assert attention.rope_theta == 500_000
  assert (attention.num_heads, attention.num_kv_heads) == (32, 8)
  assert attention.head_dim == 128 and attention.causal
  assert attention.out.kernel.shape == (32, 4096, 4096)
  assert mlp.gate_up.kernel.shape == (32, 4096, 2, 14336)


def test_projections_to_the_residual_stream_start_smaller_with_depth():
  config = ModelConfig(
    family="llama",
    num_layers=8,
    d_model=64,
    d_ff=128,
    num_heads=2,
    num_kv_heads=2,
    vocab_size=256,
  )
  params = jit(
    lambda: nnx.to_pure_dict(
      nnx.state(Decoder(config, recipe.bf16(), rngs=nnx.Rngs(0)), nnx.Param)
    )
  )()
  stddev = {
    keystr(path, simple=True, separator="/"): np.std(leaf)
    for path, leaf in jax.tree.leaves_with_path(params)
  }
  # Of 16384 values and more: four standard errors are 2.2 %.
  assert stddev == {
    "embedding": pytest.approx(0.02, rel=0.022),
    "head": pytest.approx(0.02, rel=0.022),
    "layers/attention/qkv/linear/kernel": pytest.approx(0.02, rel=0.022),
    "layers/mlp/gate_up/kernel": pytest.approx(0.02, rel=0.022),
    # Over the root of two projections in each of 8 layers.
    "layers/attention/out/kernel": pytest.approx(0.005, rel=0.022),
    "layers/mlp/down/kernel": pytest.approx(0.005, rel=0.022),
    "layers/attention/qkv/norm/scale": 0,
    "layers/mlp/norm/scale": 0,
    "norm/scale": 0,
  }
