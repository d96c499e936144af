# SPDX-License-Identifier: Apache-2.0
"""Tests common uses of `coat_adamw` in optax and Flax, with several codecs.

The tests follow optax's tests of contributed optimizers. Most of them encode
even small leaves, in groups of 4, some of which are short.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from coat_jax import coat_lion, coat_muon, codecs
from coat_jax.optax_coat import apply_updates, coat_adamw, scale_by_coat_adam
from tests.matrices import quick
from tests.optimizer.solvers import (
  CODECS,
  LAYOUTS,
  every_codec,
  make,
  quantize_mask,
  tree,
  types,
)


def steps(solver, params, count=3, update=None):
  """Takes `count` updates with different gradients; returns (params, state)."""
  state = solver.init(params)
  update = jax.jit(solver.update) if update is None else update
  for step in range(count):
    grads = jax.tree.map(
      lambda g, p: g.astype(p.dtype), tree(seed=step + 1), params
    )
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def assert_equal(actual, expected):
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def objective(params):
  """Sums a parabola, Rosenbrock's function and a matrix parabola."""
  x, y = params["rosenbrock"]
  return (
    jnp.sum((params["parabola"] - jnp.array([1.0, -1.0, 1.0])) ** 2)
    + ((1 - x) ** 2 + 100 * (y - x**2) ** 2)
    + jnp.sum((params["matrix"] - jnp.array([[3.0, -2.0], [1.0, 4.0]])) ** 2)
  )


@every_codec
def test_optimizer_converges(name):
  # Adam treats each value separately, so one run can have three targets.
  params = {
    "parabola": jnp.array([-1.0, 10.0, 1.0]),
    "rosenbrock": jnp.zeros(2),
    "matrix": jnp.zeros((2, 2)),
  }
  # Use a schedule. With a constant rate, the last digits never settle in FP8.
  solver = make(name, optax.cosine_decay_schedule(0.1, 4000), weight_decay=0.0)

  def step(carry, _):
    params, state = carry
    grads = jax.grad(objective)(params)
    updates, state = solver.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  run = jax.jit(lambda x: jax.lax.scan(step, x, length=4000)[0])
  params, state = run((params, solver.init(params)))
  assert state[0].count == 4000
  final = {"parabola": [1, -1, 1], "rosenbrock": [1, 1]}
  for key, want in (final | {"matrix": [[3, -2], [1, 4]]}).items():
    np.testing.assert_allclose(params[key], want, atol=3e-2)


# Transformations that users wrap around an optimizer.
WRAPPERS = {
  "none": lambda solver: solver,
  "chain": lambda solver: optax.chain(optax.clip_by_global_norm(1.0), solver),
  "masked": lambda solver: optax.masked(
    solver, {"layer": {"w": True, "f32": False}, "x": True}
  ),
  "partition": lambda solver: optax.partition(
    {"coat": solver, "sgd": optax.sgd(1e-2)},
    {"layer": {"w": "coat", "f32": "sgd"}, "x": "coat"},
  ),
  "multi_steps": lambda solver: optax.MultiSteps(
    solver, every_k_schedule=2
  ).gradient_transformation(),
  "apply_if_finite": lambda solver: optax.apply_if_finite(solver, 3),
  "ema": lambda solver: optax.chain(solver, optax.ema(0.9)),
}


# The last two select between states with `cond` or `where`, so test them with
# every layout of a state.
CHOOSERS = ("none", "multi_steps", "apply_if_finite")


@pytest.mark.parametrize(
  "wrapper, name",
  quick(
    len(WRAPPERS),
    [(wrapper, "coat") for wrapper in WRAPPERS]
    + [(wrapper, name) for wrapper in CHOOSERS for name in LAYOUTS[1:]],
  ),
)
def test_optimizer_works_in_wrappers(wrapper, name):
  solver = WRAPPERS[wrapper](make(name))
  params = tree()
  abstract = jax.eval_shape(solver.init, params)
  state = solver.init(params)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
    lambda x: (x.shape, x.dtype), abstract
  )
  # `map_params` must find the moments inside the wrapper.
  state = optax.tree.map_params(solver, lambda x: x, state)
  before = types(state), types(params)
  # `coat_adamw` must ignore extra arguments.
  extra = {"unexpected": 1} if wrapper in ("none", "chain") else {}

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, grads):
    solver_update = optax.with_extra_args_support(solver).update
    updates, state = solver_update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  start = jax.tree.map(np.asarray, params)
  for i in range(4):
    params, state = step(params, state, tree(seed=i + 1))
  assert step._cache_size() == 1  # Later calls compile nothing.
  assert (types(state), types(params)) == before
  moved = jax.tree.map(lambda a, b: bool(np.all(a != b)), params, start)
  # `optax.masked` returns the gradient of leaf f32 unchanged, so f32 moves too.
  assert all(jax.tree.leaves(moved))


