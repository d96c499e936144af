# SPDX-License-Identifier: Apache-2.0
"""Compares `coat_lion` with `optax.lion`, and tests its FP8 state."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

from coat_jax import coat_lion, codecs, scale_by_coat_lion
from coat_jax.optimizer import (
  abstract_state,
  from_plain_state,
  state_bytes,
  state_report,
  state_shardings,
  to_plain_state,
)
from tests.optimizer.test_report import llama2_7b

SHAPES = {"w": (16, 256), "stack": (2, 16, 384), "norm": (16,)}
SPECS = {"w": jax.P("x", "y"), "stack": jax.P(None, "x"), "norm": jax.P()}


def tree(seed, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  return {k: jnp.asarray(rng.normal(size=v), dtype) for k, v in SHAPES.items()}


def run(solver, steps=4, place=lambda x: x):
  """Takes some compiled steps; returns (parameters, state)."""
  params = place(tree(0))
  state = solver.init(params)

  @jax.jit
  def step(params, state, grads):
    updates, state = solver.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for seed in range(1, steps + 1):
    params, state = step(params, state, place(tree(seed)))
  return params, state


def assert_same_bits(got, want):
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)),
    got,
    want,
  )


def test_float32_codec_matches_optax_lion():
  arguments = dict(
    learning_rate=optax.linear_schedule(1e-2, 1e-3, 4),
    b1=0.8,
    b2=0.95,
    weight_decay=0.1,
    mask={"w": True, "stack": True, "norm": False},
  )
  codec = codecs.float32()
  lion = coat_lion(**arguments, codec=codec)
  got, got_state = run(lion)
  want, want_state = run(optax.lion(**arguments))
  assert_same_bits(got, want)
  assert_same_bits(got_state[0].mu.codes, want_state[0].mu)
  assert got_state[0].count == 4
  # Each state can be converted to the other.
  plain = to_plain_state(got_state)
  assert jax.tree.structure(plain) == jax.tree.structure(want_state)
  assert_same_bits(plain, want_state)
  like = jax.eval_shape(lion.init, tree(0))
  back = from_plain_state(want_state, like)
  assert jax.tree.structure(back) == jax.tree.structure(got_state)
  assert_same_bits(back, got_state)


def test_codec_can_be_changed_through_the_state_of_optax():
  old, new = codecs.fp8(rounding="nearest"), codecs.float32()
  params = {"w": tree(0)["w"], "norm": tree(0)["norm"]}
  solver, other = (
    scale_by_coat_lion(codec=codec, quantize_mask=lambda _, x: x.ndim > 1)
    for codec in (old, new)
  )
  _, state = solver.update(params, solver.init(params))
  plain = to_plain_state(state)
  assert isinstance(plain, optax.ScaleByLionState)
  like = jax.eval_shape(other.init, params)
  changed = from_plain_state(plain, like)
  assert jax.tree.map(jax.typeof, changed) == jax.tree.map(jax.typeof, like)
  assert_same_bits(changed.mu.codes, plain.mu)
  # Encoding decoded values again gives the same codes.
  like = jax.eval_shape(solver.init, params)
  back = from_plain_state(to_plain_state(changed), like)
  assert back.mu.codes["w"].dtype == jnp.float8_e4m3fn and back.count == 1
  assert_same_bits(back.mu.codes, state.mu.codes)
  with pytest.raises(ValueError, match="'float32', which.*to_plain_state and"):
    other.update(params, state)
  with pytest.raises(ValueError, match="have a ScaleByLionState where like"):
    from_plain_state(optax.ScaleByAdamState(*plain, plain), like)


def test_arguments_and_dtypes_of_updates_match_optax():
  ours = inspect.signature(inspect.unwrap(coat_lion)).parameters
  theirs = inspect.signature(optax.lion).parameters
  # There is no mu_dtype, because the codec defines how the momentum is stored.
  # Arguments that follow it in optax are keyword-only in `coat_lion`.
  names = [name for name in theirs if name != "mu_dtype"]
  assert list(ours)[: len(names)] == names
  for name in names:
    assert ours[name].default == theirs[name].default
  params = tree(0)
  grads = {**tree(1, jnp.bfloat16), "norm": tree(1)["norm"]}
  for solver in (coat_lion(1e-2), optax.lion(1e-2)):
    update = jax.eval_shape(solver.update, grads, solver.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(update[0])} == {jnp.dtype("f4")}
  with pytest.raises(TypeError, match="scale_by_coat_lion: codec must be a"):
    inspect.unwrap(scale_by_coat_lion)(codec="coat")  # Without beartype.


def test_state_has_one_moment_of_about_one_byte_per_parameter():
  shapes = jax.eval_shape(coat_lion(1e-3).init, llama2_7b())
  size = state_bytes(shapes)
  assert size.parameters == 6_738_415_616
  # There is a byte of code per value and 5 bytes per group of 128.
  assert 1 + 5 / 128 <= size.bytes_per_param <= 1.05
  _, state = run(coat_lion(1e-2, quantize_mask=lambda _, x: x.ndim > 1))
  exact = run(optax.lion(1e-2))[1][0]
  report = state_report(state, reference=exact)
  assert set(report["w"]) == {"parameters", "encoded", "mu"}
  assert report["w"]["encoded"] and not report["norm"]["encoded"]
  # A code is off by at most an ulp, 2^-3 of the value, and mostly by far less.
  assert 0 < report["stack"]["mu"]["relative_error"] < 0.06
  assert report["norm"]["mu"]["relative_error"] < 1e-6
  assert state[0]._fields == ("count", "mu")


@pytest.mark.slow
@pytest.mark.parametrize(
  "kind, known",
  [(AxisType.Auto, True), (AxisType.Auto, False), (AxisType.Explicit, False)],
)
def test_steps_on_a_mesh_match_one_device_bit_for_bit(kind, known):
  mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
  where = {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}

  def solver(**kwargs):
    return coat_lion(1e-2, quantize_mask=lambda _, x: x.ndim > 1, **kwargs)

  want = run(solver())
  with jax.set_mesh(mesh):
    sharded = solver(shardings=where if known else None)
    got = run(sharded, place=lambda x: jax.device_put(x, where))
  assert_same_bits(got, want)
  abstract = abstract_state(sharded.init, tree(0), where)[0]
  for field, leaf in (("codes", "w"), ("amax", "stack")):
    found = getattr(abstract.mu, field)[leaf]
    assert found.sharding.is_equivalent_to(where[leaf], found.ndim)
  # The predicted shardings are those of the state after a step.
  predicted = state_shardings(sharded.init, tree(0), where)[0]
  for name in ("codes", "amax"):
    for leaf in ("w", "stack"):
      found = getattr(got[1][0].mu, name)[leaf]
      expected = getattr(predicted.mu, name)[leaf]
      assert found.sharding.is_equivalent_to(expected, found.ndim)
