# SPDX-License-Identifier: Apache-2.0
"""Runs optax's tests of `adamw` on `coat_adamw`, with each codec.

They are optax's tests of aliases, contributed optimizers and shardings, except
for those in `test_optax_coat`.
"""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

from coat_jax import coat_adamw, codecs, scale_by_coat_adam
from coat_jax.optimizer import from_plain_state, to_plain_state
from coat_jax.optimizer.report import state_report
from tests.matrices import quick
from tests.optimizer.solvers import CODECS, LAYOUTS, every_codec, make, types

REAL = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")


def everything(path, leaf):
  return True


def test_arguments_are_those_of_optax():
  ours = inspect.signature(inspect.unwrap(coat_adamw)).parameters
  theirs = inspect.signature(optax.adamw).parameters
  # There is no mu_dtype, because the codec defines how moments are stored.
  # Arguments that follow it in optax are keyword-only in `coat_adamw`.
  names = [name for name in theirs if name != "mu_dtype"]
  assert list(ours)[: len(names)] == names
  for name in names:
    assert ours[name].default == theirs[name].default
  by_position = names[: names.index("weight_decay")]
  assert {
    name for name, x in ours.items() if x.kind != inspect.Parameter.KEYWORD_ONLY
  } == {*by_position}
  args = 1e-3, 0.8, 0.9, 1e-6, 1e-8
  params = {"w": jnp.ones((4, 8))}
  got, want = (
    f.update(params, f.init(params), params)[0]["w"]
    for f in (
      coat_adamw(*args, weight_decay=0.1, codec=codecs.float32()),
      optax.adamw(*args, weight_decay=0.1),
    )
  )
  np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("params", REAL + COMPLEX)
def test_dtypes_of_updates_match_optax(params):
  with jax.enable_x64(params in ("float64", "complex128")):
    p = jax.ShapeDtypeStruct((3, 8), params)
    kinds = COMPLEX if params in COMPLEX else REAL
    for grads in kinds if jax.config.jax_enable_x64 else kinds[:-1]:
      g = jax.ShapeDtypeStruct((3, 8), grads)

      def dtype(solver, p=p, g=g):
        return jax.eval_shape(
          lambda p, g: solver.update(g, solver.init(p), p)[0], p, g
        ).dtype

      kwargs = {"quantize_mask": everything} if params in REAL else {}
      for ours, theirs in (
        (coat_adamw(1e-3, **kwargs), optax.adamw(1e-3)),
        (scale_by_coat_adam(**kwargs), optax.scale_by_adam()),
      ):
        assert dtype(ours) == dtype(theirs), grads


def target(dtype):
  """Returns parameters, a target, and a parabola with its minimum there."""
  params = jnp.array([-1.0, 10.0, 1.0], dtype)
  end = jnp.array([1.0, -1.0, 1.0], dtype)
  if jnp.iscomplexobj(params):
    end = end * (1 + 1j)
  return params, end, lambda x: jnp.sum(jnp.abs(x - end) ** 2)


def solver_for(name, dtype, **kwargs):
  """Returns an optimizer that encodes all leaves, complex ones as two reals."""
  solver = make(name, quantize_mask=everything, **kwargs)
  if dtype in COMPLEX:
    solver = optax.contrib.split_real_and_imaginary(solver)
  return solver


KEPT = [("coat", "complex64"), ("log8", "float16")]
# Test each layout of a state with all dtypes, other codecs with one dtype.
KEPT += [
  case
  for case in (
    *itertools.product(LAYOUTS, REAL + COMPLEX),
    *zip(sorted(CODECS.keys() - {*LAYOUTS}), REAL, strict=True),
  )
  if case not in KEPT
]


