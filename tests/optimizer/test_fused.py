# SPDX-License-Identifier: Apache-2.0
"""Compares fused steps with steps of an optax chain."""

import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import apply_updates, coat_adamw, codecs, scale_by_coat_adam
from coat_jax.optimizer import fused_coat_adamw, fused_coat_lion
from coat_jax.optimizer.adam import adam_update, adamw_step
from coat_jax.optimizer.arguments import choose_leaves
from coat_jax.optimizer.lion import lion_step
from tests.comparing import assert_same_bits


def tree(seed, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(seed), 3)
  shapes = {"w": (32, 256), "odd": (70, 100), "norm": (64,)}
  return {
    name: jax.random.normal(key, shape, dtype)
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }


@pytest.mark.parametrize(
  "make, step",
  [
    (coat_adamw, adam_update),
    (scale_by_coat_adam, adam_update),
    (fused_coat_adamw, adamw_step),
    (fused_coat_lion, lion_step),
  ],
)
def test_annotation_of_implementation_lists_all_names(make, step):
  hint = inspect.signature(make).parameters["implementation"].annotation
  names, none = typing.get_args(hint)
  assert none is type(None)
  assert {*typing.get_args(names)} == {*step.implementations}


SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 5)
SETTINGS = {
  "defaults": {},
  "coat_nearest": {"codec": codecs.coat(rounding="nearest"), "b2": 0.95},
  "masked": {
    "mask": lambda params: {"w": True, "odd": True, "norm": False},
    "weight_decay": optax.linear_schedule(0.1, 0.0, 5),
  },
  "float32": {"codec": codecs.float32(), "eps_root": 1e-8, "seed": 3},
}


def run(settings, dtype, steps=4, **kwargs):
  """Returns parameters and states of the chain and of the fused step."""
  seed = settings.get("seed", 0)
  chain = coat_adamw(SCHEDULE, **settings)
  fused = fused_coat_adamw(SCHEDULE, **settings, **kwargs)

  @jax.jit
  def chained(grads, state, params):
    updates, state = chain.update(grads, state, params)
    step = state[0].count
    return apply_updates(params, updates, step=step, seed=seed), state

  a = b = tree(0, dtype)
  state, other = chain.init(a), fused.init(b)
  assert_same_bits(other, state[0])
  apply = jax.jit(fused.apply)
  for step in range(steps):
    grads = jax.tree.map(lambda x: 1e-2 * x, tree(step + 1))
    a, state = chained(grads, state, a)
    b, other = apply(grads, other, b)
  return a, state[0], b, other


def test_fused_step_of_complex_leaves_matches_the_chain():
  params = {"z": jnp.array([[1 + 2j, -3j, 0.5]]), "none": jnp.zeros((0, 3))}
  grads = jax.tree.map(lambda x: (0.1 - 0.2j) * x, params)
  grads["none"] = params["none"]
  chain, fused = coat_adamw(1e-2), fused_coat_adamw(1e-2)
  updates, state = chain.update(grads, chain.init(params), params)
  want = optax.apply_updates(params, updates)
  got, other = fused.apply(grads, fused.init(params), params)
  assert got["z"].dtype == "complex64"
  np.testing.assert_allclose(got["z"], want["z"], rtol=1e-6)
  np.testing.assert_allclose(other.mu.codes["z"], state[0].mu.codes["z"])
  np.testing.assert_allclose(other.nu.codes["z"], state[0].nu.codes["z"])


@pytest.mark.parametrize("name", SETTINGS)
def test_fused_step_matches_the_chain(name):
  a, state, b, other = run(SETTINGS[name], jnp.float32)
  # XLA may use an FMA for p + (-rate) * u in only one of the two programs.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-8), a, b
  )
  assert jax.tree.structure(state) == jax.tree.structure(other)
  assert_same_bits(state, other)


def test_fused_step_uses_the_random_words_of_apply_updates():
  a, state, b, other = run({"weight_decay": 0.0}, jnp.bfloat16, steps=1)
  assert_same_bits(state, other)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    # With other random words, a third of the weights would differ.
    assert x.dtype == y.dtype == jnp.bfloat16
    assert np.mean(np.asarray(x != y)) < 1e-3


def test_fused_step_scales_gradients():
  fused = fused_coat_adamw(1e-2)
  params, grads = tree(0), tree(1)
  state = fused.init(params)
  scaled = jax.tree.map(lambda g: g * 0.25, grads)
  got = jax.jit(fused.apply)(grads, state, params, grad_scale=0.25)
  assert_same_bits(got, jax.jit(fused.apply)(scaled, state, params))


def test_fused_step_refuses_wrong_arguments():
  params = tree(0)
  fused = fused_coat_adamw(1e-3, implementation="mosaic")
  with pytest.raises(NotImplementedError, match="encoded in groups"):
    fused.apply(params, fused.init(params), params)
  fused = fused_coat_adamw(1e-3)
  with pytest.raises(ValueError, match="fused_coat_adamw: gradients must have"):
    fused.apply({"w": params["w"]}, fused.init(params), params)
  with pytest.raises(ValueError, match="fused_coat_adamw: params must have"):
    fused.apply(params, fused.init(params), {"w": params["w"]})


def test_states_of_other_optimizers_are_refused_by_name():
  params = tree(0)
  adam, lion = fused_coat_adamw(1e-3), fused_coat_lion(1e-3)
  with pytest.raises(TypeError, match="state must be.*got a ScaleByCoatLion"):
    adam.apply(params, lion.init(params), params)
  with pytest.raises(TypeError, match="fused_coat_lion: state must be"):
    lion.begin(params, adam.init(params))
  low = fused_coat_adamw(1e-3, low_bits=True)
  with pytest.raises(TypeError, match="must be a LowBitsState, got a ScaleBy"):
    low.apply(params, adam.init(params), params)
  with pytest.raises(TypeError, match="got a LowBitsState"):
    adam.apply(params, low.init(params), params)


def test_quantize_mask_must_be_a_function():
  # Call without beartype, which users do not have.
  choose = inspect.unwrap(choose_leaves)
  with pytest.raises(TypeError, match="must be a function .* got True"):
    choose("coat_adamw", tree(0), True)


def test_explain_names_the_implementation_of_each_leaf():
  said = fused_coat_adamw(1e-3).explain(tree(0))
  assert (
    said["w"]
    == "adamw_step: mosaic on a GPU, mosaic_tpu on a TPU, xla elsewhere"
  )
  assert "last axis must be a multiple of 128" in said["odd"]
  assert "encoded in groups" in said["norm"]


def test_error_for_a_fused_optimizer_in_a_chain_names_a_remedy():
  params = {"w": jnp.ones((64, 128))}
  optimizer = fused_coat_adamw(1e-3)
  assert not hasattr(optimizer, "update")
  chain = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
  with pytest.raises(AttributeError, match="use coat_adamw or coat_lion"):
    chain.update(params, chain.init(params), params)
