# SPDX-License-Identifier: Apache-2.0
"""Tests `fit_group_size` on several leaves."""

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from coat_jax import codecs
from coat_jax.optimizer import fit_group_size


# `shares` has, for each leaf, the number of a row's values that each device
# holds. `size` is the largest group size up to `most` that divides all shares.
@pytest.mark.parametrize(
  "shares, most, size",
  [
    ((96, 64), 128, 32),
    ((64, 96), 128, 32),
    ((96, 64), 24, 16),
    ((256, 512, 384), 128, 128),
    ((48, 80, 112), 128, 16),
  ],
)
def test_group_size_divides_the_share_of_every_leaf(shares, most, size):
  mesh = AbstractMesh((4,), ("fsdp",))
  where = NamedSharding(mesh, jax.P(None, "fsdp"))
  params = {
    f"w{i}": jax.ShapeDtypeStruct((64, 4 * share), "float32", sharding=where)
    for i, share in enumerate(shares)
  }
  assert fit_group_size(codecs.coat(most), params) == codecs.coat(size)
