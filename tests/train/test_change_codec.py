# SPDX-License-Identifier: Apache-2.0
"""Runs that change their codec: moments are decoded and encoded again."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import NamedSharding

from coat_jax.optimizer import sharding, to_plain_state
from tests.matrices import quick
from tests.train.adam_states import assert_same_bytes, encoded, moments
from tests.train.data.streams import numbered
from train import restore, step
from train.mesh import make_mesh, parse_mesh
from train.presets import demo
from train.run.checkpoint import Checkpoints
from train.run.description import describe

SHAPES = {"up": (2, 64, 256), "down": (128, 64), "norm": (64,)}
SPECS = {"up": P(None, "fsdp", "tensor"), "down": P("fsdp"), "norm": P()}


def config(**optim):
  optim = dataclasses.replace(demo().optim, **optim)
  # This is not the default seed, so that tests notice if the default is used.
  return dataclasses.replace(demo(), optim=optim, seed=3, report_state=False)


def abstract_state(config, mesh=None):
  """Returns the abstract state of a model with only a few leaves."""
  init = step.build_optimizer(config).init
  params = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in SHAPES.items()
  }
  make = lambda params: step.TrainState(jnp.int32(0), params, init(params), ())  # noqa: E731
  if mesh is None:
    return jax.eval_shape(make, params)
  where = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
  return sharding.abstract_state(make, params, where)


class Batches:
  def get_state(self):
    return {"next_index": 3}

  def set_state(self, state):
    assert state == {"next_index": 3}


def saved_state(path, config):
  """Saves a state with `moments`; returns them encoded and decoded."""
  abstract = abstract_state(config)
  params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), abstract.params)
  optimizer = encoded(moments(params), config)
  state = step.TrainState(jnp.int32(3), params, optimizer, ())
  checkpoints = Checkpoints(path, keep=3)
  checkpoints.save(3, state, Batches(), describe(config, numbered(1000)))
  checkpoints.close()
  return optimizer, jax.jit(to_plain_state)(optimizer)


def restored(path, config, mesh=None):
  abstract = abstract_state(config, mesh)
  state = restore.restore(path, 3, config, abstract, Batches())
  for leaf, want in zip(
    jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True
  ):
    assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
    assert mesh is None or leaf.sharding == want.sharding
  return state.optimizer


@pytest.mark.parametrize(
  "before, now",
  quick(
    1,
    [
      (dict(codec="log8", group_size=32), dict(codec="coat", second="e5m2")),
      (dict(codec="coat"), dict(codec="coat", group_size=64)),
      (dict(codec="coat"), dict(codec="coat", second="e5m2")),
      (dict(codec="float32"), dict(codec="coat", rounding="nearest")),
      (dict(codec="coat_e8m0"), dict(codec="bfloat16")),
      (dict(codec="coat"), dict(codec="float32")),
    ],
  ),
)
def test_moments_are_decoded_and_encoded_with_the_new_codec(
  tmp_path, before, now
):
  _, adam = saved_state(tmp_path, config(**before))
  after = config(**now)
  assert_same_bytes(restored(tmp_path, after), encoded(adam, after))


def test_new_rounding_mode_keeps_the_codes(tmp_path):
  optimizer, _ = saved_state(tmp_path, config())
  after = config(rounding="nearest")
  found = restored(tmp_path, after)
  assert_same_bytes(jax.tree.leaves(found), jax.tree.leaves(optimizer))
  assert found.mu.codec == after.optim.moment_codec().mu


@pytest.mark.slow
def test_moments_on_a_mesh_are_converted_as_on_one_device(tmp_path):
  saved_state(tmp_path, config(codec="log8", group_size=32))
  after = config(codec="coat", group_size=16)
  expected = restored(tmp_path, after)
  mesh = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2"))
  assert_same_bytes(restored(tmp_path, after, mesh), expected)


@pytest.mark.slow
def test_moments_whose_groups_do_not_fit_the_mesh_are_converted(tmp_path):
  saved_state(tmp_path, config(codec="log8", group_size=96))
  after = config(codec="coat", group_size=16)
  expected = restored(tmp_path, after)
  mesh = make_mesh(parse_mesh("fsdp=4,tensor=2"))
  assert_same_bytes(restored(tmp_path, after, mesh), expected)
  with pytest.raises(ValueError, match="whole groups of 96 values"):
    restored(tmp_path, config(codec="coat", group_size=96), mesh)