@pytest.mark.parametrize("name, dtype", quick(2, KEPT))
def test_state_keeps_its_types(name, dtype):
  with jax.enable_x64(dtype in ("float64", "complex128")):
    params, _, objective = target(dtype)
    solver = solver_for(name, dtype)

    @jax.jit
    def step(params, state):
      grads = jax.tree.map(jnp.conj, jax.grad(objective)(params))
      # Both branches must return the same types.
      updates, state = jax.lax.cond(
        params[0].real < 1e4,
        lambda: solver.update(grads, state, params),
        lambda: (params, state),
      )
      return optax.apply_updates(params, updates), state

    state = solver.init(params)
    before = types((params, state))
    for _ in range(2):
      params, state = step(params, state)
    assert types((params, state)) == before
    assert np.all(np.isfinite(np.asarray(params, "complex128")))


@pytest.mark.parametrize("name", quick(1, CODECS))
def test_complex_parameters_converge_if_split_into_reals(name):
  params, end, objective = target("complex64")
  schedule = optax.cosine_decay_schedule(0.1, 1500)
  solver = solver_for(
    name, "complex64", learning_rate=schedule, weight_decay=0.0
  )
  state = optax.tree.map_params(solver, lambda x: x, solver.init(params))

  def step(carry, _):
    params, state = carry
    grads = jnp.conj(jax.grad(objective)(params))
    updates, state = solver.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  run = jax.jit(lambda x: jax.lax.scan(step, x, length=1500)[0])
  params, _ = run((params, state))
  np.testing.assert_allclose(params, end, atol=3e-2)


@pytest.mark.parametrize("nesterov", [False, True])
def test_complex_leaves_that_are_not_encoded_match_optax(nesterov):
  params = {
    "complex": jnp.array([[1 + 2j, -3j, 0.5]] * 2, "complex64"),
    "w": jnp.ones((64, 64)),
  }
  ours = coat_adamw(1e-2, nesterov=nesterov)
  theirs = optax.adamw(1e-2, nesterov=nesterov)
  state, their_state = ours.init(params), theirs.init(params)
  assert state[0].mu.codes["complex"].dtype == "complex64"
  assert state[0].nu.codes["complex"].dtype == "float32"
  assert state[0].mu.codes["w"].dtype == jnp.float8_e4m3fn
  update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
  for step in range(3):
    g = jax.random.normal(jax.random.key(step), (2, 3), "complex64")
    grads = {"complex": g, "w": jnp.ones((64, 64))}
    updates, state = update(grads, state, params)
    want, their_state = their_update(grads, their_state, params)
    # A different order of operations changes updates by a few ulps.
    np.testing.assert_allclose(
      updates["complex"], want["complex"], rtol=2e-6, atol=1e-8
    )
  # Convert to optax's state and back, and report.
  adam = to_plain_state(state)
  assert types(adam[0]) == types(their_state[0])
  np.testing.assert_allclose(
    adam[0].nu["complex"], their_state[0].nu["complex"], rtol=1e-6
  )
  back = from_plain_state(adam, state)
  for field in ("mu", "nu"):
    a, b = (getattr(s[0], field).codes["complex"] for s in (back, state))
    np.testing.assert_array_equal(a, b)
  report = state_report(state, reference=their_state[0])
  assert not report["complex"]["encoded"]
  assert report["complex"]["mu"]["relative_error"] < 1e-6


def test_complex_leaves_cannot_be_encoded():
  solver = coat_adamw(1e-3, quantize_mask=everything)
  params = {"z": jnp.ones((2, 8), "complex64")}
  with pytest.raises(TypeError, match="complex64 at 'z'.*split_real_and_imag"):
    solver.init(params)


SHAPES = ((0,), (0, 128), (4, 0), (2, 0, 3))


@pytest.mark.parametrize("name", quick(1, CODECS))
def test_empty_leaves_are_accepted(name):
  params = {str(shape): jnp.zeros(shape) for shape in SHAPES}
  params["some"] = jnp.ones((2, 8))
  codec = CODECS[name]
  solver = coat_adamw(1e-2, codec=codec, quantize_mask=everything)

  @jax.jit
  def step(params):
    state = solver.init(params)
    updates, new_state = solver.update(params, state, params)
    assert types(new_state) == types(state)
    return optax.apply_updates(params, updates), new_state

  new, state = step(params)
  assert types(new) == types(params)
  assert np.all(np.asarray(new["some"]) < 1)
  if name == "coat":
    report = state_report(state)
    assert report["(4, 0)"]["nu"]["zeroed"] == 0


