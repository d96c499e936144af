# SPDX-License-Identifier: Apache-2.0
"""Tests that statistics of boxed parameters keep boxes and valid axis names."""

import contextlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import meta, spmd
from flax.nnx.bridge.variables import NNXMeta
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import coat_adamw, coat_lion, codecs, encoded
from coat_jax.optimizer import (
  from_integers,
  from_plain_state,
  fused_coat_adamw,
  state_report,
  to_integers,
  to_plain_state,
)
from coat_jax.optimizer.boxes import box_like
from tests.comparing import assert_same_bits


def make_mesh(shape=(4, 2)):
  kinds = (AxisType.Auto,) * 2
  return jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=kinds)


def boxed(kind, names, shape=(64, 512), **metadata):
  """Makes an unsharded parameter in one of flax's boxes."""
  x = jnp.ones(shape)
  if kind == "nnx":
    return nnx.Param(x, out_sharding=names, eager_sharding=False, **metadata)
  if kind == "bridge":
    return NNXMeta(nnx.Param, x, {"out_sharding": names, **metadata})
  if kind == "linen":
    return nn.Partitioned(x, names, **metadata)
  rules = metadata.pop("sharding_rules", None)
  return nn.LogicallyPartitioned(x, names, rules=rules, **metadata)


BOXES = ("nnx", "bridge", "linen", "logical")


def names_of(box):
  if isinstance(box, nn.Partitioned):
    return box.names
  metadata = box.metadata if isinstance(box, NNXMeta) else box.get_metadata()
  return metadata["out_sharding"]


