# SPDX-License-Identifier: Apache-2.0
"""Uses COAT's blocks inside a Flax Linen model, through `flax.nnx.bridge`.

  python -m examples.linen_bridge

`nnx.bridge.to_linen` makes a Linen module from an NNX class and the arguments
of its constructor. The module's parameters are Linen variables, and keep the
axis names that `linen.with_partitioning` sets. The example uses these names for
FSDP on all available devices. As in NNX, the blocks save FP8 activations for
the backward pass.

The example trains a two-layer decoder on eight periodic sequences.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

from coat_jax import coat_adamw, recipes
from coat_jax.layers import MLP, Attention
from coat_jax.optimizer import state_shardings

VOCABULARY, WIDTH, STEPS = 16, 32, 60


def split_rows(init: linen.initializers.Initializer, *columns: None):
  """Wraps an initializer so that its array's rows are split over devices."""
  return linen.with_partitioning(init, ("fsdp", *columns))


class Decoder(linen.Module):
  """Computes token logits with Linen layers and COAT's blocks."""

  @linen.compact
  def __call__(self, tokens):
    kernel_init = split_rows(linen.initializers.lecun_normal(), None)
    options = dict(
      recipe=recipes.coat(),
      kernel_init=kernel_init,
      scale_init=split_rows(linen.initializers.ones),
    )
    x = linen.Embed(
      VOCABULARY,
      WIDTH,
      dtype=jnp.bfloat16,
      embedding_init=split_rows(linen.initializers.normal(1.0), None),
    )(tokens)
    for i in range(2):
      attention = nnx.bridge.to_linen(
        Attention, WIDTH, 4, name=f"attention_{i}", **options
      )
      mlp = nnx.bridge.to_linen(MLP, WIDTH, 96, name=f"mlp_{i}", **options)
      x = mlp(attention(x))
    x = linen.RMSNorm()(x)
    return linen.Dense(VOCABULARY, kernel_init=kernel_init)(x)


class State(NamedTuple):
  """The state that a step updates.

  Attributes:
    params: the model's parameters, in Linen's boxes with axis names.
    optimizer: the state of `coat_adamw`.
  """

  params: Any
  optimizer: Any


def make_state(
  model: Decoder,
  tokens: jax.Array,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
) -> State:
  """Creates parameters and optimizer state, split over the devices."""
  key = jax.random.key(1)
  params = jax.eval_shape(model.init, key, tokens)
  shardings = linen.get_sharding(params, mesh)
  state = state_shardings(optimizer.init, params, shardings)
  params = jax.jit(model.init, out_shardings=shardings)(key, tokens)
  return State(params, jax.jit(optimizer.init, out_shardings=state)(params))


def main(steps: int = STEPS) -> tuple[float, float]:
  """Trains the model; returns the first and the last loss."""
  period = jax.random.randint(jax.random.key(0), (8, 4), 0, VOCABULARY)
  tokens = jnp.tile(period, (1, 5))
  devices = jax.make_mesh(
    (jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,)
  )
  tokens = jax.device_put(tokens, NamedSharding(devices, P("fsdp")))
  model, optimizer = Decoder(), coat_adamw(1e-2)
  state = make_state(model, tokens[:, :-1], optimizer, devices)

  def loss_of(params):
    logits = model.apply(params, tokens[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
    )
    return jnp.mean(nats)

  @jax.jit
  def step(state):
    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    updates, moments = optimizer.update(
      gradients, state.optimizer, state.params
    )
    return State(optax.apply_updates(state.params, updates), moments), loss

  losses = []
  for i in range(steps):
    state, loss = step(state)
    losses.append(float(loss))
    if i % 20 == 0:
      print(f"step {i}: loss {loss:.3f}")
  print(f"step {steps - 1}: loss {losses[-1]:.3f}")
  return losses[0], losses[-1]


if __name__ == "__main__":
  main()
