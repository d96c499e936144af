# SPDX-License-Identifier: Apache-2.0
"""Compares fused steps on 24-bit weights with f32 and bf16 weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import codecs
from coat_jax.numerics import stochastic
from coat_jax.optimizer import (
  LowBitsState,
  from_integers,
  from_plain_state,
  fused_coat_adamw,
  join_weights,
  split_weights,
  state_bytes,
  state_report,
  to_integers,
  to_plain_state,
)
from coat_jax.optimizer.state import ScaleByCoatAdamState
from tests.comparing import assert_same_bits
from tests.optimizer.test_weights import oracle

SHAPES = {"odd": (70, 100), "norm": (64,), "w": (32, 256)}


def tree(seed, scale=1.0):
  keys = jax.random.split(jax.random.key(seed), len(SHAPES))
  return {
    name: scale * jax.random.normal(key, shape)
    for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
  }


def words_of_24_bits(x):
  return np.asarray(x, np.float32).view(np.uint32).astype(np.int64) >> 8


def test_first_state_contains_low_bytes_of_f32_weights_or_zeros():
  params = tree(0)
  optimizer = fused_coat_adamw(1e-3, low_bits=True)
  state = jax.jit(optimizer.init)(params)
  assert isinstance(state, LowBitsState)
  assert_same_bits(state.inner, jax.jit(fused_coat_adamw(1e-3).init)(params))
  high, low = split_weights(params)
  assert_same_bits(state.low, low)
  zeros = jax.jit(optimizer.init)(high).low
  assert jax.tree.map(jax.typeof, zeros) == jax.tree.map(jax.typeof, low)
  assert not any(np.any(x) for x in jax.tree.leaves(zeros))


def test_step_matches_the_f32_step_rounded_to_24_bits():
  settings = dict(weight_decay=0.1, seed=3)
  plain = fused_coat_adamw(1e-2, **settings)
  ours = fused_coat_adamw(1e-2, low_bits=True, **settings)
  params, state = tree(0), ours.init(tree(0))
  params, low = split_weights(params)
  in_f32 = join_weights(params, low)
  apply, exact = jax.jit(ours.apply), jax.jit(plain.apply)
  for step in (1, 2, 3):
    grads = tree(step, 1e-2)
    want, inner = exact(grads, state.inner, in_f32)
    params, state = apply(grads, state, params)
    assert_same_bits(state.inner, inner)
    in_f32 = join_weights(params, state.low)
    for i, name in enumerate(sorted(SHAPES)):
      if name == "norm":
        # XLA may use an FMA for p + (-rate) * u in only one of the programs.
        np.testing.assert_allclose(in_f32[name], want[name], rtol=1e-6)
        continue
      key = stochastic.leaf_key(3, step, i)
      words = stochastic.random_words(key, SHAPES[name])
      words = stochastic.parameter_words(words)
      bits = np.asarray(want[name]).view(np.uint32)
      high, low = oracle(bits, np.asarray(words) >> 24)
      want_word = (high.astype(np.int64) << 8) + low
      apart = words_of_24_bits(in_f32[name]) - want_word
      # The f32 results may differ by an ulp. This is 1/256 of a unit of 24-bit
      # words, so few words change.
      assert np.max(np.abs(apart)) <= 1 and np.mean(apart != 0) < 0.02
    assert params["norm"].dtype == jnp.float32


def movement(low_bits, rate=2e-6, steps=64):
  """Returns how far each weight moves in many small, equal steps."""
  grads = {"w": jnp.ones((32, 256))}
  params, _ = split_weights({"w": tree(0)["w"]})
  start = params["w"].astype(jnp.float32)
  optimizer = fused_coat_adamw(rate, weight_decay=0.0, low_bits=low_bits)
  state = optimizer.init(params)
  apply = jax.jit(optimizer.apply)
  for _ in range(steps):
    params, state = apply(grads, state, params)
  if low_bits:
    params = join_weights(params, state.low)
  # A step changes each weight by the rate, up to rounding of moments.
  return np.asarray(params["w"].astype(jnp.float32) - start, np.float64)


def test_small_steps_are_less_noisy_in_24_bits_than_in_bf16():
  moved, walked = movement(True), movement(False)
  want = -64 * 2e-6
  for got in (moved, walked):
    error = got.std() / np.sqrt(got.size)
    assert abs(got.mean() - want) < 5 * error + 0.02 * abs(want)
  # The variance of a random walk is proportional to the rounding unit, which is
  # 256 times as large in bf16.
  assert walked.std() > 10 * moved.std()


@pytest.mark.slow
def test_bf16_weights_accept_gradients_in_bf16_and_f32():
  params, _ = split_weights({"w": tree(0)["w"]})
  grads = {"w": tree(1, 1e-2)["w"]}
  for low_bits in (False, True):
    optimizer = fused_coat_adamw(1e-2, low_bits=low_bits)
    state = jax.jit(optimizer.init)(params)
    rounded = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
    back = jax.tree.map(lambda g: g.astype(jnp.float32), rounded)
    apply = jax.jit(optimizer.apply)
    assert_same_bits(apply(rounded, state, params), apply(back, state, params))
    assert jax.tree.map(jnp.result_type, apply(grads, state, params)[0]) == (
      jax.tree.map(jnp.result_type, params)
    )


def test_converting_moments_keeps_low_bytes():
  codec = codecs.log8()
  optimizer = fused_coat_adamw(1e-2, codec=codec, low_bits=True)
  state = jax.jit(optimizer.init)(tree(0))
  adam = to_plain_state(state)
  assert_same_bits(adam.low, state.low)
  back = from_plain_state(adam, state)
  assert isinstance(back.inner, ScaleByCoatAdamState)
  assert jax.tree.structure(back) == jax.tree.structure(state)
  assert jax.tree.map(jax.typeof, back) == jax.tree.map(jax.typeof, state)
  assert set(state_report(state)) == set(SHAPES)


def test_state_bytes_include_the_low_bytes():
  def size(low_bits):
    optimizer = fused_coat_adamw(1e-2, low_bits=low_bits)
    return state_bytes(jax.eval_shape(optimizer.init, tree(0)))

  # There is one byte per value of both matrices, and a placeholder of one byte
  # for the norm.
  without, with_them = size(False), size(True)
  assert with_them.total - without.total == 70 * 100 + 32 * 256 + 1
  assert with_them.parameters == without.parameters


def test_weights_and_state_can_be_stored_as_integers():
  optimizer = fused_coat_adamw(1e-2, low_bits=True)
  made = split_weights(tree(0))[0], optimizer.init(tree(0))
  integers = to_integers(made)
  assert integers[0]["w"].dtype == jnp.uint16
  assert integers[1].low["w"].dtype == jnp.int8
  assert_same_bits(from_integers(integers, made), made)


def test_f32_weights_are_refused_with_low_bits():
  params = tree(0)
  optimizer = fused_coat_adamw(1e-2, low_bits=True)
  with pytest.raises(
    ValueError, match="fused_coat_adamw: a parameter whose low"
  ):
    optimizer.apply(tree(1), optimizer.init(params), params)


def test_explain_supports_24_bit_weights():
  said = fused_coat_adamw(1e-3, low_bits=True).explain(tree(0))
  assert said["w"] == (
    "adamw_step: mosaic on a GPU, mosaic_tpu on a TPU, xla elsewhere"
  )


@pytest.mark.slow
def test_nnx_models_train_with_the_fused_step():
  model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
  optimizer = fused_coat_adamw(1e-2, low_bits=True)
  state = optimizer.init(nnx.state(model, nnx.Param))
  nnx.update(model, split_weights(nnx.state(model, nnx.Param))[0])
  x = jax.random.normal(jax.random.key(0), (32, 64))

  @nnx.jit
  def step(model, state):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    params = nnx.state(model, nnx.Param)
    params, state = optimizer.apply(grads, state, params)
    nnx.update(model, params)
    return state, loss

  losses = []
  for _ in range(5):
    state, loss = step(model, state)
    losses.append(float(loss))
  assert model.kernel[...].dtype == jnp.bfloat16
  assert model.bias[...].dtype == jnp.float32
  assert np.any(state.low["kernel"])
  assert losses[-1] < 0.9 * losses[0]
