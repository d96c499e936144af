# SPDX-License-Identifier: Apache-2.0
"""Trains with FSDP on explicit mesh axes, with recipes that name no axes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import P

from coat_jax import coat_adamw, codecs, recipes
from coat_jax.layers import MLP
from coat_jax.models import Decoder, ModelConfig, loss_fn
from tests.comparing import jit
from tests.layers.mesh.placing import (
  assert_sharded_like,
  bytes_of_device,
  normal,
  place,
)
from tests.matrices import quick

B, T, D, F = 8, 16, 64, 128


def two_mlps(recipe):
  """Returns parameters, loss(parameters, batch), and a batch."""

  class Model(nnx.Module):
    def __init__(self, rngs):
      shared = dict(recipe=recipe, dtype=jnp.float32, rngs=rngs)
      self.first, self.second = (MLP(D, F, **shared) for _ in range(2))

  graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)

  def loss(params, x):
    model = nnx.merge(graph, params)
    return jnp.mean((model.second(model.first(x)) - jnp.sin(x)) ** 2)

  return nnx.to_pure_dict(params), loss, normal([(B, T, D)])[0]


def decoder(recipe):
  """Returns what `two_mlps` does, for a decoder that scans over layers."""
  sizes = dict(num_layers=2, d_model=D, d_ff=160, num_heads=4, num_kv_heads=2)
  config = ModelConfig(family="llama", vocab_size=384, **sizes)
  model = Decoder(config, recipe, dtype=jnp.float32, rngs=nnx.Rngs(0))
  graph, params = nnx.split(model, nnx.Param)
  tokens = jax.random.randint(jax.random.key(0), (B, T + 1), 0, 384)

  def loss(params, tokens):
    return loss_fn(nnx.merge(graph, params), tokens)

  return nnx.to_pure_dict(params), loss, tokens


def rows_over_fsdp(path, w):
  is_stack = "layers" in jax.tree_util.keystr(path)
  if w.ndim < 2 + is_stack:
    return P()
  return P(None, "fsdp") if is_stack else P("fsdp")


@pytest.mark.parametrize(
  "make, recipe, tolerance",
  quick(
    0,
    [
      # A different summation order may move a value across a rounding boundary,
      # so losses differ (docs/sharding.md).
      (two_mlps, recipes.coat, 5e-4),
      (decoder, recipes.coat, 5e-4),
      # Layers are in f32, so only the order of summation differs.
      (decoder, recipes.bf16, 1e-4),
    ],
  ),
)
def test_training_with_fsdp_matches_one_device(make, recipe, tolerance):
  params, loss_of, batch = make(recipe())
  optimizer = coat_adamw(3e-3, codec=codecs.coat(group_size=32))

  @jit
  def step(params, state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, state = optimizer.update(gradients, state, params)
    return loss, optax.apply_updates(params, updates), state

  def losses(params, state, batch):
    found = []
    for _ in range(3):
      loss, params, state = step(params, state, batch)
      found.append(float(loss))
    return found, (params, state)

  wanted, _ = losses(params, optimizer.init(params), batch)
  mesh = jax.make_mesh((4, 2), ("data", "fsdp"))
  params = place(mesh, rows_over_fsdp, params)
  batch = place(mesh, lambda *_: P(("data", "fsdp")), batch)
  with jax.set_mesh(mesh):
    state = jax.jit(optimizer.init)(params)
    found, after = losses(params, state, batch)
  assert found == pytest.approx(wanted, rel=tolerance)
  assert found[2] < found[1] < found[0]
  assert_sharded_like(after, (params, state))
  # Weights and moments are split in two; norms and scalars are not.
  leaves = jax.tree.leaves(after)
  everything = sum(x.nbytes for x in leaves)
  device = sum(map(bytes_of_device, leaves))
  assert device == pytest.approx(everything / 2, rel=0.02)
