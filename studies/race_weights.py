# SPDX-License-Identifier: Apache-2.0
"""AdamW whose weights are stored in E4M3 or in BF16, without an f32 copy.

`studies.codec_race` compares it with AdamW on f32 weights. The storage is
simulated: parameters are f32 arrays, but large matrices contain only values
that the format can represent. Moments are f32.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from coat_jax import codecs
from coat_jax.numerics import stochastic
from coat_jax.optimizer import default_quantize_mask
from coat_jax.optimizer.masks import leaf_paths

Storage = Literal["E4M3, fed back", "E4M3, stochastic", "BF16, stochastic"]


class _State(NamedTuple):
  count: Array
  mu: Any
  nu: Any


def adamw(
  rate: optax.Schedule,
  b1: float,
  b2: float,
  eps: float,
  *,
  weight_decay: float,
  decays: Any,
  storage: Storage,
  seed: Any,
) -> optax.GradientTransformation:
  """Returns AdamW that rounds large matrices after each step.

  A step decays a weight and then subtracts r * m, where m is the weight's first
  moment and r the product of AdamW's other factors. "E4M3, fed back" rounds the
  result to nearest, in groups of 128 with one scale each. If rounding lowers
  the weight by e, the step adds e * (1 - 1 / b1) / r to m, so that later steps
  compensate for e. Source: ECO, arXiv:2601.22101.
  """

  def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return _State(jnp.zeros([], jnp.int32), zeros, zeros)

  def update(grads, state, params):
    count = optax.safe_increment(state.count)
    lr = rate(state.count)
    is_decayed = jax.tree.leaves(decays(params))
    treedef = jax.tree.structure(params)
    columns = [jax.tree.leaves(x) for x in (grads, state.mu, state.nu)]
    rows = zip(leaf_paths(params), *columns, is_decayed, strict=True)
    out = []
    for i, ((path, p), g, m, v, is_own) in enumerate(rows):
      m = b1 * m + (1 - b1) * g
      v = b2 * v + (1 - b2) * g * g
      root = jnp.sqrt(v / (1 - b2**count)) + eps
      own_rate = lr / (1 - b1**count) / root
      new = p * (1 - lr * weight_decay * is_own) - own_rate * m
      if default_quantize_mask(path, p):
        key = stochastic.leaf_key(seed, count, i)
        stored = _stored(new, storage, key)
        if storage == "E4M3, fed back":
          m += (1 - 1 / b1) * (new - stored) / own_rate
        new = stored
      out.append((new - p, m, v))
    updates, mu, nu = (treedef.unflatten(x) for x in zip(*out, strict=True))
    return updates, _State(count, mu, nu)

  return optax.GradientTransformation(init, update)


def _stored(x: Array, storage: Storage, key: Array) -> Array:
  """Rounds x to the storage format, and casts it back to f32."""
  words = stochastic.random_words(key, x.shape)
  if storage == "BF16, stochastic":
    return stochastic.round_to_bfloat16(x, words).astype(jnp.float32)
  is_nearest = storage == "E4M3, fed back"
  group = codecs.fp8(rounding="nearest" if is_nearest else "stochastic").mu
  noise = None if is_nearest else stochastic.uniform(words)
  return group.decode(group.encode(x, noise))
