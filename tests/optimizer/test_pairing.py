# SPDX-License-Identifier: Apache-2.0
"""Moments and shardings are paired with parameters by name."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import coat_adamw
from coat_jax.optimizer import (
  abstract_state,
  from_plain_state,
  to_plain_state,
)
from tests.comparing import assert_close


def test_moments_of_renamed_or_missing_parameters_are_refused():
  params = {"a": jnp.ones((64, 128)), "b": jnp.ones((64, 128))}
  plain = optax.adamw(1e-2).init(params)
  for names, words in (
    (("b", "z"), "got none for ['z (64, 128)'], and unused ones for ['a (64, "),
    (("a",), "got none for [], and unused ones for ['b (64, 128)']"),
    (("a", "b", "c"), "got none for ['c (64, 128)'], and unused ones for []"),
  ):
    like = coat_adamw(1e-2).init({name: params["a"] for name in names})
    with pytest.raises(ValueError) as error:
      from_plain_state(plain, like)
    assert words in str(error.value)


def test_moments_are_paired_by_name_if_their_order_differs():
  params = {"a": jnp.ones((64, 128)), "b": jnp.full((64, 128), 2.0)}
  adam = optax.adamw(1e-2)
  _, plain = adam.update(params, adam.init(params), params)
  other = collections.OrderedDict(b=params["b"], a=params["a"])
  state = from_plain_state(plain, coat_adamw(1e-2).init(other))
  found = to_plain_state(state)[0].mu
  for name in params:
    assert_close(found[name], plain[0].mu[name], 1e-6)


def test_moments_with_equal_paths_are_paired_by_order():
  params = {"a/b": jnp.ones((64, 128)), "a": {"b": jnp.full((128, 64), 2.0)}}
  adam = optax.adamw(1e-2)
  _, plain = adam.update(params, adam.init(params), params)
  state = from_plain_state(plain, coat_adamw(1e-2).init(params))
  found, want = to_plain_state(state)[0].mu, plain[0].mu
  for got, exact in zip(*map(jax.tree.leaves, (found, want)), strict=True):
    assert_close(got, exact, 1e-6)


def test_shardings_are_paired_by_name_if_their_order_differs():
  mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
  where = {
    "a": NamedSharding(mesh, P("fsdp")),
    "b": NamedSharding(mesh, P(None, "fsdp")),
  }
  shape = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
  params = collections.OrderedDict(b=shape, a=shape)
  state = abstract_state(coat_adamw(1e-2).init, params, where)
  codes = state[0].mu.codes
  assert {name: codes[name].sharding for name in where} == where


def test_shardings_with_equal_paths_are_paired_by_order():
  mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
  first = NamedSharding(mesh, P("fsdp"))
  second = NamedSharding(mesh, P(None, "fsdp"))
  shape = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
  params = {"a/b": shape, "a": {"b": shape}}
  where = {"a/b": first, "a": {"b": second}}
  codes = abstract_state(coat_adamw(1e-2).init, params, where)[0].mu.codes
  assert codes["a/b"].sharding == first and codes["a"]["b"].sharding == second