@every_codec
def test_inject_hyperparams_reaches_the_optimizer(name):
  injected = optax.inject_hyperparams(coat_adamw, static_args="quantize_mask")
  injected = injected(1e-2, codec=CODECS[name], quantize_mask=quantize_mask)
  params = tree()
  _, state = steps(injected, params, count=1)
  _, want = steps(make(name), params, count=1)
  assert set(state.hyperparams) >= {"learning_rate", "b1", "b2", "seed"}
  # b2 is now an f32 array. f32(0.999) is off by 1.3e-8, or 1.3e-5 of 1 - b2.
  got = state.inner_state[0]
  np.testing.assert_allclose(
    got.nu.codes["x"], want[0].nu.codes["x"], rtol=2e-5
  )
  assert types(got) == types(want[0])
  if name != "coat":
    return
  # With a learning rate of zero, nothing changes.
  state.hyperparams["learning_rate"] = jnp.float32(0)
  updates, _ = injected.update(tree(1), state, params)
  assert not any(np.any(x) for x in jax.tree.leaves(updates))


def test_inject_hyperparams_needs_no_static_args():
  solver = optax.inject_hyperparams(coat_adamw)(learning_rate=1e-3)
  params = {"w": jnp.ones((32, 128))}
  updates, state = solver.update(params, solver.init(params), params)
  assert state.inner_state[0].mu.codes["w"].dtype == jnp.float8_e4m3fn
  np.testing.assert_allclose(updates["w"], -1e-3 * (1 + 1e-4), rtol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("factory", [coat_adamw, coat_lion, coat_muon])
def test_weight_decay_follows_its_schedule(factory, masked):
  # Muon's argument for this mask has another name.
  name = "weight_decay_mask" if factory is coat_muon else "mask"
  mask = {name: {"w": True}} if masked else {}
  decay = optax.linear_schedule(0.4, 0.0, 4)
  solver = factory(0.5, weight_decay=decay, **mask)
  params = {"w": jnp.ones((4, 8))}
  state = solver.init(params)
  update = jax.jit(solver.update)
  zeros = jax.tree.map(jnp.zeros_like, params)
  for step in range(4):
    # With zero gradients, only the weight decay changes the parameters.
    updates, state = update(zeros, state, params)
    want = jnp.full((4, 8), -0.5 * decay(step))
    np.testing.assert_allclose(updates["w"], want, rtol=1e-6)


@every_codec
def test_optimizer_preserves_dtypes(name):
  dtype = jnp.float16 if name == "fp8" else jnp.bfloat16
  params = tree(dtype=dtype)
  solver = make(name)
  state = solver.init(params)
  updates, new_state = jax.jit(solver.update)(tree(1, dtype), state, params)
  assert types(updates) == types(params)
  assert types(new_state) == types(state)
  assert state[0].mu.codes["layer"]["f32"].dtype == jnp.float32


def test_multi_steps_matches_one_step_with_the_mean():
  params, solver = tree(), scale_by_coat_adam(codec=CODECS["coat"])
  multi = optax.MultiSteps(solver, every_k_schedule=2)
  state = multi.init(params)
  # Gradients are integers, so their mean is exact.
  grads = [jax.tree.map(lambda x: jnp.round(9 * x), tree(i)) for i in (1, 2)]
  for g in grads:
    _, state = multi.update(g, state, params)
  mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
  _, want = solver.update(mean, solver.init(params), params)
  assert_equal(state.inner_opt_state, want)


def test_apply_if_finite_keeps_the_state_after_a_nan():
  solver = optax.apply_if_finite(make("coat"), 3)
  params, state = steps(solver, tree())
  bad = tree(9) | {"x": jnp.float32(jnp.nan)}
  updates, after = solver.update(bad, state, params)
  assert not any(np.any(x) for x in jax.tree.leaves(updates))
  assert_equal(after.inner_state, state.inner_state)


@pytest.mark.parametrize("name", ["coat", "float32"])
def test_vmap_and_scan_match_a_loop(name):
  solver = scale_by_coat_adam(
    codec=CODECS[name], quantize_mask=quantize_mask, seed=3
  )
  trees = [tree(seed) for seed in range(2)]
  grads = [[tree(10 * step + i) for i in range(2)] for step in range(3)]
  stack = functools.partial(jax.tree.map, lambda *x: jnp.stack(x))

  def run(state, grads):
    return jax.lax.scan(
      lambda s, g: (solver.update(g, s)[1], None), state, grads
    )

  states = jax.vmap(solver.init)(stack(*trees))
  scanned = stack(*(stack(*g) for g in grads))
  got, _ = jax.jit(jax.vmap(run, in_axes=(0, 1)))(states, scanned)
  for i in range(2):
    state = solver.init(trees[i])
    for step in range(3):
      _, state = jax.jit(solver.update)(grads[step][i], state)
    member = jax.tree.map(lambda x, i=i: x[i], got)
    assert_equal(member, state)


class Model(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(64, 64, rngs=rngs)
    self.input_layernorm = nnx.LayerNorm(64, rngs=rngs)
    self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs)])

  def __call__(self, x):
    return self.layers[0](nnx.relu(self.input_layernorm(self.up(x))))


