# SPDX-License-Identifier: Apache-2.0
"""Compares loaded models with NumPy, for options that no golden model uses.

The NumPy model reads tensors by their names in the checkpoint, and the keys of
its config.json. It uses none of the code that loads a model.
"""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import load_hf
from tests.comparing import assert_close, jit
from tests.matrices import quick
from tests.models.hf.folders import DATA, copied, expected, tensors_of


def frequencies(keys, size):
  """Returns RoPE's frequencies over `size` channels, and its magnitude."""
  rope = keys["rope_parameters"]
  theta, kind = rope["rope_theta"], rope["rope_type"]
  frequency = theta ** (-2 * np.arange(size // 2) / size)
  if kind == "default":
    return frequency, 1.0
  factor = rope["factor"]
  if kind == "linear":
    return frequency / factor, 1.0
  # arXiv:2309.00071, section 3.2: the frequency of a channel that turns more
  # than 32 times in the original length is kept, and that of a channel that
  # turns less than once is divided.
  length = rope["original_max_position_embeddings"]
  first, last = (
    size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
    for turns in (32, 1)
  )
  first, last = max(math.floor(first), 0), min(math.ceil(last), size - 1)
  divided = np.clip((np.arange(size // 2) - first) / (last - first), 0, 1)
  frequency = frequency * (1 - divided + divided / factor)
  return frequency, 0.1 * math.log(factor) + 1


def logits_in_numpy(folder, tokens):
  """Computes logits of a Llama, OLMo or Phi-3 in float64."""
  keys = json.loads((folder / "config.json").read_text())
  w = {name: np.float64(x) for name, x in tensors_of(folder).items()}
  heads, shared = keys["num_attention_heads"], keys["num_key_value_heads"]
  width = keys["hidden_size"] // heads
  turned = int(
    width * keys["rope_parameters"].get("partial_rotary_factor", 1.0)
  )
  frequency, magnitude = frequencies(keys, turned)
  angle = np.arange(tokens.shape[1])[:, None] * frequency
  turn = magnitude * np.exp(1j * angle)[:, None]

  def norm(x, name):
    if keys["model_type"] == "olmo":
      x = x - x.mean(-1, keepdims=True)
      return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    mean = (x**2).mean(-1, keepdims=True) + keys["rms_norm_eps"]
    return x / np.sqrt(mean) * w[name]

  def rope(x):
    half = turned // 2
    pairs = (x[..., :half] + 1j * x[..., half:turned]) * turn
    return np.concatenate([pairs.real, pairs.imag, x[..., turned:]], -1)

  def products(x, start, names, fused, sizes):
    if start + fused in w:
      return np.split(x @ w[start + fused].T, np.cumsum(sizes)[:-1], axis=-1)
    return [x @ w[f"{start}{name}_proj.weight"].T for name in names]

  def attention(x, start):
    sizes = [heads * width, shared * width, shared * width]
    qkv = products(x, start, "qkv", "qkv_proj.weight", sizes)
    if keys.get("clip_qkv") is not None:
      qkv = [np.clip(each, -keys["clip_qkv"], keys["clip_qkv"]) for each in qkv]
    q, k, v = (each.reshape(*tokens.shape, -1, width) for each in qkv)
    q, k = rope(q), rope(k)
    k, v = (each.repeat(heads // shared, axis=2) for each in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(width)
    seen = np.tril(np.ones(scores.shape[-2:], bool))
    p = np.where(seen, np.exp(scores), 0)
    out = np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)
    return out.reshape(*tokens.shape, -1) @ w[start + "o_proj.weight"].T

  def mlp(x, start):
    sizes = [keys["intermediate_size"]] * 2
    gate, up = products(x, start, ("gate", "up"), "gate_up_proj.weight", sizes)
    return gate / (1 + np.exp(-gate)) * up @ w[start + "down_proj.weight"].T

  x = w["model.embed_tokens.weight"][tokens]
  for i in range(keys["num_hidden_layers"]):
    layer = f"model.layers.{i}."
    x += attention(
      norm(x, layer + "input_layernorm.weight"), layer + "self_attn."
    )
    y = norm(x, layer + "post_attention_layernorm.weight")
    x += mlp(y, layer + "mlp.")
  x = norm(x, "model.norm.weight")
  return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def rope_of(**fields):
  return {"rope_parameters": {"rope_theta": 10000.0, **fields}}


YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=32)
CASES = [
  # Clip at a tenth of the largest value, so that many are clipped.
  ("olmo", {"clip_qkv": 0.05}),
  ("phi3", rope_of(rope_type="default", partial_rotary_factor=0.75)),
  ("llama", rope_of(**YARN)),
  ("llama", rope_of(rope_type="linear", factor=4.0)),
  ("phi3", rope_of(**YARN, partial_rotary_factor=0.5)),
]


@pytest.mark.parametrize("name, keys", quick(2, CASES))
def test_logits_match_the_formulas(name, keys, tmp_path):
  folder = copied(tmp_path / "m", name, **keys)
  golden = expected(name)
  tokens = golden["input_ids"].astype(np.int32)
  want = logits_in_numpy(folder, tokens)
  # The effect of these keys is far above the tolerance.
  assert np.max(np.abs(want - golden["logits"])) > 0.01 * np.max(np.abs(want))
  model = load_hf(folder, recipe=recipes.bf16(), dtype=jnp.float32)
  graph, params = nnx.split(model)
  run = jit(lambda params, x: nnx.merge(graph, params).logits(x))
  found = run(params, tokens)
  assert_close(found, want, 1e-5)


def test_numpy_model_matches_transformers():
  for name in ("llama", "olmo", "phi3"):
    golden = expected(name)
    found = logits_in_numpy(DATA / name, golden["input_ids"])
    assert_close(found, golden["logits"], 1e-5)
