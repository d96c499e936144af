# SPDX-License-Identifier: Apache-2.0
"""Tests optimizer states that flax shards by axis names.

The tests check the values, and the number of bytes on each device.
"""

import contextlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType

from coat_jax import coat_adamw, encoded
from coat_jax.optimizer import (
  abstract_state,
  fused_coat_adamw,
  split_weights,
  state_bytes,
  state_shardings,
  stochastic_rounding,
)
from coat_jax.optimizer.state import moments_in
from tests.comparing import assert_same_bits
from tests.matrices import quick

DEVICES = 8
# Bytes per parameter on each device with `coat`, with a margin for leaves that
# are not encoded.
MOST = 1.02 * 2.08 / DEVICES
# `MOST`, and the low byte of each bf16 weight.
MOST_WITH_LOW_BYTES = 1.02 * 3.08 / DEVICES


class Model(nnx.Module):
  """Two matrices with named axes, and a bias whose moments stay f32."""

  def __init__(self, dtype, *, rngs):
    def linear(rows, columns, names, use_bias):
      return nnx.Linear(
        rows,
        columns,
        use_bias=use_bias,
        param_dtype=dtype,
        kernel_metadata={"out_sharding": names},
        bias_metadata={"out_sharding": names[1:]},
        rngs=rngs,
      )

    self.up = linear(512, 1024, ("fsdp", "tensor"), use_bias=True)
    self.down = linear(1024, 512, ("tensor", "fsdp"), use_bias=False)


def make_mesh(shape=(4, 2), kind=AxisType.Auto):
  devices = jax.devices()[: shape[0] * shape[1]]
  kinds = (kind,) * 2
  return jax.make_mesh(
    shape, ("fsdp", "tensor"), axis_types=kinds, devices=devices
  )


def optimizer_of(solver, dtype=jnp.float32):
  @nnx.jit
  def make():
    model = Model(dtype, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, solver, wrt=nnx.Param)

  return make


@nnx.jit
def step(model, optimizer):
  # Each gradient depends only on its own weight, so the mesh changes nothing.
  def loss(model):
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return sum(jnp.sum(x**2) for x in leaves)

  optimizer.update(model, nnx.grad(loss)(model))


def bytes_on_devices(state):
  """Returns the number of bytes on each device."""
  out = dict.fromkeys(jax.devices(), 0)
  for x in jax.tree.leaves(state):
    for shard in x.addressable_shards:
      out[shard.device] += shard.data.nbytes
  return list(out.values())


def parameters_in(model):
  return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


SOLVERS = {
  "coat_adamw": lambda: coat_adamw(1e-2),
  "encoded": lambda: encoded(optax.adamw(1e-2)),
}


@pytest.mark.parametrize(
  "name, kind",
  quick(
    1,
    [
      ("coat_adamw", AxisType.Auto),
      ("coat_adamw", AxisType.Explicit),
      ("encoded", AxisType.Auto),
    ],
  ),
)
def test_each_device_stores_its_share_of_an_nnx_optimizer(name, kind, tmp_path):
  make = optimizer_of(SOLVERS[name]())
  with jax.set_mesh(make_mesh((1, 1))):
    want_model, want = make()
    step(want_model, want)
  with jax.set_mesh(make_mesh(kind=kind)):
    model, optimizer = make()
    most = MOST * parameters_in(model)
    assert max(bytes_on_devices(optimizer.opt_state)) <= most
    assert state_bytes(optimizer.opt_state).bytes_per_param > 2.07
    step(model, optimizer)
    assert max(bytes_on_devices(optimizer.opt_state)) <= most
  got = nnx.state((model, optimizer))
  assert_same_bits(nnx.as_pure(got), nnx.as_pure(nnx.state((want_model, want))))

  # Restore on a mesh of another shape.
  path = tmp_path / "state"
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, nnx.state(optimizer))
  other = make_mesh((2, 4), kind)
  with jax.set_mesh(other):
    abstract_model, abstract = nnx.eval_shape(make)
    graphdef, target = nnx.split(abstract)
    target = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      target,
      nnx.get_named_sharding(target, other),
    )
    with ocp.StandardCheckpointer() as checkpointer:
      restored = checkpointer.restore(path, target)
    assert max(bytes_on_devices(restored["opt_state"])) <= most
    assert_same_bits(nnx.as_pure(restored), nnx.as_pure(nnx.state(optimizer)))
    again = nnx.merge(graphdef, restored)
    names = nnx.state(abstract_model)
    placed = jax.device_put(
      nnx.as_pure(nnx.state(model)),
      nnx.as_pure(nnx.get_named_sharding(names, other)),
    )
    nnx.update(model, placed)
    step(model, again)
  with jax.set_mesh(make_mesh((1, 1))):
    step(want_model, want)
  assert_same_bits(
    nnx.as_pure(nnx.state((model, again))),
    nnx.as_pure(nnx.state((want_model, want))),
  )


