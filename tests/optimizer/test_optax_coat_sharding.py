# SPDX-License-Identifier: Apache-2.0
"""Tests optax_coat.py on meshes of eight devices.

Results match those on one device, types of the state do not change, and whole
groups need no communication. Optax has similar tests of sharded states.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from coat_jax import codecs
from coat_jax.optax_coat import apply_updates, coat_adamw, scale_by_coat_adam
from tests.matrices import quick

CODECS = {
  name: getattr(codecs, name)() for name in ("coat", "coat_e8m0", "log8", "fp8")
}
# Leaves as (shape, spec). "whole": each device holds whole groups. "across":
# two devices share the second of three groups. "short": two devices share the
# first group, and the second has only 72 values. "rows": only rows are sharded.
# "f32": the moments stay in f32.
LEAVES = {
  "whole": ((8, 512), jax.P("x", "y")),
  "across": ((4, 384), jax.P("x", "y")),
  "short": ((2, 8, 200), jax.P(None, "x", "y")),
  "rows": ((8, 512), jax.P(("x", "y"), None)),
  "f32": ((8,), jax.P("x")),
  "scalar": ((), jax.P()),
}


def mesh(kind):
  return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)


def quantize_mask(path, leaf):
  return leaf.ndim > 1


def tree(seed, mesh=None, dtype=jnp.float32, names=tuple(LEAVES)):
  rng = np.random.default_rng(seed)
  out = {}
  for name in names:
    shape, spec = LEAVES[name]
    x = jnp.asarray(rng.normal(size=shape), dtype)
    out[name] = jax.device_put(x, NamedSharding(mesh, spec)) if mesh else x
  return out


def run(solver, mesh=None, jit=True, names=tuple(LEAVES)):
  """Takes three steps; returns (parameters, state)."""
  params = tree(0, mesh, names=names)
  state = solver.init(params)

  def step(params, state, grads):
    updates, state = solver.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  step = jax.jit(step) if jit else step
  for seed in (1, 2, 3):
    params, state = step(params, state, tree(seed, mesh, names=names))
  return params, state


@functools.cache
def solver_and_result(name, names):
  """Returns an optimizer, and its result on one device."""
  solver = coat_adamw(1e-2, codec=CODECS[name], quantize_mask=quantize_mask)
  return solver, run(solver, names=names)


@pytest.mark.parametrize(
  "name, kind",
  # In every run, tests/optimizer/test_sharding.py makes a similar comparison.
  quick(
    0,
    [(name, AxisType.Auto) for name in CODECS] + [("coat", AxisType.Explicit)],
  ),
)
def test_sharded_steps_match_unsharded_steps(name, kind):
  # Compiling all leaves for all codecs would take a minute.
  names = tuple(LEAVES) if name == "coat" else ("whole", "across")
  solver, (want, want_state) = solver_and_result(name, names)
  devices = mesh(kind)
  with jax.set_mesh(devices):
    params, state = run(solver, devices, names=names)

  def trees_of(params, state):
    fields = ("codes", "amax", "range")
    moments = {"mu": state.mu, "nu": state.nu}
    return {"params": params} | {
      f"{name} {field}": getattr(moment, field)
      for name, moment in moments.items()
      for field in fields
    }

  trees = trees_of(params, state[0])
  want = trees_of(want, want_state[0])
  assert state[0].count == 3
  for leaf in names:
    shape, spec = LEAVES[leaf]
    for field, tree in trees.items():
      got, expected = np.asarray(tree[leaf]), np.asarray(want[field][leaf])
      if leaf != "short" or got.dtype.itemsize == 1:
        np.testing.assert_array_equal(got, expected, f"{field} {leaf}")
      else:
        # To share and pad these groups, the compiler makes another program,
        # which may round b1 * mu + (1 - b1) * g once where the program for one
        # device rounds twice. In each step, they differ by up to an ulp of the
        # larger product. For these values, no code changes.
        np.testing.assert_allclose(got, expected, rtol=3 * 2.0**-23, atol=1e-7)
    # If devices have whole groups, the compiler has no reason to move them.
    if kind == AxisType.Explicit or leaf not in ("across", "short"):
      where = NamedSharding(devices, spec)
      for field in ("params", "mu codes", "nu codes"):
        got = trees[field][leaf].sharding
        assert got.is_equivalent_to(where, len(shape)), (field, leaf)


def state_types(state):
  return jax.tree.map(jax.typeof, state)


@pytest.mark.parametrize("jit", quick(0, [True, False]))
def test_updates_do_not_change_types_of_the_state(jit):
  solver = coat_adamw(1e-2, quantize_mask=quantize_mask)
  devices = mesh(AxisType.Explicit)
  with jax.set_mesh(devices):
    params = tree(0, devices)
    want = state_types(solver.init(params))
    if jit:
      assert state_types(jax.jit(solver.init)(params)) == want
    assert state_types(run(solver, devices, jit=jit)[1]) == want
  types = want[0]
  assert types.mu.codes["across"].sharding.spec == jax.P("x", "y")
  # Two devices cannot divide three groups, so each has the statistics of all
  # three. They can divide four.
  assert types.mu.amax["across"].sharding.spec == jax.P("x", None)
  assert types.mu.amax["whole"].sharding.spec == jax.P("x", "y")


def collectives(compiled):
  names = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
  text = compiled.as_text()
  return [name for name in names if name in text]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_whole_groups_need_no_collective(kind):
  solver = scale_by_coat_adam(quantize_mask=quantize_mask)
  devices = mesh(kind)
  with jax.set_mesh(devices):
    grads = {k: tree(0, devices)[k] for k in ("whole", "rows", "f32")}
    state = solver.init(grads)
    compiled = jax.jit(solver.update).lower(grads, state).compile()
  assert not collectives(compiled)
  # Each device generates only the random words that it uses, an eighth of all.
  assert "[8,512]" not in compiled.as_text()


@pytest.mark.parametrize("kind", quick(1, [AxisType.Auto, AxisType.Explicit]))
def test_apply_updates_does_not_depend_on_sharding(kind):
  def step(params, updates):
    return apply_updates(params, updates, step=3)

  devices = mesh(kind)
  want = step(tree(0, dtype=jnp.bfloat16), tree(1))
  with jax.set_mesh(devices):
    params = tree(0, devices, jnp.bfloat16)
    got = jax.jit(step)(params, tree(1, devices))
  assert state_types(got) == state_types(params)
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)),
    got,
    want,
  )


@pytest.mark.parametrize("kind", quick(1, [AxisType.Explicit, AxisType.Auto]))
def test_nnx_variables_are_sharded_by_their_metadata(kind):
  # Two devices cannot divide one group, so statistics lose that axis's name.
  with jax.set_mesh(mesh(kind)):
    model = nnx.Linear(
      64,
      96,
      kernel_metadata={"out_sharding": ("x", "y")},
      bias_metadata={"out_sharding": ("y",)},
      rngs=nnx.Rngs(0),
    )
    optimizer = nnx.Optimizer(model, coat_adamw(1e-2), wrt=nnx.Param)

    def step(model, optimizer):
      grads = nnx.grad(lambda m: jnp.sum(m.kernel[...] ** 2))(model)
      optimizer.update(model, grads)

    nnx.jit(step)(model, optimizer)
    state = optimizer.opt_state[0]
    codes, amax = state.mu.codes["kernel"][...], state.mu.amax["kernel"][...]
    assert codes.dtype == jnp.float8_e4m3fn and amax.shape == (64, 1)
    where = NamedSharding(mesh(kind), jax.P("x", "y"))
    assert codes.sharding.is_equivalent_to(where, 2)
    where = NamedSharding(mesh(kind), jax.P("x", None))
    assert amax.sharding.is_equivalent_to(where, 2)


def test_codes_and_statistics_keep_their_linen_boxes():
  model = nn.Dense(
    96, kernel_init=nn.with_partitioning(nn.initializers.ones, ("x", "y"))
  )
  params = model.init(jax.random.key(0), jnp.ones((1, 64)))
  solver = coat_adamw(1e-2)
  state = jax.eval_shape(solver.init, params)
  specs = nn.get_partition_spec(state)[0]
  assert specs.mu.codes["params"]["kernel"] == jax.P("x", "y")
  assert specs.mu.amax["params"]["kernel"] == jax.P("x", None)
  _, state = solver.update(params, solver.init(params), params)
  amax = state[0].mu.amax["params"]["kernel"]
  assert amax.value.shape == (64, 1) and amax.names == ("x", None)