def statistic_names(param):
  groups = -(-jnp.shape(jax.tree.leaves(param)[0])[-1] // 128)
  (x,) = jax.tree.leaves(param)
  statistic = jnp.ones((*x.shape[:-1], groups))
  return names_of(box_like({"w": param}, [statistic])["w"])


@contextlib.contextmanager
def with_rules(*rules):
  with spmd.logical_axis_rules(rules):
    yield


@pytest.mark.parametrize("kind", BOXES)
def test_last_name_is_kept_only_if_devices_hold_whole_groups(kind):
  with jax.set_mesh(make_mesh()):
    assert statistic_names(boxed(kind, ("fsdp", "tensor"))) == (
      "fsdp",
      "tensor",
    )
    both = (None, ("fsdp", "tensor"))
    assert statistic_names(boxed(kind, both)) == (None, None)
    assert statistic_names(boxed(kind, both, (64, 1024))) == both
    # 352 columns are three groups, which two devices cannot share evenly.
    assert statistic_names(boxed(kind, ("fsdp", "tensor"), (64, 352))) == (
      "fsdp",
      None,
    )
    # Names may be absent from the mesh, too few, too many, or missing.
    assert statistic_names(boxed(kind, ("fsdp", "heads"))) == ("fsdp", None)
    assert statistic_names(boxed(kind, ("fsdp",))) == ("fsdp",)
    many = boxed(kind, ("fsdp", "tensor", "data"))
    assert statistic_names(many) == ("fsdp", "tensor")
    assert not statistic_names(boxed(kind, ()))
    assert not statistic_names(boxed(kind, None))
    assert not statistic_names(boxed(kind, "tensor"))
  # The box's own mesh takes precedence over the mesh that is set.
  with jax.set_mesh(make_mesh((1, 8))):
    param = boxed(kind, ("fsdp", "tensor"))
    assert statistic_names(param) == ("fsdp", None)
    param = boxed(kind, ("fsdp", "tensor"), mesh=make_mesh())
    assert statistic_names(param) == ("fsdp", "tensor")


@pytest.mark.parametrize("kind", BOXES)
def test_last_name_is_dropped_without_a_mesh(kind):
  names = ("fsdp", "tensor")
  assert statistic_names(boxed(kind, names)) == ("fsdp", None)
  param = boxed(kind, names, mesh=make_mesh())
  assert statistic_names(param) == names
  # If a rule does not shard the last axis, its name needs no mesh.
  with with_rules(("tensor", None)):
    assert statistic_names(boxed(kind, names)) == names


@pytest.mark.parametrize("kind", BOXES)
def test_rules_map_logical_names_to_mesh_axes(kind):
  names = ("embed", "mlp")
  with jax.set_mesh(make_mesh()):
    assert statistic_names(boxed(kind, names)) == ("embed", None)
    with with_rules(("embed", "fsdp"), ("mlp", "tensor")):
      assert statistic_names(boxed(kind, names)) == names
    with with_rules(("mlp", ("fsdp", "tensor"))):
      assert statistic_names(boxed(kind, names)) == ("embed", None)
    # The last name is kept only if all its rules keep groups whole.
    with with_rules(("mlp", "tensor"), ("mlp", ("fsdp", "tensor"))):
      assert statistic_names(boxed(kind, names)) == ("embed", None)
    with with_rules(("mlp", "heads")):
      assert statistic_names(boxed(kind, names)) == ("embed", None)
    if kind != "linen":
      rules = (("mlp", "fsdp"),)
      param = boxed(kind, names, sharding_rules=rules)
      assert statistic_names(param) == names


def test_sharding_or_spec_keeps_its_type():
  mesh = make_mesh()
  where = NamedSharding(mesh, P("fsdp", "tensor"))
  assert statistic_names(boxed("nnx", where)) == where
  short = statistic_names(boxed("nnx", where, (64, 352)))
  assert short == NamedSharding(mesh, P("fsdp", None))
  with jax.set_mesh(mesh):
    names = statistic_names(boxed("nnx", P("fsdp", "tensor")))
    assert names == P("fsdp", "tensor") and isinstance(names, P)


def test_names_may_omit_the_layer_axis():
  # As in MaxText, names omit the layer axis, which is the second axis here.
  metadata = {"partition_name": "layers", "param_scan_axis": 1}
  with jax.set_mesh(make_mesh()):
    for columns, kept in ((512, "tensor"), (352, None)):
      param = boxed("nnx", ("fsdp", "tensor"), (64, 2, columns), **metadata)
      assert statistic_names(param) == ("fsdp", kept)


def test_scalar_statistics_have_no_names():
  with jax.set_mesh(make_mesh()):
    model = nnx.Linear(
      64, 512, bias_metadata={"out_sharding": ("tensor",)}, rngs=nnx.Rngs(0)
    )
    state = coat_adamw(1e-2).init(nnx.state(model))[0]
    assert state.mu.codes["bias"].get_metadata()["out_sharding"] == ("tensor",)
    assert not state.mu.amax["bias"].get_metadata()["out_sharding"]
    params = {"w": nn.Partitioned(jnp.ones(8), ("tensor",))}
    assert coat_adamw(1e-2).init(params)[0].mu.amax["w"].names == ()


def test_optimizer_sharding_takes_precedence_in_flax():
  metadata = {
    "out_sharding": ("fsdp", None),
    "optimizer_sharding": ("tensor", "fsdp"),
  }
  with jax.set_mesh(make_mesh()):
    model = nnx.Linear(64, 512, kernel_metadata=metadata, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, coat_adamw(1e-2), wrt=nnx.Param)
    amax = optimizer.opt_state[0].mu.amax["kernel"]
    assert amax[...].sharding.spec == P("tensor", "fsdp")
    model = nnx.Linear(64, 352, kernel_metadata=metadata, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, coat_adamw(1e-2), wrt=nnx.Param)
    amax = optimizer.opt_state[0].mu.amax["kernel"]
    assert amax[...].sharding.spec == P("tensor", None)


def test_report_explains_replicated_statistics():
  def report(columns):
    metadata = {"out_sharding": ("fsdp", "tensor")}
    model = nnx.Linear(
      64, columns, kernel_metadata=metadata, use_bias=False, rngs=nnx.Rngs(0)
    )
    optimizer = nnx.Optimizer(model, coat_adamw(1e-2), wrt=nnx.Param)
    return state_report(optimizer.opt_state)["kernel"]

  with jax.set_mesh(make_mesh()):
    row = report(352)
    for name in ("mu", "nu"):
      assert row[name]["replicated"] == (
        "statistics are replicated along 'tensor', which shards codes: "
        "352 columns are 3 groups"
      )
    assert "replicated" not in report(512)["mu"]


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_state_functions_accept_boxes(kind):
  mesh = make_mesh()
  with jax.set_mesh(mesh):
    params = {"w": boxed(kind, ("fsdp", "tensor")), "b": jnp.ones(8)}
    for solver in (
      coat_adamw(1e-2),
      coat_lion(1e-2),
      encoded(optax.lion(1e-2)),
    ):
      state = solver.init(params)
      assert names_of(state_box(state)) == ("fsdp", "tensor")
      like = jax.eval_shape(solver.init, params)
      again = from_plain_state(to_plain_state(state), like)
      assert jax.tree.structure(again) == jax.tree.structure(state)
      again = from_integers(to_integers(state), like)
      assert_same_bits(again, state)
      mapped = optax.tree_utils.tree_map_params(
        solver, lambda x: x, state, transform_non_params=lambda x: x
      )
      assert jax.tree.structure(mapped) == jax.tree.structure(state)
    fused = fused_coat_adamw(1e-2)
    state = fused.init(params)
    new_params, new = jax.jit(fused.apply)(params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert jax.tree.structure(new_params) == jax.tree.structure(params)
  # A step without a mesh does not change names.
  _, new = jax.jit(fused.apply)(params, state, params)
  assert jax.tree.structure(new) == jax.tree.structure(state)


def state_box(state):
  nodes = jax.tree.leaves(
    state, is_leaf=lambda x: isinstance(x, nnx.Variable | nn.Partitioned)
  )
  return [x for x in nodes if jnp.shape(jax.tree.leaves(x)[0]) == (64, 4)][0]


class OwnBox(meta.AxisMetadata):
  """A user's box, whose names our library cannot read."""

  def __init__(self, value):
    self.value = value

  def unbox(self):
    return self.value

  def replace_boxed(self, val):
    return OwnBox(val)

  def add_axis(self, index, params):
    return self

  def remove_axis(self, index, params):
    return self


jax.tree_util.register_pytree_node(
  OwnBox, lambda x: ((x.value,), None), lambda _, values: OwnBox(values[0])
)


def test_unknown_boxes_are_kept_only_around_codes():
  params = {"w": OwnBox(jnp.ones((64, 128)))}
  moment = coat_adamw(1e-2).init(params)[0].mu
  assert isinstance(moment.codes["w"], OwnBox)
  assert isinstance(moment.amax["w"], jax.Array)


def test_flax_is_not_imported_for_plain_trees():
  program = """
import sys, types
sys.modules["flax"] = None
import jax.numpy as jnp
from coat_jax.optimizer.boxes import box_like, last_names
del sys.modules["flax"]
tree = box_like({"w": jnp.ones((8, 8)), "x": None}, [1])
assert tree == {"w": 1, "x": None}
assert last_names({"w": 1}) == [None]
assert "flax" not in sys.modules
"""
  subprocess.run([sys.executable, "-c", program], check=True)


def test_states_of_plain_trees_have_no_boxes():
  params = {"w": jnp.ones((64, 128)), "b": [jnp.ones(3), None]}
  moment = coat_adamw(1e-2, codec=codecs.log8()).init(params)[0].nu
  structure = jax.tree.structure(params)
  for tree in (moment.codes, moment.amax, moment.range):
    assert jax.tree.structure(tree) == structure
  assert np.shape(moment.amax["w"]) == (64, 1)
