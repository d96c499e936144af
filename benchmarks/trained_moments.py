# SPDX-License-Identifier: Apache-2.0
"""Moments of Adam to measure codecs on, of a model trained here and now.

A byte-level Llama of 2.8 million parameters learns the source text of Python's
standard library, with f32 moments; random numbers would not have the ranges
within a group that decide how good a codec is.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.harness import say
from coat_jax import recipe
from coat_jax.models.config import ModelConfig
from coat_jax.models.decoder import Decoder, loss_fn
from train.data.batches import train_iterator
from train.data.tokens import DataConfig, load_tokens

MODEL = ModelConfig(
  family="llama",
  num_layers=4,
  d_model=256,
  d_ff=512,
  num_heads=4,
  num_kv_heads=4,
  vocab_size=256,
)
B1, B2, EPS = 0.9, 0.95, 1e-8
# Of every codec measured; the model's widths are multiples of it.
GROUP_SIZE = 128
# Leaves below it an optimizer keeps in f32.
_SMALLEST_LEAF = 4096


class Moments(NamedTuple):
  """Both moments of all leaves, cut into groups: f32 [groups, 128]."""

  mu: jax.Array
  nu: jax.Array


def train_moments(
  steps: int, *, model: ModelConfig = MODEL, batch: int = 8, seq: int = 64
) -> tuple[Moments, dict[str, slice]]:
  """Trains a byte-level model and returns the moments of its large leaves.

  Args:
    steps: Updates, with AdamW in f32 (b1 0.9, b2 0.95).
    model: Shape of the model.
    batch: Sequences a step.
    seq: Tokens a sequence.

  Returns:
    Moments after the last step, of the leaves that an optimizer would encode,
    and which groups belong to which part of the model.
  """
  graph, params = nnx.split(
    Decoder(model, recipe.bf16(), rngs=nnx.Rngs(0)), nnx.Param
  )
  size = sum(x.size for x in jax.tree.leaves(params))
  say(
    f"training {size:,} parameters for {steps} steps of {batch} x {seq} bytes"
  )
  tokens = load_tokens(DataConfig(), model.vocab_size)
  batches = train_iterator(tokens, seq_len=seq, batch_size=batch, seed=0)
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, 2e-3, steps // 10, steps, 2e-4
  )
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, B1, B2, EPS, weight_decay=0.1),
  )
  state = optimizer.init(params)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, tokens):
    loss, grads = jax.value_and_grad(
      lambda params: loss_fn(nnx.merge(graph, params), tokens)
    )(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  for i in range(steps):
    params, state, loss = step(params, state, next(batches)["tokens"])
    if i % 50 == 0 or i == steps - 1:
      say(f"  step {i + 1}: loss {float(loss):.3f}")
  return in_groups(optax.tree.get(state, "mu"), optax.tree.get(state, "nu"))


def in_groups(mu, nu) -> tuple[Moments, dict[str, slice]]:
  """Cuts the moments' large leaves into groups, and says whose they are."""
  leaves, parts = [], {}
  for (path, mu_leaf), nu_leaf in zip(
    jax.tree.leaves_with_path(mu), jax.tree.leaves(nu), strict=True
  ):
    if mu_leaf.size < _SMALLEST_LEAF:
      continue
    leaf = Moments(*(x.reshape(-1, GROUP_SIZE) for x in (mu_leaf, nu_leaf)))
    part = path[0].key  # embedding, head, layers: neighbours in the tree
    start = parts[part].start if part in parts else sum(map(_groups, leaves))
    leaves.append(leaf)
    parts[part] = slice(start, sum(map(_groups, leaves)))
  return jax.tree.map(lambda *x: jnp.concatenate(x), *leaves), parts


def _groups(moments: Moments) -> int:
  return len(moments.mu)
