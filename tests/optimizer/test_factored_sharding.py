# SPDX-License-Identifier: Apache-2.0
"""Tests factored second moments on several devices."""

import functools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import coat_adamw, codecs, encoded
from coat_jax.codecs.factored import Factored
from coat_jax.optimizer import (
  abstract_state,
  check_stored,
  from_plain_state,
  fused_coat_adamw,
  state_shardings,
  to_plain_state,
)
from tests.comparing import assert_same_bits
from tests.matrices import quick
from tests.optimizer.test_factored import (
  CODEC,
  EXACT,
  make_mesh,
  run,
  step_of,
  tree,
)


@pytest.mark.parametrize("kind", quick(1, [AxisType.Auto, AxisType.Explicit]))
@pytest.mark.parametrize("fused", [False, True])
def test_steps_on_eight_devices_match_one_device(kind, fused):
  make = fused_coat_adamw if fused else coat_adamw
  # With m in f32, no rounding to codes amplifies differences in the last bits.
  codec = codecs.MomentCodec(name="f", mu=codecs.float32().mu, nu=Factored())
  plain = make(1e-2, codec=codec)
  mesh = make_mesh(kind)
  where = None
  if kind == AxisType.Auto:
    where = jax.tree.map(lambda x: x.sharding, tree(0, mesh))
  sharded = make(1e-2, codec=codec, shardings=where)
  step = step_of if not fused else applied
  want = train(plain, step)
  with jax.set_mesh(mesh):
    params = tree(0, mesh)
    expected = abstract_state(sharded.init, params)
    got = train(sharded, step, mesh)
  for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  for a, b in zip(*map(jax.tree.leaves, (got[1], expected)), strict=True):
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
  moment = got[1][0].nu if not fused else got[1].nu
  for x, local in (
    (moment.amax["layers/w"], (2, 256, 2)),
    (moment.range["layers/w"], (2, 1, 256)),
    (moment.amax["layers/c"], (3, 32, 2, 2)),
    (moment.range["layers/c"], (3, 1, 2, 256)),
  ):
    assert x.sharding.shard_shape(x.shape) == local


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("name", ["layers/w", "layers/c"])
def test_only_devices_that_share_a_tile_communicate(kind, is_known, name):
  mesh = make_mesh(kind)
  params = {name: tree(0, mesh)[name]}
  where = jax.tree.map(lambda x: x.sharding, params) if is_known else None
  with jax.set_mesh(mesh):
    optimizer = fused_coat_adamw(1e-2, codec=CODEC, shardings=where)
    state = optimizer.init(params)
    if kind == AxisType.Auto:
      state = jax.device_put(state, state_shardings(optimizer.init, params))
    step = applied(optimizer).lower(params, state, params)
    text = step.compile().as_text()
  assert bool(collectives(text)) == (name == "layers/c")


def collectives(text):
  """Returns the sizes of the results of a program's collectives."""
  kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
  results = re.findall(rf" = (.*?) (?:{kinds})(?:-start)?\(", text)
  return [
    math.prod(map(int, shape.split(","))) if shape else 1
    for result in results
    for shape in re.findall(r"\w\[([\d,]*)\]", result)
  ]


@pytest.mark.parametrize(
  "rows, is_split", [(50304, False), (11008, False), (1024, True)]
)
def test_devices_exchange_at_most_the_means_of_shared_tiles(rows, is_split):
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
  where = NamedSharding(mesh, P("x"))
  x = jax.ShapeDtypeStruct((rows, 256), "float32", sharding=where)
  optimizer = fused_coat_adamw(1e-2, codec=CODEC, shardings={"w": where})
  params = {"w": x}
  state = abstract_state(optimizer.init, params)
  step = applied(optimizer).lower(params, state, params)
  explained = optimizer.explain(params)["w"]
  assert ("xla everywhere" in explained) == is_split
  sizes = collectives(step.compile().as_text())
  # If a leaf has 1,024 rows, tiles have 256 rows, but each device has 128.
  assert bool(sizes) == is_split and max(sizes, default=0) <= 4 * 256


@functools.cache
def applied(optimizer):
  return jax.jit(lambda p, s, g: optimizer.apply(g, s, p))


def train(optimizer, step, mesh=None):
  params = tree(0, mesh)
  state = jax.jit(optimizer.init)(params)
  for seed in (1, 2, 3):
    params, state = step(optimizer)(params, state, tree(seed, mesh))
  return params, state


def test_checkpoint_is_restored_on_another_mesh(tmp_path):
  optimizer = coat_adamw(1e-2, codec=CODEC)
  _, state = run(optimizer, make_mesh())
  other = abstract_state(optimizer.init, tree(0, make_mesh(shape=(2, 4))))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    check_stored(checkpointer.metadata(tmp_path / "state"), other)
    restored = checkpointer.restore(tmp_path / "state", other)
  assert_same_bits(restored, state)
  for a, b in zip(*map(jax.tree.leaves, (restored, other)), strict=True):
    assert a.sharding == b.sharding


def test_shard_has_the_row_axis_of_the_whole_leaf():
  # Each device has 256 of 1,024 rows, but 260 values along the next axis.
  shape = (1024, 260, 16)
  mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
  where = NamedSharding(mesh, P("x"))
  x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
  found = []
  for leaf, sharding in ((x, None), (jax.device_put(x, where), {"w": where})):
    optimizer = fused_coat_adamw(1e-3, codec=EXACT, shardings=sharding)
    params = {"w": leaf}
    state = optimizer.init(params)
    assert state.nu.range["w"].shape == (4, 260, 16)
    found.append(jax.jit(optimizer.apply)(params, state, params))
  for a, b in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_boxes_drop_the_names_of_axes_that_cannot_be_split(kind):
  names = ("layers", "x", "y")
  x = jnp.ones((3, 64, 128))
  param = (
    nnx.Param(x, out_sharding=names, eager_sharding=False)
    if kind == "nnx"
    else nn.Partitioned(x, names)
  )
  with jax.set_mesh(make_mesh()), nn.logical_axis_rules([("layers", None)]):
    nu = coat_adamw(1e-2, codec=CODEC).init({"w": param})[0].nu

  def names_of(box):
    if kind == "linen":
      return box.names
    return box.get_metadata()["out_sharding"]

  assert not names_of(nu.codes["w"])
  assert names_of(nu.amax["w"]) == ("layers", "x", None)
  assert names_of(nu.range["w"]) == ("layers", None, "y")
  # The decoded moment has the parameter's names again.
  with jax.set_mesh(make_mesh()), nn.logical_axis_rules([("layers", None)]):
    plain = to_plain_state(coat_adamw(1e-2, codec=CODEC).init({"w": param}))
    assert names_of(plain[0].nu["w"]) == names
    wrapped = encoded(optax.scale_by_rms(), CODEC)
    updates, _ = wrapped.update({"w": param}, wrapped.init({"w": param}))
    assert names_of(updates["w"]) == names


def test_encoded_and_conversion_accept_groups_split_by_explicit_axes():
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
  with jax.set_mesh(mesh):
    w = jax.device_put(jnp.ones((64, 512)), NamedSharding(mesh, P(None, "x")))
    assert encoded(optax.scale_by_adam()).init({"w": w})
    like = coat_adamw(1e-2).init({"w": w})
    plain = optax.adamw(1e-2).init({"w": w})
    assert from_plain_state(plain, like)
