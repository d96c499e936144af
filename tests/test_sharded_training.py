# SPDX-License-Identifier: Apache-2.0
"""What users copy: the example of training on a mesh, and docs/sharding.md."""

import dataclasses
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P
from jax.sharding import NamedSharding

from coat_jax import codecs, sharding
from coat_jax import recipe as recipes
from coat_jax.layers import GatedMLP
from coat_jax.recipe import MeshAxes
from examples import sharded_training


@pytest.fixture(scope="module")
def result(tmp_path_factory):
  return sharded_training.main(tmp_path_factory.mktemp("run"))


def test_the_example_learns_on_both_meshes(result):
  losses = result[2]
  middle = len(losses) // 2
  assert losses[middle] < 0.8 * losses[0]
  assert losses[-1] < 0.8 * losses[middle]


def test_a_checkpoint_comes_back_bit_for_bit_on_another_mesh(result):
  saved, restored, _ = result
  leaves = jax.tree.leaves_with_path(saved)
  for (path, x), y in zip(leaves, jax.tree.leaves(restored), strict=True):
    name = jax.tree_util.keystr(path)
    assert x.dtype == y.dtype, name
    x, y = (np.atleast_1d(np.asarray(a)).view(np.uint8) for a in (x, y))
    np.testing.assert_array_equal(x, y, name)
  for state, shape in ((saved, (2, 4)), (restored, (4, 2))):
    moments = state["optimizer"][1][0]
    assert moments.mu_codes["up"].dtype == jnp.float8_e4m3fn
    assert moments.nu_amax["up"].sharding.spec == P(None, None, "fsdp")
    assert moments.nu_amax["down"].sharding.spec == P(None, "fsdp")
    for x in jax.tree.leaves(state):
      assert x.sharding.mesh.devices.shape == shape
    # Not zeros: something was saved.
    assert np.count_nonzero(np.asarray(moments.nu_amax["up"]))


def test_the_code_of_the_docs_runs():
  class Model(nnx.Module):
    def __init__(self, rngs):
      out = {"out_sharding": (None, "fsdp")}
      self.up = nnx.Linear(64, 512, kernel_metadata=out, rngs=rngs)
      self.dropout = nnx.Dropout(0.1, rngs=rngs)

  mesh, key = sharded_training.make_mesh(data=2), jax.random.key(0)
  where = {n: NamedSharding(mesh, s) for n, s in sharded_training.SPECS.items()}
  given = vars(sharding) | {
    "checkpointer": types.SimpleNamespace(restore=lambda path, target: target),
    "GatedMLP": GatedMLP,
    "MeshAxes": MeshAxes,
    "codecs": codecs,
    "dataclasses": dataclasses,
    "recipes": recipes,
    "x": jnp.ones((8, 16, 64)),
    "key": key,
    "make_model": lambda: Model(nnx.Rngs(0)),
    "make_params": sharded_training.make_params,
    "mesh": mesh,
    "nnx": nnx,
    "params": jax.device_put(sharded_training.make_params(key), where),
    "path": None,
    "specs": sharded_training.SPECS,
  }
  docs = pathlib.Path(__file__).parent.parent / "docs" / "sharding.md"
  blocks = re.findall("```python\n(.*?)```", docs.read_text(), re.DOTALL)
  assert len(blocks) == 8
  with jax.set_mesh(mesh):
    for block in blocks:
      exec(block, given)
  made = given["opt_state"][0].nu_amax["up"].sharding
  assert made == given["target"]["optimizer"][0].nu_amax["up"].sharding
  assert given["specs_of_state"][0].nu_amax["up"] == P(None, None, "fsdp")
  assert given["codec"] == codecs.coat()
  amax = given["shardings"]["opt_state"][0]["mu_amax"]["up"]["kernel"]
  assert amax.get_value().spec == P(None, "fsdp")
  assert given["y"].sharding.spec == P(("data", "fsdp"))
