# SPDX-License-Identifier: Apache-2.0
"""Compares steps in several passes, for GPUs, with ordinary steps bit for bit.

To run both on a CPU, tests replace the function that returns the platform.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from coat_jax import codecs, scale_by_coat_adam
from coat_jax.optimizer import passes
from coat_jax.optimizer import step as steps
from coat_jax.optimizer.fused import fused_coat_adamw, fused_coat_lion
from tests.comparing import assert_same_bits
from tests.matrices import quick

E4M3 = jnp.float8_e4m3fn


def gradients(shape, dtype):
  """Makes gradients that span many octaves, with zeros and a group with NaN."""
  keys = jax.random.split(jax.random.key(1), 2)
  g = jax.random.normal(keys[0], shape)
  g = g * jnp.exp(4 * jax.random.normal(keys[1], shape))
  g = g.at[0, :130].set(0.0).at[1, 3].set(jnp.nan).at[2, 5].set(1e-30)
  return g.astype(dtype)


def take_steps(monkeypatch, optimizer, platform, dtype, shape=(8, 384)):
  monkeypatch.setattr(steps, "platform", lambda: platform)
  jax.clear_caches()  # JAX does not know that traces depend on the platform.
  g = gradients(shape, dtype)
  params = jnp.ones(shape, dtype)
  state = optimizer.init(params)
  if hasattr(optimizer, "apply"):
    step = jax.jit(lambda g, s, p: optimizer.apply(g, s, p))
  else:
    step = jax.jit(lambda g, s, p: optimizer.update(g, s, p))
  for factor in (1.0, -0.9):
    # Gradients do not depend on parameters, so they are equal in all runs.
    params, state = step(g * jnp.asarray(factor, dtype), state, params)
  return params, state


def without_signs_of_nans(tree):
  """Clears the signs of NaNs, which depend on the instruction."""

  def of_leaf(x):
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.where(jnp.isnan(x), jnp.nan, x) if is_float else x

  return jax.tree.map(of_leaf, tree)


def all_leaves(path, leaf):
  return True


def optimizers():
  make = functools.partial(fused_coat_adamw, 1e-3, quantize_mask=all_leaves)
  yield make(), "float32"
  yield make(), "bfloat16"
  yield make(codec=codecs.coat(rounding="nearest")), "float32"
  for name in ("coat_e8m0", "log8", "fp8", "int8"):
    yield make(codec=codecs.build(name)), "float32"
  yield make(low_bits=True), "bfloat16"
  yield fused_coat_lion(1e-3, quantize_mask=all_leaves), "bfloat16"
  yield scale_by_coat_adam(quantize_mask=all_leaves), "float32"


@pytest.mark.parametrize("optimizer, dtype", quick(4, optimizers()))
def test_steps_in_passes_match_ordinary_steps(monkeypatch, optimizer, dtype):
  calls = []
  run = passes.run
  monkeypatch.setattr(passes, "run", lambda *x: calls.append(x) or run(*x))
  expected = take_steps(monkeypatch, optimizer, "cpu", dtype)
  assert not calls
  found = take_steps(monkeypatch, optimizer, "gpu", dtype)
  assert_same_bits(
    without_signs_of_nans(found), without_signs_of_nans(expected)
  )
  assert calls


def test_rows_with_a_short_group_do_not_use_passes(monkeypatch):
  def fail(*args):
    raise AssertionError("a row of 200 values ends with a short group")

  monkeypatch.setattr(passes, "run", fail)
  take_steps(
    monkeypatch,
    fused_coat_adamw(1e-3, quantize_mask=all_leaves),
    "gpu",
    "float32",
    (8, 200),
  )