@pytest.mark.parametrize("kind", quick(1, [AxisType.Auto, AxisType.Explicit]))
def test_each_device_stores_its_share_of_low_bytes(kind):
  solver = optax.chain(coat_adamw(1e-4), stochastic_rounding(low_bits=True))
  make = optimizer_of(solver, jnp.bfloat16)
  with jax.set_mesh(make_mesh((1, 1))):
    want_model, want = make()
    step(want_model, want)
  with jax.set_mesh(make_mesh(kind=kind)):
    model, optimizer = make()
    most = MOST_WITH_LOW_BYTES * parameters_in(model)

    def check():
      assert max(bytes_on_devices(optimizer.opt_state)) <= most
      assert state_bytes(optimizer.opt_state).bytes_per_param > 3.07
      low = optimizer.opt_state[1].low
      # Each weight's byte is on one device. Bytes of the bias are replicated
      # along fsdp.
      share = 2 * 512 * 1024 // DEVICES + 1024 // 2
      assert set(bytes_on_devices(low)) == {share}
      for name, names in (
        ("up", ("fsdp", "tensor")),
        ("down", ("tensor", "fsdp")),
      ):
        assert low[name]["kernel"].get_metadata()["out_sharding"] == names
      return low

    check()
    step(model, optimizer)
    assert any(jnp.any(x) for x in jax.tree.leaves(check()))
  got = nnx.state((model, optimizer))
  assert_same_bits(nnx.as_pure(got), nnx.as_pure(nnx.state((want_model, want))))


class Dense(nn.Module):
  """Two matrices in Linen's boxes, with names of mesh axes or logical axes."""

  box: Any
  names: tuple[str, str]

  @nn.compact
  def __call__(self, x):
    for width, names in ((1024, self.names), (512, self.names[::-1])):
      init = self.box(nn.initializers.lecun_normal(), names)
      x = nn.Dense(width, use_bias=False, kernel_init=init)(x)
    return x


RULES = (("embed", "fsdp"), ("mlp", "tensor"))


@pytest.mark.parametrize("low_bits", quick(1, [True, False]))
@pytest.mark.parametrize("logical", [False, True])
def test_each_device_stores_its_share_of_a_linen_state(logical, low_bits):
  solver = fused_coat_adamw(1e-2, low_bits=low_bits)
  model = (
    Dense(nn.with_logical_partitioning, ("embed", "mlp"))
    if logical
    else Dense(nn.with_partitioning, ("fsdp", "tensor"))
  )

  def make():
    params = model.init(jax.random.key(0), jnp.ones((1, 512)))["params"]
    state = solver.init(params)
    if low_bits:
      params, _ = split_weights(params)
    return {"params": params, "optimizer": state}

  def step(state):
    params, new = solver.apply(
      state["params"], state["optimizer"], state["params"]
    )
    return {"params": params, "optimizer": new}

  mesh = make_mesh()
  want = jax.jit(step)(jax.jit(make)())
  with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
    specs = nn.get_partition_spec(jax.eval_shape(make))
    shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
    if not logical:
      shardings = nn.get_sharding(jax.eval_shape(make), mesh)
    state = jax.jit(make, out_shardings=shardings)()
    most = MOST_WITH_LOW_BYTES if low_bits else MOST
    most *= sum(x.size for x in jax.tree.leaves(state["params"]))
    assert max(bytes_on_devices(state["optimizer"])) <= most
    state = jax.jit(step)(state)
    assert max(bytes_on_devices(state["optimizer"])) <= most
  assert_same_bits(state, want)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", SOLVERS)
def test_predicted_shardings_match_those_of_init(kind, inside, name):
  # `state_shardings` and `init` treat axis names alike, also without a mesh.
  mesh = make_mesh()
  solver = optax.chain(optax.clip(1.0), SOLVERS[name]())
  names = ("fsdp", "tensor")
  with jax.set_mesh(mesh):
    params = {"w": jax.device_put(jnp.ones((64, 512)), P(*names))}
    if kind == "nnx":
      params = nnx.State({"w": nnx.Param(params["w"], out_sharding=names)})
    else:
      params = {"w": nn.Partitioned(params["w"], names)}
  with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
    promised = state_shardings(solver.init, params)
    state = jax.jit(solver.init, out_shardings=promised)(params)
    assert jax.tree.map(lambda x: x.sharding, state) == promised
    target = abstract_state(solver.init, params)
    assert jax.tree.structure(target) == jax.tree.structure(state)
    _, new = jax.jit(solver.update)(params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)
  amax = moments_in(state)[0].amax["w"]
  assert jax.tree.leaves(amax)[0].sharding.spec == P(*names)
