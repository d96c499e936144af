# SPDX-License-Identifier: Apache-2.0
"""Runs the optimizer's step inside the backward pass of your own model.

  python -m examples.step_in_backward

The model is a decoder in plain JAX, without our layers. Its output layer uses
the embedding's weights. The model learns eight periodic sequences. Weights are
BF16 and rounded stochastically, and moments are FP8.

For comparison, we also compile a step that computes all gradients first, and
print the temporary memory of both steps.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from coat_jax.optimizer import Clipping, fused_coat_adamw, step_in_backward

LAYERS, WIDTH, HEADS, VOCABULARY, STEPS = 4, 128, 4, 32, 30


def initial_params(key):
  """Creates BF16 weights; the layers' weights are stacked, [LAYERS, ...]."""
  shapes = {
    "qkv": (LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
    "out": (LAYERS, WIDTH, WIDTH),
    "up": (LAYERS, WIDTH, 4 * WIDTH),
    "down": (LAYERS, 4 * WIDTH, WIDTH),
  }
  keys = jax.random.split(key, len(shapes) + 1)

  def draw(key, shape):
    return (0.02 * jax.random.normal(key, shape)).astype(jnp.bfloat16)

  named = zip(keys[1:], shapes.items(), strict=True)
  return {
    "embedding": draw(keys[0], (VOCABULARY, WIDTH)),
    "layers": {name: draw(key, shape) for key, (name, shape) in named},
  }


def normalize(x):
  x = x.astype(jnp.float32)
  return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def layer(params, x):
  """Applies one layer, with parameters `params`, to x [B, T, D]."""
  h = normalize(x).astype(jnp.bfloat16)
  q, k, v = jnp.moveaxis(jnp.einsum("btd,dcnh->btcnh", h, params["qkv"]), 2, 0)
  heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
  x = x + heads.reshape(x.shape) @ params["out"]
  h = normalize(x).astype(jnp.bfloat16)
  return x + jax.nn.gelu(h @ params["up"]) @ params["down"]


def embed(tokens, params):
  """Runs the part of the model before the stack of layers."""
  return params["embedding"][tokens]


def loss_of(targets, params, x):
  """Runs the part of the model after the layers and computes the loss."""
  logits = normalize(x) @ params["embedding"].T.astype(jnp.float32)
  losses = optax.losses.softmax_cross_entropy_with_integer_labels
  return jnp.mean(losses(logits, targets))


def make_step(optimizer, clip):
  """Builds a step that updates each layer once its gradients are computed."""

  def step(params, state, clip_state, tokens):
    done = step_in_backward(
      optimizer,
      params,
      state,
      before=functools.partial(embed, tokens[:, :-1]),
      layer=jax.checkpoint(layer),
      after=functools.partial(loss_of, tokens[:, 1:]),
      stack="layers",
      clip=clip,
      clip_state=clip_state,
    )
    return done.params, done.state, done.clip_state, done.loss

  return step


def make_ordinary_step(optimizer):
  """Builds a step that computes all gradients first, for comparison."""

  def loss(params, tokens):
    def forward(x, layer_params):
      return jax.checkpoint(layer)(layer_params, x), None

    x = embed(tokens[:, :-1], params)
    x, _ = lax.scan(forward, x, params["layers"])
    return loss_of(tokens[:, 1:], params, x)

  def step(params, state, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return *optimizer.apply(grads, state, params), value

  return step


def main() -> list[float]:
  """Trains the model; prints and returns its losses."""
  optimizer = fused_coat_adamw(3e-3, b2=0.95, weight_decay=0.1)
  clip = Clipping("share", max_norm=1.0)
  params = initial_params(jax.random.key(0))
  state = optimizer.init(params)
  clip_state = clip.init(params)
  period = jax.random.randint(jax.random.key(1), (8, 8), 0, VOCABULARY)
  tokens = jnp.tile(period, (1, 5))[:, :33]

  compiled = {
    "all gradients first": jax.jit(
      make_ordinary_step(optimizer), donate_argnums=(0, 1)
    ).lower(params, state, tokens),
    "in the backward pass": jax.jit(
      make_step(optimizer, clip), donate_argnums=(0, 1, 2)
    ).lower(params, state, clip_state, tokens),
  }
  compiled = {name: lowered.compile() for name, lowered in compiled.items()}
  for name, program in compiled.items():
    temporary = program.memory_analysis().temp_size_in_bytes
    print(f"{name}: {temporary / 1e6:.1f} MB besides weights and moments")

  losses = []
  for _ in range(STEPS):
    params, state, clip_state, loss = compiled["in the backward pass"](
      params, state, clip_state, tokens
    )
    losses.append(float(loss))
  print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
  return losses


if __name__ == "__main__":
  main()