@every_codec
def test_init_accepts_abstract_parameters(name):
  params = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)
  solver = make(name, quantize_mask=everything)
  assert types(solver.init(params)) == types(solver.init(jnp.zeros((2, 4, 8))))


@pytest.mark.parametrize(
  "jit, name",
  quick(
    1, [*((True, name) for name in CODECS), (False, "coat"), (False, "fp8")]
  ),
)
def test_types_of_the_state_on_explicit_axes_are_preserved(name, jit):
  solver = make(name, quantize_mask=everything)
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
  where = NamedSharding(mesh, jax.P(None, "x"))
  with jax.set_mesh(mesh):
    params = jnp.zeros((2, 8, 4), jnp.float16, out_sharding=where)
    state = solver.init(params)
    assert types(jax.jit(solver.init)(params)) == types(state)
    update = jax.jit(solver.update) if jit else solver.update
    _, new = update(params, state, params)
    assert types(new) == types(state)


# Leaves as (shape, spec): a norm's scale, a last axis shorter than a group, and
# a last axis of which each device holds half a group.
LEAVES = {
  "scale": ((512,), jax.P("x")),
  "short": ((128, 40), jax.P("x")),
  "half": ((64, 512), jax.P(None, "x")),
}
WRAPPED = {
  "alone": lambda solver: solver,
  "chain": lambda solver: optax.chain(optax.clip_by_global_norm(1.0), solver),
  "multi_steps": lambda solver: optax.MultiSteps(solver, 2),
  "injected": lambda _: optax.inject_hyperparams(coat_adamw)(1e-2),
}


def draw(seed, shardings=None):
  rng = np.random.default_rng(seed)
  tree = {
    name: jnp.asarray(rng.normal(size=shape), jnp.float32)
    for name, (shape, _) in LEAVES.items()
  }
  return tree if shardings is None else jax.device_put(tree, shardings)


@pytest.mark.parametrize("wrapper", quick(1, WRAPPED))
def test_tree_map_params_computes_shardings(wrapper):
  solver = WRAPPED[wrapper](coat_adamw(1e-2))
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
  shardings = {k: NamedSharding(mesh, spec) for k, (_, spec) in LEAVES.items()}
  state = jax.eval_shape(solver.init, draw(0))
  where = optax.tree.map_params(
    solver,
    lambda _, s: s,
    state,
    shardings,
    transform_non_params=lambda _: NamedSharding(mesh, jax.P()),
  )

  def step(params, state, grads):
    updates, state = solver.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  # `where` has one sharding for all of a moment's statistics. Expand it.
  each = jax.tree.broadcast(where, state)
  assert jax.tree.structure(each) == jax.tree.structure(state)
  params = draw(0, shardings)
  made = jax.jit(solver.init, out_shardings=where)(params)
  for _, mu in optax.tree.get_all_with_path(made, "mu"):
    assert jax.tree.map(lambda x: x.sharding, mu.codes) == shardings
  sharded = jax.jit(step, out_shardings=(shardings, where))
  got = sharded(params, made, draw(1, shardings))
  params = draw(0)
  want = jax.jit(step)(params, solver.init(params), draw(1))
  if wrapper == "chain":
    # The norm is summed over devices, in a different order than on one device.
    got, want = got[0], want[0]

  def same(a, b):
    a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=1e-5 if wrapper == "chain" else 0)

  jax.tree.map(same, got, want)


def test_tree_map_params_maps_only_codes():
  solver = coat_adamw(1e-2)
  state = solver.init(draw(0))
  seen = []
  mapped = optax.tree.map_params(
    solver,
    lambda x, name: seen.append((name, x.shape)) or x,
    state,
    {name: name for name in LEAVES},
    transform_non_params=functools.partial(jax.tree.map, lambda x: x + 0),
  )
  assert seen == 2 * [(k, LEAVES[k][0]) for k in sorted(LEAVES)]
  assert types(mapped) == types(state)
