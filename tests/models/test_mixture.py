# SPDX-License-Identifier: Apache-2.0
"""Compares an MoE decoder and its auxiliary loss with plain formulas.

The formulas run every expert on every token, and multiply by 0 the outputs of
experts that were not chosen. They compute losses in float64 with NumPy, and
gradients in f32 with JAX.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import Batch, Decoder, ModelConfig, loss_fn
from tests.comparing import assert_close, jit
from tests.matrices import quick

E, K, LAYERS = 5, 2, 3
CONFIG = ModelConfig(
  family="qwen3_moe",
  num_layers=LAYERS,
  d_model=32,
  d_ff=24,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  vocab_size=40,
  rope_theta=50.0,
  norm_eps=0.1,
  num_experts=E,
  experts_per_token=K,
  normalize_experts=True,
  # This makes the auxiliary loss about as large as the cross-entropy.
  auxiliary_loss=0.7,
)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 40, (2, 13), np.int32)
# Each row has two documents. The first row ends with padding, which has no
# targets.
SEGMENTS = np.int32([[1] * 5 + [2] * 6 + [0] * 2, [1] * 9 + [2] * 4])
IS_TARGET = (SEGMENTS > 0) & (RNG.random(TOKENS.shape) < 0.8)


def norm(xp, x, scale):
  x = x / xp.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps)
  return x * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def rope(xp, x, position):
  half = x.shape[-1] // 2
  i = np.arange(half)[None, None, None]
  angle = position[..., None, None] * CONFIG.rope_theta ** (-i / half)
  a, b = x[..., :half], x[..., half:]
  cos, sin = xp.cos(angle), xp.sin(angle)
  return xp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(xp, x, p, i, segments):
  n, kv, h = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_width
  batch, length = segments.shape
  y = norm(xp, x, p["qkv"]["norm"]["scale"][i])
  y = (y @ p["qkv"]["linear"]["kernel"][i]).reshape(batch, length, kv, -1, h)
  q, k, v = (
    y[..., :-2, :].reshape(batch, length, n, h),
    y[..., -2, :],
    y[..., -1, :],
  )
  firsts = np.diff(segments, axis=1, prepend=-1) != 0
  place = np.arange(length)[None]
  position = place - np.maximum.accumulate(np.where(firsts, place, 0), axis=1)
  q = rope(xp, norm(xp, q, p["q_norm"]["scale"][i]), position)
  k = rope(xp, norm(xp, k, p["k_norm"]["scale"][i]), position)
  k, v = (each.repeat(n // kv, 2) for each in (k, v))
  seen = np.tril(np.ones((length, length), bool))[None]
  seen = (seen & (segments[:, None] == segments[..., None]))[:, None]
  weights = xp.exp(xp.einsum("btnh,bsnh->bnts", q, k) / h**0.5) * seen
  weights = weights / weights.sum(-1, keepdims=True)
  y = xp.einsum("bnts,bsnh->btnh", weights, v)
  return x + y.reshape(batch, length, n * h) @ p["out"]["kernel"][i]


def mixture(xp, x, p, i, config):
  """Returns the output, each token's experts, and router probabilities."""
  y = norm(xp, x, p["norm"]["scale"][i])
  logits = y @ p["router"][i]
  probability = xp.exp(logits) / xp.exp(logits).sum(-1, keepdims=True)
  is_chosen = probability >= xp.sort(probability, -1)[..., -K:][..., :1]
  weight = probability * is_chosen
  if config.normalize_experts:
    weight = weight / weight.sum(-1, keepdims=True)
  gate, up = xp.einsum("btd,edcf->cbtef", y, p["gate_up"][i])
  z = gate / (1 + xp.exp(-gate)) * up
  out = xp.einsum("bte,btef,efd->btd", weight, z, p["down"][i])
  return x + out, is_chosen, probability


def oracle(xp, config, params, segments, is_target):
  """Returns cross-entropy, and the auxiliary loss without its coefficient."""
  tokens, targets = TOKENS[:, :-1], TOKENS[:, 1:]
  inputs = segments[:, :-1]
  x = params["embedding"][tokens]
  chosen, probabilities = [], []
  for i in range(LAYERS):
    x = attention(xp, x, params["layers"]["attention"], i, inputs)
    x, *routing = mixture(xp, x, params["layers"]["mlp"], i, config)
    chosen.append(routing[0].reshape(-1, E))
    probabilities.append(routing[1].reshape(-1, E))
  x = norm(xp, x, params["norm"]["scale"])
  logits = x @ params["head"]
  log_z = xp.log(xp.exp(logits).sum(-1))
  nats = log_z - xp.take_along_axis(logits, targets[..., None], -1)[..., 0]
  counted = is_target[:, 1:] & (segments[:, 1:] == inputs)
  entropy = (nats * counted).sum() / counted.sum()
  # Like transformers, concatenate the tokens of all layers.
  f = xp.concatenate(chosen).mean(0)
  return entropy, E * (f * xp.concatenate(probabilities).mean(0)).sum()


def build(config):
  graph, params = nnx.split(
    nnx.eval_shape(
      lambda: Decoder(config, recipes.bf16(), dtype="float32", rngs=nnx.Rngs(0))
    ),
    nnx.Param,
  )
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda w: jnp.asarray(rng.normal(0, 0.3, w.shape), w.dtype),
    nnx.to_pure_dict(params),
  )
  return graph, params


@pytest.mark.parametrize(
  "normalize, is_packed", quick(1, [(True, True), (False, False)])
)
def test_loss_and_gradients_of_experts_match_the_formulas(normalize, is_packed):
  config = dataclasses.replace(CONFIG, normalize_experts=normalize)
  graph, params = build(config)
  segments, is_target = np.ones_like(SEGMENTS), np.ones_like(IS_TARGET)
  batch = jnp.asarray(TOKENS)
  if is_packed:
    segments, is_target = SEGMENTS, IS_TARGET
    batch = Batch.make(batch, jnp.asarray(segments), jnp.asarray(is_target))

  @jit
  def run(params):
    def loss(params):
      return loss_fn(nnx.merge(graph, params), batch)

    evaluated = nnx.merge(graph, params)
    evaluated.eval()
    return jax.value_and_grad(loss)(params), loss_fn(evaluated, batch)

  (loss, gradients), evaluated = run(params)
  exact = jax.tree.map(np.float64, params)
  entropy, auxiliary = oracle(np, config, exact, segments, is_target)
  assert K < auxiliary < E and float(evaluated) == pytest.approx(entropy)
  assert float(loss) == pytest.approx(entropy + 0.7 * auxiliary)

  def total(params):
    entropy, auxiliary = oracle(jnp, config, params, segments, is_target)
    return entropy + 0.7 * auxiliary

  assert_close(gradients, jit(jax.grad(total))(params), 1e-4)
  assert np.all(np.any(gradients["layers"]["mlp"]["router"], axis=(1, 2)))
