# SPDX-License-Identifier: Apache-2.0
"""Runs optimizers of some factories, and `stochastic_rounding` in chains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from coat_jax import coat_adamw
from coat_jax.optimizer import stochastic_rounding
from tests.matrices import quick
from tests.optimizer.factories import (
  CASES,
  OPTIONS,
  WRAPPERS,
  shapes,
  step,
  tree,
  updater,
)
from tests.optimizer.solvers import types
from tests.optimizer.test_optax_suites import check_empty_trees

# Optimizers to compile here. test_optax_coat compiles coat_adamw.
COMPILED = ("coat_lion", "coat_muon", "novograd", "lion", "sm3")


def cosine_step(name, steps):
  """Returns an optimizer whose rate decays to zero, and its step function."""
  case = CASES[name]
  rate = optax.cosine_decay_schedule(0.1, steps)
  if name == "sm3":
    rate = 3.0  # SM3 itself decreases its steps.
  solver = case.ours(**case.options | {"learning_rate": rate})

  def step(params, state, grads):
    updates, state = solver.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return solver, step


@pytest.mark.parametrize("name", quick(1, COMPILED))
def test_vector_and_matrix_converge(name):
  # Use the targets of optax's tests, without coupling between parameters.
  target = {
    "vector": jnp.array([1.0, -1.0, 2.0]),
    "matrix": jnp.array([[3.0, -2.0], [1.0, 4.0]]),
  }
  solver, step = cosine_step(name, 3000)
  params = jax.tree.map(jnp.zeros_like, target)

  def run(carry, _):
    params, state = carry
    grads = jax.tree.map(lambda p, end: 2 * (p - end), params, target)
    return step(params, state, grads), None

  scan = jax.jit(lambda carry: jax.lax.scan(run, carry, length=3000)[0])
  params, _ = scan((params, solver.init(params)))
  for key, want in target.items():
    np.testing.assert_allclose(params[key], want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", quick(1, COMPILED))
def test_donated_step_is_compiled_once(name):
  solver, step = cosine_step(name, 10)
  step = jax.jit(step, donate_argnums=(0, 1))
  params = tree(name)
  state = solver.init(params)
  before = types((params, state))
  for _ in range(3):
    params, state = step(params, state, tree(name))
  assert step._cache_size() == 1
  assert types((params, state)) == before
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(params))


@pytest.mark.parametrize("name", quick(1, COMPILED))
def test_types_of_the_state_on_explicit_axes_are_preserved(name):
  case = CASES[name]
  solver = case.ours(**case.options)
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
  where = jax.NamedSharding(mesh, jax.P("x"))
  with jax.set_mesh(mesh):
    params = {"up": jnp.ones((16, 8), jnp.float16, out_sharding=where)}
    state = solver.init(params)
    assert types(jax.jit(solver.init)(params)) == types(state)
    _, new = jax.jit(solver.update)(params, state, params)
    assert types(new) == types(state)


def rounded(low_bits):
  last = stochastic_rounding(low_bits=low_bits)
  return lambda learning_rate: optax.chain(
    # If an update is skipped, rounding must change nothing.
    optax.apply_if_finite(coat_adamw(learning_rate, **OPTIONS), 3),
    last,
  )


@pytest.mark.parametrize("low_bits", [False, True])
def test_stochastic_rounding_passes_optax_checks(low_bits):
  make, options = rounded(low_bits), {"learning_rate": 1e-2}
  params = tree("", "bfloat16")
  solver = updater("", make(**options))
  updates, state, new = step(solver, params, params, unexpected=1)
  # Updates must be f32, because bf16 cannot represent every difference of two
  # weights.
  in_f32 = jax.tree.map(lambda x: (x.shape, jnp.dtype("float32")), params)
  assert state == new and updates == in_f32
  for wrapper in ("chain", "masked", "partition", "multi_steps"):
    own = optax.with_extra_args_support(WRAPPERS[wrapper](solver, params))
    _, state, new = step(own, params, params)
    if wrapper == "multi_steps" and optax.__version__ == "0.2.6":
      # This version casts gradients to the dtype of updates in the first step.
      assert new.acc_grads == in_f32
      new = new._replace(acc_grads=state.acc_grads)
    assert state == new
    state = jax.eval_shape(own.init, params)
    mapped = optax.tree.map_params(own, lambda x: x, state)
    assert shapes(mapped) == shapes(state)
  check_empty_trees("", make, options)
  scheduled = updater("", make(optax.constant_schedule(1e-2)))
  _, state, new = step(scheduled, params, params)
  assert state == new


def test_skipped_update_does_not_change_rounded_weights():
  params = {"w": jnp.full((4, 8), 0.3, jnp.bfloat16)}
  solver = rounded(True)(1e-2)
  state = solver.init(params)
  bad = {"w": jnp.full((4, 8), jnp.nan, jnp.float32)}
  updates, new = jax.jit(solver.update)(bad, state, params)
  np.testing.assert_array_equal(updates["w"], np.zeros((4, 8)))
  np.testing.assert_array_equal(new[1].low["w"], state[1].low["w"])
