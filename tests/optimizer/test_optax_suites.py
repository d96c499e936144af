# SPDX-License-Identifier: Apache-2.0
"""Runs checks from optax's own tests on all of our factories.

They are optax's checks of aliases, contributed optimizers and shardings. Each
of our optimizers must pass the checks that its optax counterpart passes.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.matrices import quick
from tests.optimizer.factories import (
  CASES,
  WRAPPERS,
  shapes,
  step,
  traced,
  tree,
  updater,
)


def check_step(name, make, options):
  """Checks that extra arguments are accepted and the state keeps its types."""
  for dtype in ("float16", "bfloat16", "float32"):
    params = tree(name, dtype)
    solver = updater(name, make(**options))
    updates, state, new = step(solver, params, params, unexpected=1)
    assert state == new
    if name != "adafactor":  # Optax's adafactor returns f32.
      assert updates == shapes(params)


def check_x64(name, make, options):
  with jax.enable_x64(True):
    params = tree(name, "float64")
    solver = updater(name, make(**options))
    _, state, new = step(solver, params, params)
    assert state == new


def check_cond(name, make, options):
  """Checks that both branches of a cond have the same types."""
  params, solver = tree(name), updater(name, make(**options))

  def run(params, grads):
    state = solver.init(params)
    return jax.lax.cond(
      params["w"][0, 0] > 0,
      lambda: solver.update(grads, state, params),
      lambda: (params, state),
    )

  jax.eval_shape(run, params, params)


def check_map_params(name, make, options):
  """Checks that mapping the identity does not change the state."""
  solver = make(**options)
  state = jax.eval_shape(solver.init, tree(name))
  seen = []
  mapped = optax.tree.map_params(solver, lambda x: seen.append(x) or x, state)
  assert shapes(mapped) == shapes(state)
  return seen


def check_inject(name, make, options):
  """Checks that injected hyperparameters don't change any types."""
  static = {
    *("warmup_steps", "num_betas", "min_dim_size_to_factor", "rank"),
    *("matrices", "quantize_mask", "update_proj_gap"),
  }
  static &= {*inspect.signature(make).parameters}
  injected = optax.inject_hyperparams(make, static_args=tuple(static))
  params = tree(name)
  updates, state, new = step(updater(name, injected(**options)), params, params)
  assert state == new
  want = step(updater(name, make(**options)), params, params)
  assert (updates, state.inner_state) == want[:2]


def check_schedule(name, make, options):
  if "learning_rate" in options:
    options |= dict(learning_rate=optax.linear_schedule(1e-2, 0.0, 5))
  params, solver = tree(name), updater(name, make(**options))
  updates, state, new = step(solver, params, params)
  assert state == new and updates == shapes(params)


def check_vmap(name, make, options):
  params, solver = tree(name), updater(name, make(**options))
  both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
  state = jax.vmap(solver.init)
  update = jax.vmap(lambda g, s, p: solver.update(g, s, p))
  before = traced(state, both)
  _, after = traced(lambda p: update(p, state(p), p), both)
  assert before == after


def check_empty_trees(name, make, options):
  solver = updater(name, make(**options))
  for params in ({}, (), {"none": None}):
    state = solver.init(params)
    updates, new = solver.update(params, state, params)
    assert updates == params
    assert jax.tree.structure(state) == jax.tree.structure(new)


def check_abstract_parameters(name, make, options):
  abstract = jax.eval_shape(lambda: tree(name))
  solver = make(**options)
  assert shapes(solver.init(abstract)) == traced(solver.init, abstract)


CHECKS = (
  check_step,
  check_x64,
  check_cond,
  check_map_params,
  check_inject,
  check_schedule,
  check_vmap,
  check_empty_trees,
  check_abstract_parameters,
)


def check_inside(wrapper, name, make, options):
  """Checks an optimizer inside a wrapper: its types, and `map_params`."""
  for dtype in ("bfloat16", "float32"):
    params = tree(name, dtype)
    solver = WRAPPERS[wrapper](updater(name, make(**options)), params)
    updates, state, new = step(
      optax.with_extra_args_support(solver), params, params
    )
    assert state == new
    if name != "adafactor":
      assert updates == shapes(params)
    state = jax.eval_shape(solver.init, params)
    mapped = optax.tree.map_params(solver, lambda x: x, state)
    assert shapes(mapped) == shapes(state)


def failure(check, name, make, options) -> Exception | None:
  """Returns the error that a check of an optimizer raises, or None."""
  try:
    check(name, make, dict(options))
  except Exception as error:
    return error
  return None


def compare(check, name):
  """Raises the error of our optimizer, unless optax's raises one too."""
  case = CASES[name]
  error = failure(check, name, case.ours, case.options)
  if error is not None and not failure(check, name, case.theirs, case.options):
    raise error


@pytest.mark.parametrize("name", quick(2, CASES))
def test_our_optimizer_passes_if_optax_does(name):
  for check in CHECKS:
    compare(check, name)


@pytest.mark.parametrize("name", quick(1, CASES))
def test_our_optimizer_works_in_wrappers_if_optax_does(name):
  for wrapper in WRAPPERS:
    compare(functools.partial(check_inside, wrapper), name)


def test_optax_passes_the_checks():
  for check in CHECKS:
    assert failure(check, "adamw", optax.adamw, {"learning_rate": 1e-2}) is None


def test_checks_find_a_state_whose_types_change():
  def broken(learning_rate):
    adam = optax.adam(learning_rate)

    def update(grads, state, params=None):
      updates, state = adam.update(grads, state, params)
      return updates, optax.tree.cast(state, jnp.bfloat16)

    return optax.GradientTransformation(adam.init, update)

  options = {"learning_rate": 1e-2}
  for check in (check_step, check_x64, check_cond, check_vmap):
    assert failure(check, "broken", broken, options) is not None
