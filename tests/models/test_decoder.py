# SPDX-License-Identifier: Apache-2.0
"""Compares the decoder with NumPy, and tests presets and initial weights."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import keystr

from coat_jax import recipes
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
  # These are far from all defaults, and large enough to affect results.
  rope_theta=50.0,
  norm_eps=0.1,
)
GEMMA = SMALL | dict(
  num_layers=3, head_dim=6, window=4, full_every=2, tied_embeddings=True
)
CONFIGS = {
  "llama": ModelConfig(family="llama", **SMALL),
  "olmo": ModelConfig(
    family="olmo", **SMALL, tied_embeddings=True, clip_qkv=0.5
  ),
  "gemma2": ModelConfig(
    family="gemma2",
    **GEMMA,
    query_scalar=7,
    attention_soft_cap=0.7,
    logits_soft_cap=2.0,
  ),
  # Layers without a window scale RoPE, as in larger Gemma 3 models.
  "gemma3": ModelConfig(
    family="gemma3_text",
    **GEMMA,
    window_rope_theta=20.0,
    rope_scaling="linear,factor=8",
  ),
}
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 12), np.int32)


def in_numpy(config, params, tokens):
  """Computes logits in float64 from the formulas."""
  heads, kv_heads, h = config.num_heads, config.num_kv_heads, config.head_width
  batch, length = tokens.shape
  is_gemma = config.family.startswith("gemma")

  def norm(x, module):
    if config.family == "olmo":
      x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
    if module is None:
      return x
    return x * (1 + module["scale"] if is_gemma else module["scale"])

  def after(y, part):
    return norm(y, part["post_norm"]) if is_gemma else y

  def capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)

  def rope(x, sees_all):  # [B, T, N, H]; pairs are (i, i + H / 2).
    i = np.arange(h // 2)
    theta, slower = config.rope_theta, 1
    if config.family == "gemma3_text":
      theta, slower = (theta, 8) if sees_all else (20, 1)
    angle = np.arange(length)[:, None] * theta ** (-2 * i / h) / slower
    turn = np.exp(1j * angle)[None, :, None]
    turned = (x[..., : h // 2] + 1j * x[..., h // 2 :]) * turn
    return np.concatenate([turned.real, turned.imag], -1)

  def attention(x, part, sees_all):
    y = norm(x, part["qkv"].get("norm")) @ part["qkv"]["linear"]["kernel"]
    if config.clip_qkv is not None:
      y = np.clip(y, -config.clip_qkv, config.clip_qkv)
    shared = heads // kv_heads
    y = y.reshape(batch, length, kv_heads, shared + 2, h)
    q = y[..., :shared, :].reshape(batch, length, heads, h)
    k, v = y[..., shared, :], y[..., shared + 1, :].repeat(shared, 2)
    if "q_norm" in part:
      q, k = norm(q, part["q_norm"]), norm(k, part["k_norm"])
    q, k = rope(q, sees_all), rope(k, sees_all).repeat(shared, 2)
    scores = np.einsum("btnh,bsnh->bnts", q, k)
    scores = scores / np.sqrt(config.query_scalar or h)
    weights = np.exp(capped(scores, config.attention_soft_cap))
    past = np.tril(np.ones((length, length), bool))
    if is_gemma and not sees_all:
      past = np.triu(past, 1 - config.window)
    weights = np.where(past, weights, 0)
    weights = weights / weights.sum(-1, keepdims=True)
    y = np.einsum("bnts,bsnh->btnh", weights, v)
    y = y.reshape(batch, length, heads * h) @ part["out"]["kernel"]
    return x + after(y, part)

  def activation(x):
    if is_gemma:
      return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))

  def mlp(x, part):
    y = norm(x, part.get("norm"))
    gate, up = np.einsum("btd,dcf->cbtf", y, part["gate_up"]["kernel"])
    y = (activation(gate) * up) @ part["down"]["kernel"]
    return x + after(y, part)

  x = params["embedding"][tokens] * (32**0.5 if is_gemma else 1)
  for i in range(config.num_layers):
    of_layer = jax.tree.map(lambda w, i=i: w[i], params["layers"])
    x = attention(x, of_layer["attention"], sees_all=i % 2 == 1)
    x = mlp(x, of_layer["mlp"])
  x = norm(x, params.get("norm"))
  head = params["head"] if "head" in params else params["embedding"].T
  return capped(x @ head, config.logits_soft_cap)


@pytest.mark.parametrize("family", CONFIGS)
def test_decoder_matches_numpy(family):
  config = CONFIGS[family]
  graph, params = nnx.split(
    nnx.eval_shape(
      lambda: Decoder(config, recipes.bf16(), dtype="float32", rngs=nnx.Rngs(0))
    )
  )
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda w: rng.normal(0, 0.25, w.shape).astype(w.dtype), params
  )
  logits = lambda params, x: nnx.merge(graph, params).logits(x)  # noqa: E731
  got = jit(logits)(params, TOKENS)
  pure = jax.tree.map(np.float64, nnx.to_pure_dict(params))
  assert_close(got, in_numpy(config, pure, TOKENS))


def layers_of(name):
  config = PRESETS[name]().model
  model = nnx.eval_shape(
    lambda: Decoder(config, recipes.coat(), rngs=nnx.Rngs(0))
  )
  return model.layers.attention, model.layers.mlp


def test_llama3_8b_preset_has_the_published_sizes():
  attention, mlp = layers_of("llama3_8b")
  assert attention.rope_theta == 500_000
  assert (attention.num_heads, attention.num_kv_heads) == (32, 8)
  assert attention.head_dim == 128 and attention.causal
  assert attention.out.kernel.shape == (32, 4096, 4096)
  assert mlp.gate_up.kernel.shape == (32, 4096, 2, 14336)


def test_initial_projections_to_the_residual_stream_shrink_with_depth():
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
      nnx.state(Decoder(config, recipes.bf16(), rngs=nnx.Rngs(0)), nnx.Param)
    )
  )()
  stddev = {
    keystr(path, simple=True, separator="/"): np.std(leaf)
    for path, leaf in jax.tree.leaves_with_path(params)
  }
  # Each leaf has at least 16384 values, so four standard errors of its standard
  # deviation are 2.2 %.
  assert stddev == {
    "embedding": pytest.approx(0.02, rel=0.022),
    "head": pytest.approx(0.02, rel=0.022),
    "layers/attention/qkv/linear/kernel": pytest.approx(0.02, rel=0.022),
    "layers/mlp/gate_up/kernel": pytest.approx(0.02, rel=0.022),
    # This is 0.02 / sqrt(16), because 8 layers have two such projections each.
    "layers/attention/out/kernel": pytest.approx(0.005, rel=0.022),
    "layers/mlp/down/kernel": pytest.approx(0.005, rel=0.022),
    "layers/attention/qkv/norm/scale": 0,
    "layers/mlp/norm/scale": 0,
    "norm/scale": 0,
  }
