# SPDX-License-Identifier: Apache-2.0
"""Tests that leaves of the same shape share a compiled function on a CPU.

Leaves share it only if none of them can be sharded. On the 8 devices of these
tests, leaves can be sharded, so tests make `shares_body` return True or False.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from coat_jax import coat_adamw, coat_lion, codecs
from coat_jax.optimizer import step as steps
from coat_jax.optimizer.fused import fused_coat_adamw
from tests.comparing import assert_same_bits

SHAPE = (32, 256)


def leaves(count, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), count)
  return {
    f"leaf{i}": jax.random.normal(key, SHAPE, dtype)
    for i, key in enumerate(keys)
  }


def take_a_step(optimizer):
  """Updates two leaves with a new jitted function, so that JAX traces it."""
  params = leaves(2)
  state = optimizer.init(params)
  run = getattr(optimizer, "apply", None)
  if run is None:
    return jax.jit(lambda p, s: optimizer.update(p, s, p))(params, state)
  return jax.jit(lambda p, s: run(p, s, p))(params, state)


@pytest.mark.parametrize(
  "optimizer",
  [
    coat_adamw(1e-3),
    coat_adamw(1e-3, codec=codecs.coat(rounding="nearest")),
    coat_lion(1e-3),
    fused_coat_adamw(1e-3),
  ],
  ids=["coat", "nearest", "lion", "fused"],
)
def test_results_do_not_depend_on_sharing_a_function(monkeypatch, optimizer):
  found = []
  for shared in (True, False):
    monkeypatch.setattr(steps, "shares_body", lambda s=shared: s)
    found.append(take_a_step(optimizer))
  assert_same_bits(*found)


# Without a shared function, all leaves would take temporary memory at once.
def test_temporary_memory_is_about_that_of_one_leaf(monkeypatch):
  optimizer = coat_adamw(1e-3)

  def temporary(count):
    params = leaves(count)
    step = jax.jit(lambda p, s: optimizer.update(p, s, p))
    compiled = step.lower(params, jax.eval_shape(optimizer.init, params))
    return compiled.compile().memory_analysis().temp_size_in_bytes

  monkeypatch.setattr(steps, "shares_body", lambda: True)
  assert temporary(6) < 1.5 * temporary(1)


def test_leaves_share_a_body_only_if_none_can_be_partitioned():
  assert not steps.shares_body()  # Leaves may be split over 8 devices.
  found = []

  def body(x):
    found.append(steps.shares_body())
    return x

  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
  sharded = jax.shard_map(
    body, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x")
  )
  jax.eval_shape(sharded, jax.ShapeDtypeStruct((8,), jnp.float32))
  with jax.set_mesh(mesh):
    jax.eval_shape(body, jnp.ones(8))
  assert found == [True, False]
