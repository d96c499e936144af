# SPDX-License-Identifier: Apache-2.0
"""Tests shardings of optimizer states.

Shardings must be as predicted. Steps must keep them and need no communication.
"""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType, NamedSharding

import coat_jax.optimizer.sharding
from coat_jax import coat_adamw, codecs
from coat_jax.optimizer import (
  abstract_state,
  fit_group_size,
  state_shardings,
)
from tests.matrices import quick

# Leaves as (shape, spec). With a last axis of 1024, each of four or eight
# devices holds whole groups of 128. Rows of "short" have a short last group,
# "layers" is a stack of layers, and "norm" and "scale" stay f32.
LEAVES = {
  "replicated": ((8, 512), P()),
  "rows": ((512, 512), P("fsdp")),
  "columns": ((8, 1024), P(None, ("fsdp", "tensor"))),
  "short": ((64, 200), P(("tensor", "fsdp"), None)),
  "layers": ((3, 16, 1024), P(None, "tensor", "fsdp")),
  "norm": ((512,), P("tensor")),
  "scale": ((), P()),
}
KINDS = pytest.mark.parametrize(
  "kind", quick(1, [AxisType.Explicit, AxisType.Auto])
)
COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-permute",
  "reduce-scatter",
)


def make_mesh(kind=AxisType.Auto, shape=(4, 2)):
  return jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(kind,) * 2)


def quantize_mask(path, leaf):
  return leaf.ndim > 1


def where(mesh, names=tuple(LEAVES)):
  # On an explicit mesh, a spec has an entry for each axis. On others, jit drops
  # trailing None. If specs follow these rules, nothing is compiled twice.
  def spec(name):
    shape, spec = LEAVES[name]
    if mesh.axis_types[0] == AxisType.Explicit:
      return P(*spec, *[None] * (len(shape) - len(spec)))
    return P(*spec[:-1]) if spec and spec[-1] is None else spec

  return {name: NamedSharding(mesh, spec(name)) for name in names}


def abstract(names=tuple(LEAVES)):
  return {
    name: jax.ShapeDtypeStruct(LEAVES[name][0], jnp.float32) for name in names
  }


def draw(seed, shardings=None, names=tuple(LEAVES)):
  rng = np.random.default_rng(seed)
  tree = {
    name: jnp.asarray(rng.normal(size=x.shape), x.dtype)
    for name, x in abstract(names).items()
  }
  return tree if shardings is None else jax.device_put(tree, shardings)


def step_of(optimizer):
  def step(params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


def assert_shardings(tree, shardings):
  got = jax.tree.map(lambda x: x.sharding, tree)
  assert jax.tree.structure(tree) == jax.tree.structure(shardings)
  assert got == shardings


def assert_bits(got, want):
  def same(path, x, y):
    x, y = np.asarray(x), np.asarray(y)
    assert x.dtype == y.dtype
    name = jax.tree_util.keystr(path)
    np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8), name)

  def whole(tree):
    return jax.tree.map(lambda x: np.atleast_1d(np.asarray(x)), tree)

  jax.tree_util.tree_map_with_path(same, whole(got), whole(want))


