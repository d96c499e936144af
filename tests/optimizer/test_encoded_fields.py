# SPDX-License-Identifier: Apache-2.0
"""Tests state fields whose name alone does not tell whether to encode them.

Results are compared with the inner optimizer.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import codecs, encoded
from coat_jax.optimizer import default_field_rule
from tests.comparing import assert_same_bits, jit

PARAMS = {"w": jnp.zeros((8, 16))}


def wrap(inner, codec=codecs.coat(4), **kwargs):  # noqa: B008 (it is frozen)
  return encoded(inner, codec, quantize_mask=lambda *_: True, **kwargs)


def run(solver, count=30):
  """Takes steps with gradients close to 1; returns the state and updates."""

  def step(state, key):
    noise = 0.03 * jax.random.normal(key, (8, 16))
    updates, state = solver.update({"w": 1 + noise}, state, PARAMS)
    return state, updates["w"]

  keys = jax.random.split(jax.random.key(0), count)
  return jit(lambda state: jax.lax.scan(step, state, keys))(solver.init(PARAMS))


def test_moments_that_are_subtracted_stay_f32():
  inner = optax.rmsprop(1e-2, centered=True, momentum=0.9)
  state, updates = run(wrap(inner))
  want, _ = run(inner)
  assert np.all(np.isfinite(updates))
  moments: Any = state.inner[0]
  assert_same_bits(moments, want[0])
  # The momentum is not subtracted from anything, so it may be encoded.
  assert state.inner[2].trace.codes["w"].dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize(
  ("inner", "name"),
  [
    (optax.scale_by_stddev(), "nu"),
    (optax.scale_by_stddev(bias_correction=True), "mu"),
    (optax.contrib.cocob(), "scale"),
    pytest.param(
      "madgrad",
      "s",
      marks=pytest.mark.skipif(
        not hasattr(optax.contrib, "madgrad"),
        reason="optax 0.2.6 has no madgrad",
      ),
    ),
  ],
  ids=["stddev", "stddev_of_counts", "cocob", "madgrad"],
)
def test_encoding_a_field_that_must_stay_f32_is_refused(inner, name):
  if inner == "madgrad":
    inner = optax.contrib.madgrad(1e-2)
  named = {name: "mu"}.get
  for fields in (
    lambda path: named(path.rpartition("/")[-1]),
    lambda path: default_field_rule(path),
  ):
    with pytest.raises(ValueError, match="fields of .*f32.*return None for it"):
      wrap(inner, fields=fields).init(PARAMS)
  with pytest.raises(ValueError, match="without one to encode; use the inner"):
    wrap(inner).init(PARAMS)


def test_map_params_maps_plain_fields_and_codes():
  solver = wrap(optax.rmsprop(1e-2, centered=True, momentum=0.9))
  state: Any = solver.init(PARAMS)
  where = optax.tree.map_params(solver, lambda x, name: name, state, {"w": "w"})
  assert where.inner[0].nu == where.inner[2].trace.codes == {"w": "w"}


def mapped_paths(solver, params):
  """Lists the fields whose codes or values `map_params` maps."""
  state = jax.eval_shape(solver.init, params)
  mapped = optax.tree.map_params(
    solver,
    lambda x: "mapped",
    state,
    transform_non_params=lambda node: node,
  )
  return {
    jax.tree_util.keystr(keys[:-1], simple=True, separator="/")
    for keys, x in jax.tree_util.tree_leaves_with_path(mapped)
    if isinstance(x, str)
  }


def test_map_params_maps_the_fields_that_optax_maps():
  params = {"w": jnp.ones((4, 8)), "v": jnp.ones(4)}
  # `nu` contains norms of whole parameters, which optax maps.
  assert mapped_paths(wrap(optax.novograd(1e-2)), params) == {
    "inner/0/mu/codes",
    "inner/0/nu",
  }
  # `mu` of SM3 contains an accumulator for each axis.
  found = mapped_paths(wrap(optax.sm3(1e-2)), params)
  assert {x.rpartition("/w")[0] or x for x in found} >= {"inner/0/mu"}
  assert "inner/0/nu/codes" in found
  # Labels may be a tree with the structure of the parameters.
  own = optax.partition(
    {"lion": optax.lion(1e-2), "sgd": optax.sgd(1e-2)},
    {"w": "lion", "v": "sgd"},
  )
  (found,) = mapped_paths(wrap(own), params)
  assert found.endswith("lion/inner_state/0/mu/codes")


@pytest.mark.parametrize(
  "inner",
  [optax.sm3(1e-2), optax.contrib.sophia(1e-2)],
  ids=["sm3", "sophia"],
)
def test_signed_nu_gets_signed_codes(inner):
  solver = wrap(inner, codecs.log8(4))
  state = jax.eval_shape(solver.init, PARAMS)
  codes = {
    jax.tree_util.keystr(keys, simple=True, separator="/"): x.dtype
    for keys, x in jax.tree_util.tree_leaves_with_path(state)
    if "/nu/" in jax.tree_util.keystr(keys, simple=True, separator="/")
  }
  [codes] = [x for path, x in codes.items() if "/codes/" in path]
  assert codes == jnp.int8
