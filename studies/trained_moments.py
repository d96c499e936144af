# SPDX-License-Identifier: Apache-2.0
"""Trains a small model to get realistic Adam moments for studies of codecs.

The model is a byte-level Llama of 2.8 million parameters, trained on the source
text of Python's standard library with f32 moments. Random numbers would not be
realistic, because the accuracy of a codec depends on the dynamic range of the
values within a group.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from benchmarks.harness import say
from coat_jax import recipes
from coat_jax.models.config import ModelConfig
from coat_jax.models.decoder import Decoder
from coat_jax.models.loss import loss_fn
from train.data.batches import train_iterator
from train.data.tokens import DataConfig, TokenSource, load_tokens

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
# The group size of all codecs. The widths of the model are multiples of 128.
GROUP_SIZE = 128
# Optimizers do not encode leaves with fewer elements than this.
_SMALLEST_LEAF = 4096


class Moments(NamedTuple):
  """Both moments of all large leaves, as groups: f32 [groups, 128]."""

  mu: jax.Array
  nu: jax.Array


class Trained(NamedTuple):
  """Parameters and moments, f32 in nested dicts, and the last step's loss."""

  params: Any
  mu: Any
  nu: Any
  loss: float


def train_moments(
  steps: int, *, model: ModelConfig = MODEL, batch: int = 8, seq: int = 64
) -> tuple[Moments, dict[str, slice]]:
  """Trains a byte-level model; returns the result of `in_groups`."""
  tokens = load_tokens(DataConfig(), model.vocab_size)
  trained = train_model(model, tokens, steps=steps, batch=batch, seq=seq)
  return in_groups(trained.mu, trained.nu)


def train_model(
  model: ModelConfig,
  tokens: TokenSource,
  *,
  steps: int,
  batch: int,
  seq: int,
  rate: float = 2e-3,
  dtype: DTypeLike = jnp.bfloat16,
) -> Trained:
  """Trains a model with the `bf16` recipe and f32 moments."""
  graph, params = nnx.split(
    Decoder(model, recipes.bf16(), dtype=dtype, rngs=nnx.Rngs(0)), nnx.Param
  )
  params = nnx.to_pure_dict(params)
  size = sum(x.size for x in jax.tree.leaves(params))
  say(
    f"training {size:,} parameters for {steps} steps of {batch} x {seq} tokens"
  )
  batches = train_iterator(tokens, seq_len=seq, batch_size=batch, seed=0)
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, rate, steps // 10, steps, rate / 10
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

  loss = jnp.float32(jnp.nan)
  for i in range(steps):
    params, state, loss = step(params, state, next(batches)["tokens"])
    if i % 50 == 0 or i == steps - 1:
      say(f"  step {i + 1}: loss {float(loss):.3f}")
  mu, nu = (optax.tree.get(state, name) for name in ("mu", "nu"))
  return Trained(params, mu, nu, float(loss))


def in_groups(mu, nu) -> tuple[Moments, dict[str, slice]]:
  """Cuts the moments of large leaves into groups.

  Returns the groups, and the slice of groups for each part of the model.
  """
  leaves, parts = [], {}
  for (path, mu_leaf), nu_leaf in zip(
    jax.tree.leaves_with_path(mu), jax.tree.leaves(nu), strict=True
  ):
    if mu_leaf.size < _SMALLEST_LEAF:
      continue
    leaf = Moments(*(x.reshape(-1, GROUP_SIZE) for x in (mu_leaf, nu_leaf)))
    # A part is "embedding", "head" or "layers". Its leaves are adjacent.
    part = path[0].key
    start = parts[part].start if part in parts else sum(map(_groups, leaves))
    leaves.append(leaf)
    parts[part] = slice(start, sum(map(_groups, leaves)))
  return jax.tree.map(lambda *x: jnp.concatenate(x), *leaves), parts


def _groups(moments: Moments) -> int:
  return len(moments.mu)