@pytest.mark.parametrize("name", ["coat", "coat_e8m0", "log8", "fp8"])
def test_statistics_are_sharded_like_their_parameters(name):
  codec = getattr(codecs, name)()
  optimizer = coat_adamw(1e-2, codec=codec, quantize_mask=quantize_mask)
  mesh = make_mesh()
  shardings = where(mesh)
  state = abstract_state(optimizer.init, abstract(), shardings)[0]
  assert state.count.sharding == NamedSharding(mesh, P())
  for leaf, (shape, _) in LEAVES.items():
    for moment in ("mu", "nu"):
      codes, amax, range_ = (
        getattr(getattr(state, moment), field)[leaf]
        for field in ("codes", "amax", "range")
      )
      assert codes.sharding == shardings[leaf]
      if leaf in ("norm", "scale"):
        assert codes.dtype == jnp.float32
        groups, spec = (), P()
      else:
        assert codes.dtype.itemsize == 1
        groups, spec = (*shape[:-1], -(-shape[-1] // 128)), shardings[leaf].spec
      assert (amax.shape, amax.sharding.spec) == (groups, spec), leaf
      if name == "fp8":
        groups, spec = (), P()
      assert (range_.shape, range_.sharding.spec) == (groups, spec), leaf


def test_shardings_agree_with_jax_on_explicit_axes():
  optimizer = coat_adamw(1e-2, quantize_mask=quantize_mask)
  mesh = make_mesh(AxisType.Explicit)
  params = jax.tree.map(
    lambda x, s: x.update(sharding=s), abstract(), where(mesh)
  )
  with jax.set_mesh(mesh):
    want = jax.eval_shape(optimizer.init, params)
  got = abstract_state(optimizer.init, params)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    assert x.sharding.spec == (y.sharding.spec if y.sharding else P())
  # The prediction does not depend on the mesh that is set.
  with jax.set_mesh(make_mesh(shape=(2, 4))):
    assert abstract_state(optimizer.init, params) == got


@pytest.fixture(scope="module")
def unsharded():
  optimizer = coat_adamw(1e-2, quantize_mask=quantize_mask)
  params = draw(0)
  state = jax.jit(optimizer.init)(params)
  results = [state]
  step = jax.jit(step_of(optimizer))
  for seed in (1, 2):
    params, state = step(params, state, draw(seed))
    results.append((params, state))
  return optimizer, results


@KINDS
@pytest.mark.parametrize("given", quick(1, [True, False]))
def test_sharded_steps_match_unsharded_steps(unsharded, kind, given):
  optimizer, want = unsharded
  mesh = make_mesh(kind)
  shardings = where(mesh)
  promised = state_shardings(optimizer.init, abstract(), shardings)
  out = (shardings, promised) if given else None
  with jax.set_mesh(mesh):
    params = draw(0, shardings)
    state = jax.jit(optimizer.init, out_shardings=promised)(params)
    assert_bits(state, want[0])
    assert_shardings(state, promised)
    step = jax.jit(step_of(optimizer), out_shardings=out)
    step = step.lower(params, state, params).compile()
    # The step is compiled for the arguments of the first step, and must accept
    # those of the second.
    for i in (1, 2):
      params, state = step(params, state, draw(i, shardings))
      assert_bits((params, state), want[i])
      assert_shardings((params, state), (shardings, promised))
  text = step.as_text()
  assert not [name for name in COLLECTIVES if name in text]


FEW = ("columns", "layers", "norm")
WRAPPED = {
  "chain": lambda: optax.chain(
    optax.clip_by_global_norm(1.0), coat_adamw(1e-2), optax.ema(0.9)
  ),
  "masked": lambda: optax.masked(
    coat_adamw(1e-2), {name: name != "layers" for name in FEW}
  ),
  "partition": lambda: optax.partition(
    {
      "coat": coat_adamw(1e-2),
      "log8": coat_adamw(1e-2, codec=codecs.log8(64)),
      "adam": optax.adam(1e-2),
    },
    {"columns": "coat", "layers": "log8", "norm": "adam"},
  ),
  "accumulated": lambda: optax.MultiSteps(coat_adamw(1e-2), 2),
  "injected": lambda: optax.inject_hyperparams(coat_adamw)(
    learning_rate=1e-2, seed=3
  ),
}


@pytest.mark.parametrize("name", quick(2, WRAPPED))
def test_wrapped_optimizers_are_sharded_like_parameters(name):
  optimizer = WRAPPED[name]()
  mesh = make_mesh()
  shardings = where(mesh, FEW)
  promised = state_shardings(
    optimizer.init,
    abstract(FEW),
    shardings,
  )
  # A parameter's arrays are sharded like it. All other arrays are replicated,
  # and so are the placeholders for statistics of the norm.
  for path, s in jax.tree_util.tree_leaves_with_path(promised):
    keys = [getattr(key, "key", None) for key in path]
    if leaf := [key for key in keys if key in FEW]:
      small = leaf == ["norm"] and {"amax", "range"} & {
        getattr(key, "name", "") for key in path
      }
      assert s == (NamedSharding(mesh, P()) if small else shardings[leaf[0]])
    else:
      assert s == NamedSharding(mesh, P())
  params = draw(0, shardings, FEW)
  state = jax.jit(optimizer.init, out_shardings=promised)(params)
  assert_shardings(state, promised)
  step = jax.jit(step_of(optimizer))
  for seed in (1, 2):
    params, state = step(params, state, draw(seed, shardings, FEW))
    assert_shardings((params, state), (shardings, promised))
  assert step._cache_size() == 1


def test_nnx_optimizer_is_sharded_like_its_model():
  class Model(nnx.Module):
    def __init__(self, rngs):
      out = {"out_sharding": ("tensor", "fsdp")}
      self.up = nnx.Linear(64, 512, kernel_metadata=out, rngs=rngs)
      self.norm = nnx.RMSNorm(512, rngs=rngs)

  mesh = make_mesh()
  with jax.set_mesh(mesh):
    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
  graphdef, params = nnx.split(model, nnx.Param)
  shardings = nnx.get_named_sharding(params, mesh)
  optax_optimizer = coat_adamw(1e-2)

  def init(params):
    model = nnx.merge(graphdef, params)
    return nnx.Optimizer(model, optax_optimizer, wrt=nnx.Param)

  # Flax shards codes and statistics by their metadata.
  state = abstract_state(optax_optimizer.init, params, shardings)[0]
  specs = jax.tree.map(lambda x: x.sharding.spec, state)
  assert specs == nnx.get_partition_spec(state)
  assert specs.mu.codes["up"]["kernel"].get_value() == P("tensor", "fsdp")
  assert specs.nu.amax["up"]["kernel"].get_value() == P("tensor", "fsdp")
  # The same holds for an optimizer object, for its state, and for new arrays.
  promised = state_shardings(init, params, shardings)
  ranges = promised.opt_state[0].nu.range["up"]["kernel"]
  assert ranges.get_value().spec == P("tensor", "fsdp")
  flat = state_shardings(lambda p: nnx.state(init(p)), params, shardings)
  assert jax.tree.leaves(flat["opt_state"][0]["mu"]["amax"]) == jax.tree.leaves(
    promised.opt_state[0].mu.amax
  )
  with jax.set_mesh(mesh):
    made = jax.jit(
      lambda: nnx.split(init(nnx.state(Model(nnx.Rngs(0)), nnx.Param)))[1],
      out_shardings=flat,
    )()
  assert jax.tree.map(lambda x: x.sharding, made) == flat


@pytest.mark.parametrize(
  "columns, message",
  [
    # 384 columns are three groups on four devices. 1000 columns are eight
    # groups, of which the last is short. Shapes alone do not tell whether
    # eight groups have 128 or 125 columns.
    (384, r"got 96 values per device.*\(384 values\).* 96, 48, 32, 24,"),
    (1000, r"groups of 128 .* 250 values per .*'w'.* 125, 50, 25, 10, 5 \("),
  ],
)
def test_groups_split_over_devices_are_refused(columns, message):
  params = {"w": jax.ShapeDtypeStruct((16, columns), jnp.float32)}
  shardings = {"w": NamedSharding(make_mesh(), P(None, "fsdp"))}
  with pytest.raises(ValueError, match=f"^abstract_state: .*{message}"):
    abstract_state(coat_adamw(1e-2).init, params, shardings)
  with pytest.raises(ValueError, match="^state_shardings: "):
    state_shardings(coat_adamw(1e-2).init, params, shardings)
  # If another axis is sharded, short groups are not a problem.
  shardings = {"w": NamedSharding(make_mesh(), P("fsdp"))}
  state = abstract_state(coat_adamw(1e-2).init, params, shardings)[0]
  assert state.mu.amax["w"].sharding.spec == P("fsdp")


@KINDS
def test_fitted_groups_need_no_collective(kind):
  mesh = make_mesh(kind)
  shardings = {"w": NamedSharding(mesh, P(None, "fsdp"))}
  params = {"w": jax.random.normal(jax.random.key(0), (16, 384))}
  codec = fit_group_size(codecs.coat(second="e5m2"), params, shardings)
  assert codec == codecs.coat(96, second="e5m2")
  optimizer = coat_adamw(1e-2, codec=codec)
  promised = state_shardings(optimizer.init, params, shardings)
  step = jax.jit(step_of(optimizer))
  want = step(params, optimizer.init(params), params)
  with jax.set_mesh(mesh):
    params = jax.device_put(params, shardings)
    state = jax.jit(optimizer.init, out_shardings=promised)(params)
    step = step.lower(params, state, params).compile()
    params, state = step(params, state, params)
  assert_bits((params, state), want)
  assert_shardings(state, promised)
  assert not [name for name in COLLECTIVES if name in step.as_text()]


def test_fit_group_size_changes_only_sizes_that_do_not_fit():
  shardings = where(make_mesh())
  params = abstract()
  assert fit_group_size(codecs.coat(), params, shardings) == codecs.coat()
  assert fit_group_size(codecs.log8(256), params, shardings) == codecs.log8()
  assert fit_group_size(codecs.fp8(8), params, shardings) == codecs.fp8(8)
  for codec in (codecs.float32(), codecs.bfloat16()):
    assert fit_group_size(codec, params, shardings) == codec

  def not_columns(path, leaf):
    return leaf.ndim > 1 and path != "columns"

  fitted = fit_group_size(
    codecs.coat(512), params, shardings, quantize_mask=not_columns
  )
  assert fitted == codecs.coat(256)
  params = {"w": jax.ShapeDtypeStruct((512, 4 * 14), jnp.float32)}
  shardings = {"w": NamedSharding(make_mesh(), P(None, "fsdp"))}
  with pytest.raises(ValueError, match=r"16 values, got 14, .*{'w': 14}"):
    fit_group_size(codecs.coat(), params, shardings)
  small = codecs.coat(14)
  assert fit_group_size(small, params, shardings) == small


def test_sharding_errors_name_the_leaf_and_the_remedy():
  init = coat_adamw(1e-2).init
  mesh = make_mesh()
  params = {
    "a": jax.ShapeDtypeStruct((64, 512), jnp.float32),
    "b": jax.ShapeDtypeStruct((6, 512), jnp.float32),
  }
  good = NamedSharding(mesh, P("tensor"))
  with pytest.raises(TypeError, match="got None at 'a'; pass as shardings"):
    state_shardings(init, params)
  with pytest.raises(TypeError, match=r"got P\(\) at 'b'"):
    state_shardings(init, params, {"a": good, "b": P()})
  with pytest.raises(
    ValueError, match=r"none for \['a'\], and unused ones for \['z'\]"
  ):
    state_shardings(init, params, {"z": good, "b": good})
  with pytest.raises(TypeError, match="got SingleDeviceSharding.* at 'a'"):
    state_shardings(init, {"a": jnp.ones((64, 512))})
  with pytest.raises(
    ValueError, match=r"none for \['b'\], and unused ones for \[\]"
  ):
    state_shardings(init, params, {"a": good})
  uneven = NamedSharding(mesh, P("fsdp"))
  with pytest.raises(ValueError, match=r"shape \(6, 512\) at 'b', mesh {'fsdp"):
    state_shardings(init, params, {"a": good, "b": uneven})
  elsewhere = NamedSharding(make_mesh(shape=(2, 4)), P())
  with pytest.raises(ValueError, match="shardings must be on one mesh, got"):
    state_shardings(init, params, {"a": good, "b": elsewhere})


def test_sharding_examples_run():
  assert doctest.testmod(coat_jax.optimizer.sharding).failed == 0
