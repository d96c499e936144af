# SPDX-License-Identifier: Apache-2.0
"""Tests AdamW on BF16 weights that are rounded to nearest."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from studies import nearest_weights
from train import step
from train.presets import demo

# The name of a parameter with weight decay.
NAME = "mlp/down/kernel"


def small(**optim):
  optim = dataclasses.replace(
    demo().optim, codec="float32", warmup=0, min_lr_ratio=1.0, **optim
  )
  return dataclasses.replace(demo(), optim=optim, params="bfloat16")


def values(seed, dtype):
  x = np.random.default_rng(seed).normal(size=(8, 64))
  return {NAME: jnp.asarray(x, dtype)}


def test_step_matches_optax_rounded_to_nearest():
  config = small(lr=1e-2)
  ours = nearest_weights.build_optimizer(config)
  params, grads = values(0, jnp.bfloat16), values(1, jnp.bfloat16)
  exact = {NAME: params[NAME].astype(jnp.float32)}
  got, state = ours.apply(grads, ours.init(params), params, grad_scale=0.5)
  optim = config.optim
  adamw = optax.adamw(1e-2, optim.b1, optim.b2, optim.eps, weight_decay=0.1)
  halves = {NAME: 0.5 * grads[NAME].astype(jnp.float32)}
  updates, _ = adamw.update(halves, adamw.init(exact), exact)
  want = np.asarray(optax.apply_updates(exact, updates)[NAME])
  # A different order of f32 operations may round differently at a tie.
  apart = np.asarray(got[NAME]) != want.astype(ml_dtypes.bfloat16)
  assert got[NAME].dtype == jnp.bfloat16 and np.mean(apart) < 0.01
  assert int(state.count) == 1


def test_small_steps_are_lost():
  ours = nearest_weights.build_optimizer(small(lr=1e-6))
  params = values(0, jnp.bfloat16)
  got, _ = ours.apply(params, ours.init(params), params, grad_scale=1.0)
  # A step of 1e-6 is below half an ulp, except for weights near zero.
  large = np.abs(np.asarray(params[NAME], np.float32)) > 1e-2
  same = np.asarray(got[NAME] == params[NAME])
  assert np.all(same[large])


def test_low_bits_are_refused():
  config = dataclasses.replace(small(lr=1e-3), params="bfloat16_low8")
  with pytest.raises(ValueError, match="got params bfloat16_low8"):
    nearest_weights.build_optimizer(config)


def test_training_rounds_to_nearest_only_during_the_command(monkeypatch):
  found = []
  monkeypatch.setattr(
    nearest_weights.pretrain,
    "main",
    lambda arguments: found.append((arguments, step.build_optimizer)) or 0,
  )
  own = step.build_optimizer
  assert nearest_weights.main(["demo"]) == 0
  assert found == [(["demo"], nearest_weights.build_optimizer)]
  assert step.build_optimizer is own