def train_nnx(solver, *, jit, count=10):
  """Trains on a random linear map; returns (optimizer, losses)."""
  model = Model(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, solver, wrt=nnx.Param)
  x = jax.random.normal(jax.random.key(0), (16, 64))
  y = x @ jax.random.normal(jax.random.key(1), (64, 64)) / 8

  def step(model, optimizer):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss

  step = nnx.jit(step) if jit else step
  return optimizer, [float(step(model, optimizer)) for _ in range(count)]


@functools.cache
def adam_losses():
  return train_nnx(optax.adamw(1e-2), jit=True)[1]


@pytest.mark.parametrize(
  "name, jit",
  quick(1, [("coat", True), ("coat", False), ("log8", True), ("fp8", True)]),
)
def test_nnx_optimizer_follows_adam(name, jit):
  solver = coat_adamw(1e-2, codec=getattr(codecs, name)())
  optimizer, losses = train_nnx(solver, jit=jit)
  adam = adam_losses()
  assert losses[0] == pytest.approx(adam[0])
  # Rounding changes the loss by less than a tenth of Adam's reduction.
  assert losses[-1] == pytest.approx(adam[-1], abs=0.1 * (adam[0] - adam[-1]))
  state = nnx.to_pure_dict(nnx.state(optimizer.opt_state))[0]
  codes = state["mu"]["codes"]
  assert codes["up"]["kernel"].dtype.itemsize == 1
  assert codes["layers"][0]["kernel"].dtype.itemsize == 1
  assert codes["up"]["bias"].dtype == jnp.float32
  assert codes["input_layernorm"]["scale"].dtype == jnp.float32
  assert state["mu"]["amax"]["up"]["kernel"].shape == (64, 1)


def test_step_changes_an_nnx_model_in_bf16():
  model = nnx.Linear(64, 64, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  solver = coat_adamw(1e-3)
  state = solver.init(nnx.state(model, nnx.Param))

  @nnx.jit
  def step(model, state):
    grads = nnx.grad(lambda m: jnp.mean(m(jnp.ones((4, 64))) ** 2))(model)
    params = nnx.state(model, nnx.Param)
    updates, state = solver.update(grads, state, params)
    nnx.update(model, apply_updates(params, updates, step=state[0].count))
    return state

  before = np.asarray(model.kernel[...])
  new_state = step(model, state)
  assert jax.tree.structure(new_state) == jax.tree.structure(state)
  assert types(new_state) == types(state)
  assert model.kernel[...].dtype == jnp.bfloat16
  assert np.mean(np.asarray(model.kernel[...]) != before) > 0.9
