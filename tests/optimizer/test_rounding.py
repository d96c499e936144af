# SPDX-License-Identifier: Apache-2.0
"""Tests `stochastic_rounding`, for bf16 weights in optax chains."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import coat_jax
from coat_jax import coat_adamw, coat_lion
from coat_jax.optimizer import (
  fused_coat_adamw,
  join_weights,
  split_weights,
  stochastic_rounding,
)
from coat_jax.optimizer import weights as weights_module

BF16 = jnp.bfloat16


def weights(seed=0):
  rng = np.random.default_rng(seed)
  return {
    "kernel": jnp.asarray(rng.normal(size=(16, 256)), BF16),
    "small": jnp.asarray(rng.normal(size=(8, 128)) * 1e-2, BF16),
    "scale": jnp.ones(256, jnp.float32),
  }


def gradients(seed):
  rng = np.random.default_rng(100 + seed)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), weights()
  )


def test_result_is_a_neighbour_of_the_sum_and_unbiased():
  p = {"w": jnp.full((256, 256), 1.0, BF16)}
  d = {"w": jnp.full((256, 256), 0.3 * 2.0**-8, jnp.float32)}
  rounding = stochastic_rounding(5)
  updates, _ = rounding.update(d, rounding.init(p), p)
  new = np.asarray(optax.apply_updates(p, updates)["w"], np.float64)
  # The bf16 neighbours of 1 + 0.3 * 2^-8 are 1 and 1 + 2^-7.
  assert {*np.unique(new)} == {1.0, 1 + 2.0**-7}
  # The sum is rounded up with probability 0.15. The bound is five standard
  # deviations.
  share = np.mean(new > 1)
  assert abs(share - 0.15) < 5 * np.sqrt(0.15 * 0.85 / new.size)


@pytest.mark.parametrize("make", [coat_adamw, coat_lion])
def test_chain_matches_apply_updates_bit_for_bit(make):
  alone = make(1e-3, weight_decay=0.1, seed=3)
  chain = optax.chain(alone, stochastic_rounding(3))
  p = q = weights()
  state, other = chain.init(p), alone.init(q)
  for i in range(3):
    g = gradients(i)
    updates, state = jax.jit(chain.update)(g, state, p)
    p = optax.apply_updates(p, updates)
    updates, other = jax.jit(alone.update)(g, other, q)
    q = coat_jax.apply_updates(q, updates, step=other[0].count, seed=3)
  jax.tree.map(np.testing.assert_array_equal, p, q)


@pytest.mark.parametrize("low_bits", [False, True])
def test_chain_matches_the_fused_step_bit_for_bit(low_bits):
  """Compares one step without jit, so that no products and sums are fused."""
  chain = optax.chain(
    coat_adamw(1e-3, seed=3), stochastic_rounding(3, low_bits=low_bits)
  )
  fused = fused_coat_adamw(1e-3, seed=3, low_bits=low_bits)
  p, g = weights(), gradients(0)
  with jax.disable_jit():
    updates, state = chain.update(g, chain.init(p), p)
    ours = optax.apply_updates(p, updates)
    theirs, other = fused.apply(g, fused.init(p), p)
  # Leave out weights that differ from p by a factor of more than 2^16.
  far = jax.tree.map(
    lambda a, b: np.abs(np.asarray(b, np.float32) / np.asarray(a, np.float32)),
    p,
    theirs,
  )
  leaves = map(jax.tree.leaves, (ours, theirs, far))
  for a, b, ratio in zip(*leaves, strict=True):
    near = (ratio > 2.0**-16) & (ratio < 2.0**16)
    assert near.mean() > 0.99
    np.testing.assert_array_equal(np.asarray(a)[near], np.asarray(b)[near])
  if low_bits:
    jax.tree.map(np.testing.assert_array_equal, state[1].low, other.low)


def test_low_bits_keep_what_bf16_loses():
  """Adds a thousand updates of 2^-14 of a weight, which bf16 would lose."""
  target = {"w": jnp.ones((4, 128), jnp.float32)}
  p, low = split_weights(target)
  rounding = stochastic_rounding(low_bits=True)
  state = rounding.init(p)
  d = {"w": jnp.full((4, 128), -(2.0**-14))}

  @jax.jit
  def step(p, state):
    updates, state = rounding.update(d, state, p)
    return optax.apply_updates(p, updates), state

  for _ in range(1000):
    p, state = step(p, state)
  joined = np.asarray(join_weights(p, state.low)["w"])
  # Below 1, 24 bits represent all multiples of 2^-16, so the sums are exact.
  np.testing.assert_array_equal(joined, 1 - 1000 * 2.0**-14)


def test_nnx_weights_change_with_updates_below_a_bf16_step():
  class Model(nnx.Module):
    def __init__(self):
      self.w = nnx.Param(jnp.ones((64, 128), BF16))

  def train(*last):
    model = Model()
    # Adam's update is 2e-5, a hundredth of half a step of bf16 at 1.
    chain = optax.chain(coat_adamw(2e-5, weight_decay=0.0), *last)
    optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
      grads = nnx.grad(lambda m: m.w[...].astype(jnp.float32).sum())(model)
      optimizer.update(model, grads)

    for _ in range(100):
      step(model, optimizer)
    return float(model.w[...].astype(jnp.float32).mean())

  assert train() == 1.0
  assert abs(train(stochastic_rounding()) - (1 - 100 * 2e-5)) < 2e-4


def test_no_copy_of_all_weights_in_f32_is_made():
  """Checks that three more leaves need hardly any more temporary memory."""

  def temporary(leaves):
    shape = jax.ShapeDtypeStruct((512, 1024), BF16)
    p = {f"w{i}": shape for i in range(leaves)}
    rounding = stochastic_rounding()

    def step(p, state, d):
      updates, state = rounding.update(d, state, p)
      return optax.apply_updates(p, updates), state

    state = jax.eval_shape(rounding.init, p)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(p, state, p)
    return program.compile().memory_analysis().temp_size_in_bytes

  assert temporary(4) - temporary(1) < 512 * 1024


def test_updates_of_f32_parameters_and_none_are_returned_unchanged():
  p = {"f32": jnp.ones(4), "none": jnp.ones(4, BF16)}
  d = {"f32": jnp.full(4, 1e-9), "none": None}
  rounding = stochastic_rounding()
  updates, _ = rounding.update(d, rounding.init(p), p)
  assert updates["none"] is None
  np.testing.assert_array_equal(updates["f32"], d["f32"])


def test_wrong_seed_and_missing_parameters_are_refused():
  with pytest.raises(TypeError, match="stochastic_rounding: seed"):
    stochastic_rounding(1.5)
  rounding = stochastic_rounding()
  with pytest.raises(ValueError, match="update requires the parameters"):
    rounding.update(weights(), rounding.init(weights()))


def test_examples_run():
  assert doctest.testmod(weights_module).failed == 0
