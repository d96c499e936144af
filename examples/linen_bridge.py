# SPDX-License-Identifier: Apache-2.0
"""COAT's blocks inside a Flax Linen model, through `flax.nnx.bridge`.

  python -m examples.linen_bridge

`nnx.bridge.to_linen` makes a Linen module of an NNX class and the arguments of
its constructor. Its parameters are then Linen variables like those of any other
submodule, and what it saves for the backward pass is still FP8.
Here a two-layer decoder learns eight sequences that repeat themselves.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from coat_jax import coat_adamw, recipe
from coat_jax.layers import Attention, GatedMLP

VOCABULARY, WIDTH, STEPS = 16, 32, 60


class Decoder(linen.Module):
  """Token logits, from Linen layers and COAT's blocks."""

  @linen.compact
  def __call__(self, tokens):
    x = linen.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16)(tokens)
    for i in range(2):
      attention = nnx.bridge.to_linen(
        Attention, WIDTH, 4, recipe=recipe.coat(), name=f"attention_{i}"
      )
      mlp = nnx.bridge.to_linen(
        GatedMLP, WIDTH, 96, recipe=recipe.coat(), name=f"mlp_{i}"
      )
      x = mlp(attention(x))
    return linen.Dense(VOCABULARY)(linen.RMSNorm()(x))


def main(steps: int = STEPS) -> tuple[float, float]:
  """Trains the model; returns its first and its last loss."""
  period = jax.random.randint(jax.random.key(0), (8, 4), 0, VOCABULARY)
  tokens = jnp.tile(period, (1, 5))
  model = Decoder()
  params = jax.jit(model.init)(jax.random.key(1), tokens[:, :-1])
  optimizer = coat_adamw(1e-2)
  state = jax.jit(optimizer.init)(params)

  def loss_of(params):
    logits = model.apply(params, tokens[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
    )
    return jnp.mean(nats)

  @jax.jit
  def step(params, state):
    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  losses = []
  for i in range(steps):
    params, state, loss = step(params, state)
    losses.append(float(loss))
    if i % 20 == 0:
      print(f"step {i}: loss {loss:.3f}")
  print(f"step {steps - 1}: loss {losses[-1]:.3f}")
  return losses[0], losses[-1]


if __name__ == "__main__":
  main()
