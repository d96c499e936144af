# SPDX-License-Identifier: Apache-2.0
"""Runs the example of training on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from examples import sharded_training


@pytest.fixture(scope="module")
def result(tmp_path_factory):
  return sharded_training.main(tmp_path_factory.mktemp("run"))


@pytest.mark.slow
def test_example_learns_on_both_meshes(result):
  losses = result[2]
  middle = len(losses) // 2
  assert losses[middle] < 0.8 * losses[0]
  assert losses[-1] < 0.8 * losses[middle]


@pytest.mark.slow
def test_checkpoint_is_restored_exactly_on_another_mesh(result):
  saved, restored, _ = result
  leaves = jax.tree.leaves_with_path(saved)
  for (path, x), y in zip(leaves, jax.tree.leaves(restored), strict=True):
    name = jax.tree_util.keystr(path)
    assert x.dtype == y.dtype, name
    x, y = (np.atleast_1d(np.asarray(a)).view(np.uint8) for a in (x, y))
    np.testing.assert_array_equal(x, y, name)
  for state, shape in ((saved, (2, 4)), (restored, (4, 2))):
    moments = state["optimizer"][1][0]
    assert moments.mu.codes["up"].dtype == jnp.float8_e4m3fn
    assert moments.nu.amax["up"].sharding.spec == P(None, None, "fsdp")
    assert moments.nu.amax["down"].sharding.spec == P(None, "fsdp")
    for x in jax.tree.leaves(state):
      assert x.sharding.mesh.devices.shape == shape
    # Check that something was saved, not only zeros.
    assert np.count_nonzero(np.asarray(moments.nu.amax["up"]))
