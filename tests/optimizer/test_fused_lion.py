# SPDX-License-Identifier: Apache-2.0
"""Compares `fused_coat_lion` bit for bit with `coat_lion`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import apply_updates, coat_lion, codecs
from coat_jax.numerics import stochastic
from coat_jax.optimizer import (
  fused_coat_lion,
  join_weights,
  split_weights,
  weights,
)
from tests.comparing import assert_same_bits

STEPS, SEED = 4, 3
SHAPES = {"kernel": (32, 256), "odd": (70, 100), "norm": (64,)}
SCHEDULE = optax.linear_schedule(1e-2, 1e-3, STEPS)
OPTIONS = dict(
  b1=0.85,
  b2=0.95,
  seed=SEED,
  weight_decay=optax.linear_schedule(0.2, 0.1, STEPS),
  mask=lambda params: {**dict.fromkeys(params, True), "norm": False},
)


def tree(seed, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  return {k: jnp.asarray(rng.normal(size=v), dtype) for k, v in SHAPES.items()}


def train(step, params, state, dtype=jnp.float32):
  step = jax.jit(step)
  for i in range(1, STEPS + 1):
    params, state = step(tree(i, dtype), state, params)
  return params, state


def test_fused_steps_in_f32_match_the_chain_bit_for_bit():
  chain = coat_lion(SCHEDULE, **OPTIONS)
  fused = fused_coat_lion(SCHEDULE, **OPTIONS)

  def chained(grads, state, params):
    grads = jax.tree.map(lambda g: 0.25 * g, grads)
    updates, state = chain.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def whole(grads, state, params):
    return fused.apply(grads, state, params, grad_scale=0.25)

  assert_same_bits(fused.init(tree(0)), chain.init(tree(0))[0])
  want, state = train(chained, tree(0), chain.init(tree(0)))
  got = train(whole, tree(0), fused.init(tree(0)))
  assert_same_bits(got, (want, state[0]))


@pytest.mark.slow
def test_fused_steps_in_bf16_match_apply_updates_bit_for_bit():
  options = OPTIONS | dict(weight_decay=0.0)
  chain = coat_lion(1e-2, **options)
  fused = fused_coat_lion(1e-2, **options)

  def chained(grads, state, params):
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, state = chain.update(grads, state, params)
    count = state[0].count
    return apply_updates(params, updates, step=count, seed=SEED), state

  start = tree(0, jnp.bfloat16)
  want, state = train(chained, start, chain.init(start), jnp.bfloat16)
  got = train(fused.apply, start, fused.init(start), jnp.bfloat16)
  assert got[0]["kernel"].dtype == jnp.bfloat16
  assert_same_bits(got, (want, state[0]))


@pytest.mark.slow
def test_24_bit_weights_match_rounded_f32_weights():
  """Updates the expected weights in f32, then rounds with the same words."""
  options = OPTIONS | dict(codec=codecs.coat(rounding="nearest"))
  fused = fused_coat_lion(SCHEDULE, **options, low_bits=True)
  plain = fused_coat_lion(SCHEDULE, **options)
  start = tree(0)
  state = fused.init(start)
  params, low = split_weights(start)
  assert_same_bits(state.low, low)
  grads = tree(1, jnp.bfloat16)
  got, new = jax.jit(fused.apply)(grads, state, params)
  joined = join_weights(params, low)
  want, inner = jax.jit(plain.apply)(grads, state.inner, joined)
  assert_same_bits(new.inner, inner)
  for i, (name, x) in enumerate(sorted(want.items())):
    if name == "norm":
      np.testing.assert_array_equal(got[name], x)
      continue
    words = stochastic.random_words(stochastic.leaf_key(SEED, 1, i), x.shape)
    split = weights.split(x, stochastic.parameter_words(words))
    assert_same_bits((got[name], new.low[name]), tuple(split))


def test_explain_names_implementations_and_wrong_trees_are_refused():
  said = fused_coat_lion(1e-3).explain(tree(0))
  assert (
    said["kernel"]
    == "lion_step: mosaic on a GPU, mosaic_tpu on a TPU, xla elsewhere"
  )
  assert "last axis must be a multiple of 128" in said["odd"]
  assert "encoded in groups" in said["norm"]
  with pytest.raises(ValueError, match="fused_coat_lion: gradients must have"):
    optimizer = fused_coat_lion(1e-3)
    optimizer.apply({}, optimizer.init(tree(0)), tree(0))
